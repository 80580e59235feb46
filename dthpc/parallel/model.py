"""A model on its mesh: the verbs of a training step, the same for every layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dthpc.data.batches import rows
from dthpc.models.dropout import DropoutStream
from dthpc.parallel.layout import Layout
from dthpc.parallel.mesh import Mesh
from dthpc.parallel.offload import Offload
from dthpc.parallel.outer import OuterStep
from dthpc.parallel.parts import Parts
from dthpc.parallel.pipeline.links import Links
from dthpc.parallel.pipeline.runtime import execute
from dthpc.parallel.pipeline.schedule import Action, Kind, Schedule, actions_of
from dthpc.parallel.pipeline.stash import StashingWorker
from dthpc.parallel.pipeline.worker import MicroBatch, ModuleWorker
from dthpc.parallel.precision import Precision
from dthpc.parallel.scaler import LossScaler
from dthpc.parallel.sharding.shards import Shards

Loss = Callable[[Any, Any], tuple[Tensor, Tensor]]
"""Outputs and targets to the sum of losses (fp32 scalar) and the number of targets that count (int64 scalar)."""

Check = Callable[[Loss, Any], None]
"""Raises where what a loss returned is not what it should be."""


class CheckedLoss:
    """A loss whose results are looked at while `check` is set."""

    def __init__(self, configured: Loss, split: Loss) -> None:
        """Take the loss that the user configured, and the form of it that takes what the last chunk puts out."""
        self._configured, self._split = configured, split
        self.check: Check | None = None

    def __call__(self, outputs: Any, targets: Any) -> tuple[Tensor, Any]:
        """Sum of losses and number of targets."""
        result = self._split(outputs, targets)
        if self.check is not None:
            self.check(self._configured, result)
        return result


@dataclass
class ParallelModel:
    """A rank's part of a model, and how it takes part in a step."""

    chunks: list[nn.Module]
    """The chunks of layers that this rank holds; parameters keep their global names."""

    parts: Parts
    """What each parameter of theirs is of the whole model's."""

    mesh: Mesh
    """Where this rank stands."""

    shards: Shards
    """Parameters, gradients, and the pieces that the optimizer updates."""

    loss: Loss
    """The configured loss, of the whole model's outputs."""

    checked: CheckedLoss
    """The loss as the worker calls it."""

    schedule: Schedule
    """Which stages a rank holds, and in which order it works on them."""

    worker: ModuleWorker
    """Runs the chunks."""

    links: Links
    """To the neighbouring stages."""

    precision: Precision
    """Number formats."""

    scaler: LossScaler
    """Loss scale; 1 for all formats but fp16."""

    dropout: DropoutStream
    """Where masks come from."""

    elements: int
    """Trained parameters of the whole model."""

    micro_batch: int
    """Samples of a pass, at most."""

    passes_of_largest: int
    """Passes of the rank with the largest share of a global batch."""

    offload: Offload
    """Where optimizer state lies, and who updates it there."""

    outer: OuterStep | None = None
    """Meetings of replicas that train by themselves; None: gradients are reduced over all replicas in every step."""

    optimizer: torch.optim.Optimizer | None = field(default=None, init=False)
    """Updates stages in the middle of a step, where the schedule has them do so (`pipedream`)."""

    def __post_init__(self) -> None:
        self._known_actions: dict[int, tuple[Action, ...]] = {}
        if isinstance(self.worker, StashingWorker):
            self.worker.update = self.update_stage

    @property
    def layout(self) -> Layout:
        """The degrees."""
        return self.mesh.layout

    @property
    def module(self) -> nn.Module:
        """The chunks as one module, to look at; its `forward` is of use only without a pipeline."""
        return self.chunks[0] if len(self.chunks) == 1 else nn.ModuleList(self.chunks)

    @property
    def passes(self) -> int | None:
        """Passes that every rank makes in a step, where others wait in them; None: as many as it has work for."""
        return self.passes_of_largest if self.layout.pp > 1 or self.layout.zero >= 2 else None

    @property
    def random_stream(self) -> int:
        """Which random numbers this rank draws: tensor-parallel ranks draw the same ones."""
        return self.layout.dp_rank(self.mesh.rank) * self.layout.pp + self.mesh.index("pp")

    @property
    def counts_loss(self) -> bool:
        """Whether this rank's losses count: all tensor-parallel ranks of the last stage compute the same ones."""
        return self.mesh.index("tp") == 0

    @cached_property
    def buffers(self) -> list[Tensor]:
        """What the chunks keep beside their parameters and save with them, such as running statistics."""
        return [buffer for chunk in self.chunks for buffer in persistent_buffers(chunk)]

    def begin_step(self, step: int, first_sample: int) -> list[Tensor]:
        """Zero the gradients; returns copies of the buffers for `abandon_step`.

        Args:
            step: updates made before.
            first_sample: global number of the first sample of this rank's share.
        """
        self.dropout.step, self._first_sample = step, first_sample
        self.shards.begin_step()
        return [buffer.clone() for buffer in self.buffers]

    def forward_backward(
        self, parts: Sequence[tuple[Any, Any]], targets: Callable[[], int], check: Check | None
    ) -> None:
        """Make the passes of a step; gradients add up in `shards`, and `result` tells the losses.

        Args:
            parts: inputs and targets of the micro-batches.
            targets: number of targets of the global batch; asked before the first backward pass, and may raise.
            check: looks at what the loss returned.
        """
        self.checked.check = check
        plan, actions = self.schedule, self._actions(len(parts))
        # Replicas that train on their own each take the mean over their share of the targets, and so do micro-batches
        # that each make an update.
        share = 1 if self.outer is None else self.mesh.size("replicate")
        share *= len(parts) if plan.stale else 1
        self.worker.begin(self._numbered(parts), actions, lambda: targets() / (self.scaler.scale * share))
        execute(actions, self.worker, self.links)

    def _actions(self, passes: int) -> tuple[Action, ...]:
        """What this rank does in a step of that many passes; made once, as steps are alike."""
        known = self._known_actions.get(passes)
        if known is None:
            plan = self.schedule
            known = actions_of(plan.name, self.mesh.index("pp"), plan.ranks, plan.chunks, passes) if passes else ()
            self._known_actions[passes] = known
        return known

    def result(self) -> tuple[float, int | None]:
        """Sum of the step's losses, and how many targets they counted; None where another stage computes them.

        Waits for the device.
        """
        return self.worker.loss, self.worker.counted if self.holds_last_stage else None

    @property
    def holds_last_stage(self) -> bool:
        """Whether this rank computes losses."""
        return self.layout.stages - 1 in self.stages

    @property
    def stages(self) -> tuple[int, ...]:
        """The pipeline stages that this rank's chunks are."""
        return self.schedule.stages_of(self.mesh.index("pp"))

    @torch.no_grad()
    def evaluate(self, inputs: Any, targets: Any) -> tuple[float, int]:
        """Sum of losses and number of targets of one batch that counts here; collective over a pipeline's ranks."""
        actions = [Action(Kind.F, stage, 0) for stage in sorted(self.stages)]
        self._first_sample, self.checked.check = 0, None
        self.worker.begin(self._numbered([(inputs, targets)]), actions)
        execute(actions, self.worker, self.links)
        return (self.worker.loss, self.worker.counted) if self.counts_loss else (0.0, 0)

    def finish_step(self) -> None:
        """Wait for the gradients' sums, and give every replica the first one's buffers, which are saved."""
        if not self.schedule.stale:
            self.shards.finish_step()
        for axis in ("shard", "replicate") if self.outer is None else ("shard",):
            self._share_buffers(axis)

    def _share_buffers(self, axis: str) -> None:
        group = self.mesh.group(axis)
        if group is not None and self.buffers:
            _broadcast(self.buffers, group)

    def abandon_step(self, copies: list[Tensor]) -> None:
        """Undo what passes since `begin_step` left behind."""
        self.shards.abandon_step()
        for buffer, copy in zip(self.buffers, copies, strict=True):
            buffer.copy_(copy)

    def update_stage(self, stage: int, micro_batch: int) -> None:
        """Update this rank's stage with one micro-batch's gradient, in the middle of a step."""
        assert self.optimizer is not None
        self.shards.finish_step()
        self._step(self.optimizer)
        if micro_batch + 1 < self.passes_of_largest:
            self.shards.publish()
            self.shards.begin_step()

    def update(self, optimizer: torch.optim.Optimizer, largest: float | None, last: bool = False) -> float:
        """Clip the gradients to a global norm, and update the parameters.

        Args:
            optimizer: of the pieces.
            largest: norm to clip to; None: no clipping.
            last: whether it is the run's last update, in which replicas that train by themselves become one.

        Returns:
            The global norm before, the same on all ranks (of replicas that train by themselves: on those of one; of
            stages that were updated in the middle of the step: of their last gradients). Where it is not finite,
            nothing is updated.
        """
        scale = self.scaler.scale
        norm = self.shards.norm().item() / scale
        if self.schedule.stale:
            self.shards.publish()
            return norm
        if self.scaler.update(math.isfinite(norm)):
            clipping = largest / norm if largest is not None and norm > largest else 1.0
            if clipping != scale:
                self.shards.scale(clipping / scale)
            self._step(optimizer)
        elif self.outer is None:
            return norm
        # Replicas meet also where one of them has left its update out.
        if self.outer is not None and self.outer.after_update(self.dropout.step + 1, last):
            self._share_buffers("replicate")
        self.shards.publish()
        return norm

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.offload.active:
            self.shards.hand_over()
        self.offload.step(optimizer)

    def _numbered(self, parts: Sequence[tuple[Any, Any]]) -> list[MicroBatch]:
        batches, first = [], self._first_sample
        for inputs, targets in parts:
            count = rows(inputs)
            batches.append(MicroBatch(inputs, targets, count, range(first, first + count)))
            first += count
        return batches


def persistent_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers that belong to the model's state."""
    saved = model.state_dict().keys()
    return [buffer for name, buffer in model.named_buffers() if name in saved]


def _broadcast(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    source = dist.get_global_rank(group, 0)
    works = [dist.broadcast(tensor.detach(), source, group=group, async_op=True) for tensor in tensors]
    for work in works:
        if work is not None:
            work.wait()
