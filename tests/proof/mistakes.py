"""Classic mistakes of parallel training, to see that the matrix finds them.

Each is made by replacing a function of the real core inside the ranks, for the length of a job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dthpc.comm.collectives import Pending
from dthpc.models import dropout
from dthpc.models.losses import count_targets
from dthpc.parallel import materialize
from dthpc.parallel.model import ParallelModel
from dthpc.parallel.pipeline.worker import ModuleWorker
from dthpc.parallel.sharding.bucket import Bucket
from dthpc.parallel.sharding.norm import Norm
from dthpc.parallel.sharding.reduction import Reduction
from dthpc.parallel.sharding.shards import Shards
from dthpc.parallel.sharding.shared import SharedStorage
from dthpc.parallel.tensor import apply as tensor_apply
from dthpc.parallel.tensor import loss as tensor_loss
from dthpc.train import optim

Made = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Mistake:
    """Something that a training core can do wrong."""

    told: str
    """What."""

    layouts: tuple[str, ...]
    """Some that must tell it apart from one process."""

    made: Made
    """The context in which ranks make it."""


MISTAKES: dict[str, Mistake] = {}


def _mistake(told: str, *layouts: str) -> Callable[[Made], Made]:
    def keep(made: Made) -> Made:
        MISTAKES[made.__name__] = Mistake(told, layouts, made)
        return made

    return keep


# What a step is divided by ------------------------------------------------------------------------------------------


@_mistake("gradients are not divided by the number of targets", "accumulate2", "dp", "tp", "1f1b", "zero3 uneven")
def undivided() -> AbstractContextManager[Any]:
    kept = ModuleWorker.begin

    def begin(self: Any, batches: Any, actions: Any, divisor: Any = lambda: 1.0) -> None:
        kept(self, batches, actions, lambda: divisor() * 0 + 1.0)

    return patch.object(ModuleWorker, "begin", begin)


@_mistake(
    "each rank takes the mean over its own targets, and these are averaged", "dp", "zero1", "zero3", "hsdp uneven"
)
def mean_of_means() -> AbstractContextManager[Any]:
    kept = ParallelModel.forward_backward

    def forward_backward(self: Any, parts: Any, targets: Any, check: Any) -> Any:
        own = sum(int(count_targets(each)) for _, each in parts) * self.layout.dp
        return kept(self, parts, lambda: targets() * 0 + own, check)

    return patch.object(ParallelModel, "forward_backward", forward_backward)


@_mistake("gradients are divided by the degree of data parallelism once more", "dp", "zero1", "zero2 1f1b", "hsdp clip")
def divided_twice() -> AbstractContextManager[Any]:
    kept = Shards.finish_step

    def finish_step(self: Any) -> None:
        kept(self)
        self.scale(1 / (self._mesh.size("replicate") * self._mesh.size("shard")))

    return patch.object(Shards, "finish_step", finish_step)


@_mistake(
    "the loss is added up over tensor-parallel ranks, which all have it whole", "tp", "sp dp", "tp 1f1b", "sp zbv"
)
def loss_counted_twice() -> AbstractContextManager[Any]:
    return patch.object(ParallelModel, "counts_loss", True)


# Sums over ranks ----------------------------------------------------------------------------------------------------


@_mistake(
    "gradients are added over the tensor-parallel ranks instead of the replicas", "dp tp", "hsdp tp", "dp sp 1f1b"
)
def wrong_group() -> AbstractContextManager[Any]:
    kept = Reduction.__init__

    def init(self: Any, *arguments: Any) -> None:
        kept(self, *arguments)
        self._replicas = [self._tensor or channel for channel in self._replicas]

    return patch.object(Reduction, "__init__", init)


@_mistake("a bucket of gradients is not reduced", "dp", "zero1", "dp accumulate2 tied", "zero2 tp", "hsdp 1f1b")
def stale_bucket() -> AbstractContextManager[Any]:
    kept = Reduction.first

    def first(self: Any, bucket: Any) -> Any:
        if any(slot.part.name == "embed.weight" for slot in bucket.slots):
            return None
        return kept(self, bucket)

    return patch.object(Reduction, "first", first)


@_mistake(
    "weights of norms inside sequence parallelism are not added over its ranks", "sp", "sp zero1", "sp 1f1b classic"
)
def sequence_parts_not_added() -> AbstractContextManager[Any]:
    kept = tensor_apply._Splitter.finish

    def finish(self: Any, chunks: Any) -> None:
        self.partial.clear()
        kept(self, chunks)

    return patch.object(tensor_apply._Splitter, "finish", finish)


@_mistake(
    "the gradients of a tied embedding are not exchanged between stages",
    "1f1b tied",
    "zero1 gpipe tied",
    "tp interleaved tied",
)
def tied_not_added() -> AbstractContextManager[Any]:
    return patch.object(Reduction, "_add_tied", lambda *arguments: Pending([]))


@_mistake(
    "updated shards are not gathered",
    "zero1 wire",
    "zero2 wire",
    "zero1 tp wire",
    "zero2 1f1b wire",
    "zero1 bf16s wire",
)
def not_gathered() -> AbstractContextManager[Any]:
    kept = Shards.publish

    def publish(self: Any) -> None:
        channel, self._channel = self._channel, None
        try:
            kept(self)
        finally:
            self._channel = channel

    return patch.object(Shards, "publish", publish)


@_mistake("passes begin before others have written their shares of what ranks hold in common", "zero1", "zero3 bf16s")
def not_awaited() -> AbstractContextManager[Any]:
    kept = ParallelModel._step

    def step(self: Any, optimizer: Any) -> None:
        time.sleep(0.2 * self.mesh.index("shard"))
        kept(self, optimizer)

    stack = ExitStack()
    stack.enter_context(patch.object(ParallelModel, "_step", step))
    stack.enter_context(patch.object(SharedStorage, "end_writing", lambda self: None))
    return stack


@_mistake(
    "a micro-batch's gradients replace those before it", "accumulate2", "dp accumulate4", "1f1b", "zero1 tp accumulate2"
)
def not_accumulated() -> AbstractContextManager[Any]:
    kept = Bucket.receive

    def receive(self: Any, slot: Any, *arguments: Any) -> None:
        slot.filled = False
        kept(self, slot, *arguments)
        slot.parameter.grad = None

    return patch.object(Bucket, "receive", receive)


@_mistake(
    "shards of gradients lie one element beside those of the parameters",
    "zero1",
    "zero2",
    "zero3 tp",
    "hsdp",
    "zero1 bf16s",
)
def wrong_offset() -> AbstractContextManager[Any]:
    kept = Bucket.present

    def present(self: Any) -> None:
        if self.shards > 1:
            self.share.copy_(self.share.roll(1))
        kept(self)

    return patch.object(Bucket, "present", present)


# Norms and updates --------------------------------------------------------------------------------------------------


@_mistake(
    "parts that tensor-parallel ranks all hold count on each of them in the norm",
    "tp",
    "sp clip",
    "tp zero1",
    "tp 1f1b",
)
def norm_counted_twice() -> AbstractContextManager[Any]:
    def counted(self: Any) -> list[tuple[int, int]]:
        return [(0, min(self.count, self.high) - self.low)] if self.count > self.low else []

    return patch.object(Bucket, "counted", property(counted))


@_mistake("the norm is that of the rank's own shard", "zero1", "zero3 clip", "tp", "1f1b clip", "hsdp")
def local_norm() -> AbstractContextManager[Any]:
    return patch.object(Norm, "of", _local_norm)


@_mistake(
    "gradients are clipped by the norm of the rank's own shard", "zero1 clip", "zero3 clip", "tp clip", "1f1b clip"
)
def clipped_by_local_norm() -> AbstractContextManager[Any]:
    kept = ParallelModel.update

    def update(self: Any, optimizer: Any, largest: float | None, **options: Any) -> float:
        if largest is None:
            return kept(self, optimizer, largest, **options)
        everywhere = self.shards.norm().item()
        own = _local_norm(self.shards._norm, self.shards.buckets).item()
        return kept(self, optimizer, largest * everywhere / own, **options)

    return patch.object(ParallelModel, "update", update)


@_mistake(
    "gradients are clipped before the loss scale is divided out",
    "fp16 clip",
    "dp fp16 clip",
    "tp fp16 clip",
    "zero2 fp16s clip",
)
def clipped_while_scaled() -> AbstractContextManager[Any]:
    kept = ParallelModel.update

    def update(self: Any, optimizer: Any, largest: float | None, **options: Any) -> float:
        return kept(self, optimizer, None if largest is None else largest / self.scaler.scale, **options)

    return patch.object(ParallelModel, "update", update)


@_mistake("a flat shard of a matrix is taken for a bias and not decayed", "zero1", "zero2 tp", "zero3", "zero3 1f1b")
def decayed_by_local_shape() -> AbstractContextManager[Any]:
    def groups(pieces: Any, weight_decay: float, no_decay: Any = ()) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [{"params": [], "weight_decay": decay} for decay in (weight_decay, 0.0)]
        for piece in pieces:
            found[piece.tensor.dim() < 2]["params"].append(piece.tensor)
        return found

    return patch.object(optim, "parameter_groups", groups)


# Values and random numbers ------------------------------------------------------------------------------------------


@_mistake("each tensor-parallel rank draws the first values of its part alone", "tp", "sp", "tp zero3", "tp 1f1b")
def drawn_by_part() -> AbstractContextManager[Any]:
    def drawn(whole: Tensor, part: Any) -> Tensor:
        shape = torch.Size(part.local_shape)
        return whole.flatten()[: shape.numel()].view(shape)

    return patch.object(materialize, "slice_of", drawn)


@_mistake(
    "dropout masks belong to rows of a micro-batch, not to samples",
    "dp dropout",
    "accumulate2 dropout",
    "1f1b dropout",
    "zero3 dropout",
)
def masks_by_row() -> AbstractContextManager[Any]:
    kept = dropout.DropoutStream.keys

    def keys(self: Any, name: str, device: torch.device) -> Tensor:
        samples = self.samples
        self.samples = range(len(samples))
        try:
            return kept(self, name, device)
        finally:
            self.samples = samples

    return patch.object(dropout.DropoutStream, "keys", keys)


@_mistake(
    "ranks drop the same places of their parts of the sequence", "sp dropout", "sp zero1 dropout", "sp 1f1b dropout"
)
def masks_by_part() -> AbstractContextManager[Any]:
    def place(x: Tensor, shard: tuple[int, int, int]) -> tuple[int, int, int]:
        dim, _, count = shard
        return dim, 0, count * x.shape[dim]

    return patch.object(dropout, "slice_place", place)


@_mistake(
    "a layer that is computed again draws other dropout masks",
    "1f1b recompute dropout",
    "gpipe selective dropout",
    "dp gpipe recompute dropout",
)
def masks_not_restored() -> AbstractContextManager[Any]:
    kept = ModuleWorker._differentiate

    def differentiate(self: Any, stage: int, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        stream, self._stream = self._stream, None
        try:
            return kept(self, stage, micro_batch, gradient)
        finally:
            self._stream = stream

    return patch.object(ModuleWorker, "_differentiate", differentiate)


# Inside a pass ------------------------------------------------------------------------------------------------------


@_mistake("each rank takes the largest logit of its own share of the vocabulary", "tp", "sp", "tp odd tied", "tp 1f1b")
def maximum_not_shared() -> AbstractContextManager[Any]:
    kept = tensor_loss._exchange

    def exchange(mine: Tensor, axis: Any) -> Any:
        peaks, sums, hits = kept(mine, axis)
        return mine[0].expand_as(peaks), sums, hits

    return patch.object(tensor_loss, "_exchange", exchange)


@_mistake("a stage works on the activations of the micro-batch before", "gpipe", "1f1b", "interleaved", "zb_h1", "zbv")
def wrong_micro_batch() -> AbstractContextManager[Any]:
    kept = ModuleWorker.forward

    def forward(self: Any, stage: int, micro_batch: int, x: Tensor | None) -> Tensor | None:
        if x is not None:
            late = self.__dict__.setdefault("_late", {})
            before, late[stage] = late.get(stage, x), x.detach().clone()
            x = before if before.shape == x.shape else x
        return kept(self, stage, micro_batch, x)

    return patch.object(ModuleWorker, "forward", forward)


@contextmanager
def _alone(norm: Any) -> Iterator[None]:
    """Let a norm ask no other rank."""
    group, norm._group = norm._group, None
    try:
        yield
    finally:
        norm._group = group


_norm_of = Norm.of


def _local_norm(norm: Any, buckets: Any) -> Tensor:
    with _alone(norm):
        return _norm_of(norm, buckets)
