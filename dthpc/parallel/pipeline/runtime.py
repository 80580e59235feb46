"""The one runtime of all layouts: it walks a rank's actions. A single process is a pipeline of one stage: F B F B …"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from dthpc.parallel.pipeline.links import Links, Size
from dthpc.parallel.pipeline.schedule import Action, Kind


class Worker(Protocol):
    """What a rank computes; `ModuleWorker` is the one that trains."""

    @property
    def sizes(self) -> Sequence[Size]:
        """What is known everywhere about the micro-batches of the step."""

    def forward(self, stage: int, micro_batch: int, x: Tensor | None, /) -> Tensor | None:
        """The stage's output, detached; `x` is what the stage before gave, None for the first."""

    def backward(self, stage: int, micro_batch: int, gradient: Tensor | None, /) -> Tensor | None:
        """The gradient of the stage's input, from that of its output, which is None for the last stage."""

    def input_backward(self, stage: int, micro_batch: int, gradient: Tensor | None, /) -> Tensor | None:
        """As `backward`, but the gradients of weights may be left for `weight_backward`."""

    def weight_backward(self, stage: int, micro_batch: int, /) -> None:
        """Compute what `input_backward` left."""


def execute(actions: Sequence[Action], worker: Worker, links: Links) -> None:
    """Carry out one rank's actions; when it returns, everything that the rank sent has been taken.

    Only forward passes are an evaluation: call it under `torch.no_grad`.

    Args:
        actions: this rank's, of a schedule that all ranks follow.
        worker: computes.
        links: carry activations and gradients between stages.

    Raises:
        Exception: what the worker raised, at once; or that a neighbour is gone or has sent nothing for as long as the
            process group waits.
    """
    compute = {Kind.F: worker.forward, Kind.B: worker.backward, Kind.I: worker.input_backward}
    passes = links.begin(actions, worker.sizes)
    try:
        for (kind, stage, micro_batch), need, made in passes:
            if kind is Kind.W:
                worker.weight_backward(stage, micro_batch)
            else:
                links.send(made, compute[kind](stage, micro_batch, links.receive(need)))
        links.finish()
    except BaseException:
        links.abandon()
        raise
