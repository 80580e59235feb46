"""The worker that trains: runs a rank's chunks of layers forward and backward, one micro-batch at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from dthpc.parallel.pipeline.links import Size, form_of
from dthpc.parallel.pipeline.schedule import Action, Kind
from dthpc.parallel.pipeline.weights import WeightStore

Loss = Callable[[Any, Any], tuple[Tensor, Any]]
"""Outputs and targets to the sum of losses (scalar) and the number of targets that count."""

_NOTHING: AbstractContextManager[None] = nullcontext()

_MADE_IN_PYTHON: Any = torch._C._FunctionBase
"""Nodes of the graph that a `torch.autograd.Function` made."""


class Gradients(Protocol):
    """Where gradients go; `dthpc.parallel.sharding` has the ones of data parallelism."""

    def forward(self, chunk: int) -> AbstractContextManager[Any]:
        """Around a forward pass of a chunk."""

    def backward(self, chunk: int, last: bool, complete: bool = True) -> AbstractContextManager[Any]:
        """Around a pass that adds gradients to a chunk; `last`: the step's last. `complete`: no other pass of the
        micro-batch follows."""

    def ready(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient that was computed outside autograd."""


class Samples(Protocol):
    """What random numbers of a forward pass depend on; see `dthpc.models.dropout.DropoutStream`."""

    samples: Any


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch; every rank of a pipeline has the same."""

    inputs: Any
    """Of the first stage: a tensor `[rows, …]` or a nest of them."""

    targets: Any
    """Of the loss, likewise."""

    rows: int
    """Samples; may be 0."""

    samples: Any = None
    """Global sample numbers of the rows."""


class ModuleWorker:
    """Runs chunks of layers. `begin` a step, let `execute` walk the actions, then ask for `loss` and `counted`.

    Between a forward pass and its backward pass it holds the graph and the stage's input, not the output.
    """

    def __init__(
        self,
        chunks: Mapping[int, nn.Module],
        stages: int,
        loss: Loss,
        *,
        gradients: Gradients | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] | None = None,
        stream: Samples | None = None,
        store: WeightStore | None = None,
        run_empty: bool = False,
    ) -> None:
        """Take what stays the same over steps.

        Args:
            chunks: this rank's, each under its stage, in the order in which `gradients` numbers them.
            stages: over all ranks.
            loss: of the last stage's outputs.
            gradients: None: each parameter's `.grad` adds up.
            autocast: makes the context of forward passes and losses; None: there is none.
            stream: is told the samples before each pass that may draw random numbers.
            store: keeps weight gradients between `I` and `W` actions; needed where there are some.
            run_empty: whether micro-batches without rows run too, because others wait for collectives in them.
        """
        self._chunks, self._last, self._loss = dict(chunks), stages - 1, loss
        self._numbers = {stage: number for number, stage in enumerate(chunks)}
        self._gradients = gradients if gradients is not None else _Plain()
        self._autocast = autocast if autocast is not None else lambda: _NOTHING
        # Contexts that do nothing take time all the same.
        self._bare_forward, self._bare_backward = gradients is None and autocast is None, gradients is None
        self._stream, self._store, self._run_empty = stream, store, run_empty
        self._differentiate_graph: Any = torch.autograd.Variable._execution_engine.run_backward
        self._batches: Sequence[MicroBatch] = ()
        # What a backward pass starts from: the stage's input, None for the first stage, and the end of the graph, which
        # is the loss or the place of the output; None: nothing to differentiate.
        self._held: dict[tuple[int, int], tuple[Tensor | None, Tensor | GradientEdge | None]] = {}
        self._totals: list[Tensor] = []
        self._counts: list[Any] = []
        self.sizes: Sequence[Size] = ()

    def begin(
        self, batches: Sequence[MicroBatch], actions: Sequence[Action], divisor: Callable[[], float] = lambda: 1.0
    ) -> None:
        """Start a step.

        Args:
            batches: its micro-batches.
            actions: what this rank will do with them.
            divisor: by what sums of losses are divided before they are differentiated; called before the step's
                first backward pass from a loss, and may raise to abandon the step.
        """
        recording = torch.is_grad_enabled()
        self.sizes = [
            Size(batch.rows, (_signature(batch.inputs), recording), batch.rows > 0 or self._run_empty)
            for batch in batches
        ]
        self._batches, self._divisor = batches, divisor
        self._divide_by: float | None = None
        self._share: Tensor | None = None
        self._held.clear()
        self._totals.clear()
        self._counts.clear()
        if self._store is not None:
            self._store.clear()
        self._final = {action.stage: action for action in actions if action.kind is not Kind.F}

    @property
    def loss(self) -> float:
        """Sum of the step's losses; 0 on a rank without the last stage. Waits for the device."""
        return math.fsum(torch.stack(self._totals).tolist()) if self._totals else 0.0

    @property
    def counted(self) -> int:
        """Targets that the step's losses counted."""
        return sum(int(count) for count in self._counts)

    @property
    def held(self) -> int:
        """Forward passes whose graphs are alive."""
        return len(self._held)

    def forward(self, stage: int, micro_batch: int, x: Tensor | None) -> Tensor | None:
        """Run a chunk, and the loss after the last; returns its output `[rows, …]`, detached.

        Raises:
            UserError: the output is nothing that another stage could take.
        """
        if not self.sizes[micro_batch].runs:
            return None
        batch, recording = self._batches[micro_batch], torch.is_grad_enabled()
        if self._stream is not None:
            self._stream.samples = batch.samples
        if x is not None and recording:
            x.requires_grad_()
        if self._bare_forward:
            output = self._run(stage, batch, x)
        else:
            with self._gradients.forward(self._numbers[stage]), self._autocast():
                output = self._run(stage, batch, x)
        if stage == self._last:
            if recording:
                self._held[stage, micro_batch] = x, output
            return None
        if not isinstance(output, Tensor):
            form_of(output, batch.rows, stage)
        if recording:
            self._held[stage, micro_batch] = x, _end(output)
        detached: Tensor = output.detach()
        return detached

    def _run(self, stage: int, batch: MicroBatch, x: Tensor | None) -> Any:
        """A chunk's output; of the last chunk's the loss, which is noted."""
        output = self._chunks[stage](batch.inputs if stage == 0 else x)
        if stage != self._last:
            return output
        total, count = self._loss(output, batch.targets)
        self._totals.append(total.detach().reshape(()))
        self._counts.append(count)
        return total

    def backward(self, stage: int, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """Differentiate a forward pass; returns the gradient of its input."""
        if self._bare_backward:
            return self._differentiate(stage, micro_batch, gradient)
        with self._adding(Kind.B, stage, micro_batch):
            return self._differentiate(stage, micro_batch, gradient)

    def input_backward(self, stage: int, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """As `backward`; linear layers leave the gradients of their weights."""
        assert self._store is not None
        last = self._final[stage] == (Kind.I, stage, micro_batch)
        number = self._numbers[stage]
        with self._gradients.backward(number, last, complete=False), self._store.defer((stage, micro_batch)):
            return self._differentiate(stage, micro_batch, gradient)

    def weight_backward(self, stage: int, micro_batch: int) -> None:
        """Compute the gradients that `input_backward` left."""
        assert self._store is not None
        with torch.no_grad(), self._adding(Kind.W, stage, micro_batch):
            for parameter, gradient in self._store.compute((stage, micro_batch)):
                self._gradients.ready(parameter, gradient)

    def _adding(self, kind: Kind, stage: int, micro_batch: int) -> AbstractContextManager[Any]:
        last = self._final[stage] == (kind, stage, micro_batch)
        return self._gradients.backward(self._numbers[stage], last)

    def _differentiate(self, stage: int, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        if not self.sizes[micro_batch].runs:
            return None
        if self._stream is not None:
            # A layer that is computed again must draw what it drew.
            self._stream.samples = self._batches[micro_batch].samples
        x, end = self._held.pop((stage, micro_batch))
        if end is not None:
            if stage == self._last:
                assert isinstance(end, Tensor)
                gradient = self._share_of(end)
            # As `torch.autograd.backward`, whose own checks in Python take as long again as a small stage's graph; the
            # engine itself checks the gradient's form and place. Without names, which take time to tell apart: do not
            # keep the graph, make none, all leaves, though some be out of reach, add up in `.grad`.
            self._differentiate_graph((end,), (gradient,), False, False, (), True, True)
        if x is None:
            return None
        taken = x.grad
        return taken if taken is not None else torch.zeros_like(x)

    def _share_of(self, total: Tensor) -> Tensor:
        """The gradient of what the step minimises by a sum of losses."""
        if self._divide_by is None:
            self._divide_by = self._divisor()
        share = self._share
        if share is None or share.dtype is not total.dtype or share.shape != total.shape:
            share = self._share = torch.ones_like(total) / self._divide_by
        return share


def _end(output: Tensor) -> Tensor | GradientEdge | None:
    """A stage's output as the place in the graph where its gradient goes in; its memory is free once it is sent."""
    node = output.grad_fn
    if node is None:
        # A parameter may be a stage's output.
        return output if output.requires_grad else None
    if not isinstance(node, _MADE_IN_PYTHON):
        return GradientEdge(node, output.output_nr)
    # Such a node does not keep the graph; that of a view does.
    return GradientEdge(cast(Any, output.view_as(output).grad_fn), 0)


class _Plain:
    """Gradients that add up in `.grad`, for one rank."""

    def forward(self, chunk: int) -> AbstractContextManager[Any]:
        return _NOTHING

    def backward(self, chunk: int, last: bool, complete: bool = True) -> AbstractContextManager[Any]:
        return _NOTHING

    def ready(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad += gradient


def _signature(value: Any) -> Hashable:
    """Everything about inputs that may decide the form of activations, except their rows."""
    if isinstance(value, Tensor):
        return tuple(value.shape[1:])
    if isinstance(value, dict):
        return tuple((key, _signature(inner)) for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_signature(inner) for inner in value)
    return None
