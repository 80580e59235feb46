"""PipeDream: updates in the middle of a step, with stashed weights (Narayanan et al. 2019, "PipeDream: Generalized
Pipeline Parallelism for DNN Training", section 3.3). Another algorithm, not another order of the same.

What it changes, for m micro-batches on p pipeline ranks:

- Each stage updates its weights after each micro-batch's backward pass: m updates a step, not one. Learning rates that
  suit the step's whole batch are for another algorithm.
- The forward pass of a micro-batch meets the newest weights of each stage, which on rank r lack the p - 1 - r updates
  of micro-batches that are still under way. Its backward pass meets the same version: that is what is stashed, so rank
  r holds up to p - r versions beside its weights.
- Stages do not wait for each other, so there is no gradient norm of the whole model to clip by, and a weight cannot be
  tied between ranks.

The pipeline runs empty at the end of each step, so checkpoints, evaluations and resumed runs are as always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dthpc.errors import UserError
from dthpc.parallel.parts import Part
from dthpc.parallel.pipeline.schedule import Action, Kind
from dthpc.parallel.pipeline.worker import MicroBatch, ModuleWorker

Version = dict[nn.Parameter, nn.Parameter]
"""The weights of a chunk as they were, each under the parameter that it is a copy of."""


class StashingWorker(ModuleWorker):
    """The worker of `schedule=pipedream`: gradients go where they always go, once for each micro-batch."""

    update: Callable[[int, int], None]
    """What to do after each backward pass; set it before the first step. Called with stage and micro-batch when the
    micro-batch's gradient has been added; finishes it, updates the stage's parameters in place, and zeroes the
    gradients."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Take what `ModuleWorker` takes."""
        super().__init__(*arguments, **options)
        self._newest: dict[int, Version] = {}
        self._used: dict[tuple[int, int], Version] = {}

    @property
    def versions(self) -> int:
        """Different weights that are stashed now."""
        return len({id(version) for version in (*self._newest.values(), *self._used.values())})

    def begin(
        self, batches: Sequence[MicroBatch], actions: Sequence[Action], divisor: Callable[[], float] = lambda: 1.0
    ) -> None:
        """Start a step; `divisor` gives what each micro-batch's sum of losses is divided by for its own update."""
        self._newest.clear()
        self._used.clear()
        super().begin(batches, actions, divisor)

    def forward(self, stage: int, micro_batch: int, x: Tensor | None) -> Tensor | None:
        """Run a chunk with its newest weights, which are stashed."""
        if not torch.is_grad_enabled():
            return super().forward(stage, micro_batch, x)
        version = self._newest.get(stage)
        if version is None:
            version = self._newest[stage] = _copy(self._chunks[stage])
        self._used[stage, micro_batch] = version
        with _swapped(self._chunks[stage], version):
            return super().forward(stage, micro_batch, x)

    def backward(self, stage: int, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """Differentiate with the weights of the forward pass, then update the newest ones."""
        result = super().backward(stage, micro_batch, gradient)
        self._newest.pop(stage, None)
        self.update(stage, micro_batch)
        return result

    def _adding(self, kind: Kind, stage: int, micro_batch: int) -> AbstractContextManager[Any]:
        return self._gradients.backward(self._numbers[stage], True)

    def _differentiate(self, stage: int, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        version = self._used.pop((stage, micro_batch))
        # Layers that are computed again must meet the old weights too.
        with _swapped(self._chunks[stage], version):
            result = super()._differentiate(stage, micro_batch, gradient)
        for parameter, copy in version.items():
            if copy.grad is not None:
                self._gradients.ready(parameter, copy.grad)
                copy.grad = None
        return result


def check_stash(parts: Iterable[Part]) -> None:
    """Refuse weights that stages would have to update together.

    Raises:
        UserError: a weight is tied between pipeline ranks.
    """
    for part in parts:
        if part.tied_stage_rank is not None:
            raise UserError(
                f"{part.name} is one weight on two pipeline ranks, which pipedream updates at different times",
                key="parallel.schedule",
                value="pipedream",
                instead="model.tie_embeddings=false, or parallel.schedule=1f1b",
            )


def _copy(chunk: nn.Module) -> Version:
    return {p: nn.Parameter(p.detach().clone(), p.requires_grad) for p in chunk.parameters()}


@contextmanager
def _swapped(chunk: nn.Module, version: Version) -> Iterator[None]:
    """Let a chunk compute with other weights; parameters cannot be changed in place while a graph needs them."""
    places = [
        (module, name, parameter)
        for module in chunk.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    try:
        for module, name, parameter in places:
            module._parameters[name] = version[parameter]
        yield
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter
