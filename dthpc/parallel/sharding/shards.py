"""Parameters, gradients and what an optimizer updates, held and reduced over data-parallel ranks by one mechanism."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from dthpc.comm.collectives import BufferPool
from dthpc.errors import UserError
from dthpc.parallel.mesh import Mesh
from dthpc.parallel.offload import Offload
from dthpc.parallel.parts import Parts, Piece
from dthpc.parallel.sharding.bucket import Bucket
from dthpc.parallel.sharding.gradients import Gradients
from dthpc.parallel.sharding.norm import Norm
from dthpc.parallel.sharding.options import ShardOptions
from dthpc.parallel.sharding.partition import partition
from dthpc.parallel.sharding.reduction import Reduction
from dthpc.parallel.sharding.shared import SharedStorage
from dthpc.parallel.sharding.units import Units
from dthpc.parallel.sharding.unused import Unused

__all__ = ["ShardOptions", "Shards"]


class Shards:
    """Owns the values and gradients of a rank's parameters.

    A step is: `begin_step`; passes within `forward` and `backward`; `finish_step`, after which the pieces' gradients
    are sums over all ranks; the update of the pieces; `publish`. A gradient is a plain sum: divide the loss by the
    global number of targets before the backward pass.

    Without ZeRO or with stage 1, ranks may run any number of passes in a step, also none. With stages 2 and 3 the
    number is the same on all data-parallel ranks; a pass may be over zero rows.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        parts: Parts,
        mesh: Mesh,
        options: ShardOptions,
        offload: Offload | None = None,
    ) -> None:
        """Move the parameters to their storages.

        Args:
            chunks: this rank's chunks of layers; parameters are fp32 and hold their values.
            parts: what each parameter is of the whole model's.
            mesh: this rank's groups.
            options: ZeRO stage and formats.
            offload: where the pieces, and parameter shards, are kept between their uses.

        Raises:
            UserError: PowerSGD is asked for together with ZeRO.
        """
        if options.powersgd_rank and options.zero:
            raise UserError(
                "PowerSGD approximates whole gradients, which ranks with ZeRO do not reduce",
                key="parallel.gradients.powersgd_rank",
                value=options.powersgd_rank,
                instead="parallel.zero=0, or parallel.gradients.dtype=bf16 to halve the bytes under ZeRO",
            )
        self._mesh = mesh
        self._options = options
        shards = mesh.size("shard") if options.zero else 1
        zero = options.zero if shards > 1 else 0
        self._pool = BufferPool()
        self._channel = mesh.channel("shard", self._pool) if shards > 1 else None
        self._shared = SharedStorage(mesh, shards, zero, offload)
        units: Units | None = None
        if zero == 3:
            assert self._channel is not None
            units = Units(chunks, self._channel, keep_last=mesh.size("pp") == 1)
        # Buckets are the same wherever values lie, so that a rank's part of the model follows from the layout alone.
        groups = partition(chunks, parts, options, mesh.layout.dp, units.unit_of if units is not None else None)
        self._units = units if not self._shared.holds_values else None
        index = mesh.index("shard")
        self.buckets = [
            Bucket(kind, members, shards, index, zero, offload, rooms)
            for (kind, members), rooms in zip(groups, self._shared.allocate(groups), strict=True)
        ]
        self._shared.end_writing()
        if self._units is not None:
            self._units.attach(self.buckets)
        self._reduction = Reduction(mesh, shards, options, self.buckets, self._pool)
        self._gradients = Gradients(self.buckets, self._reduction, self._pool, zero >= 2, options.bucket_bytes)
        self._every_pass = zero >= 2
        self._norm = Norm(mesh, shards)
        self._unused = Unused(mesh, options.allow_unused, options.stages_alone)
        self.pieces: list[Piece] = [piece for bucket in reversed(self.buckets) for piece in reversed(bucket.pieces)]

    @property
    def unused(self) -> list[str]:
        """Names of this rank's parameters that got no gradient on any data-parallel rank in the first step."""
        return self._unused.names

    @property
    def holds_in_common(self) -> bool:
        """Whether ranks of a host hold one copy of the parameters among them, each its share, whatever the stage."""
        return self._shared.holds_values

    def begin_step(self) -> None:
        """Start a step: no gradients."""
        self._gradients.begin()

    def forward(self, chunk: int) -> AbstractContextManager[None]:
        """Around a forward pass of a chunk."""
        return nullcontext() if self._units is None else self._units.forward(chunk)

    @contextmanager
    def backward(self, chunk: int, last: bool, complete: bool = True) -> Iterator[None]:
        """Around a backward pass of a chunk.

        Args:
            chunk: its number on this rank.
            last: whether no later pass of the step adds gradients to the chunk.
            complete: whether the micro-batch's gradients are all there after it: false for a pass for the input's
                gradient that one for the weights' follows.
        """
        reduces = last or (complete and self._every_pass)
        gathered = nullcontext() if self._units is None else self._units.backward(chunk)
        with self._gradients.reducing(chunk) if reduces else nullcontext(), gathered:
            yield

    def ready(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Take a gradient that was computed outside autograd; it counts as if it had come from there.

        Args:
            parameter: one of the chunks'; those that are not trained are passed over.
            gradient: of its shape; copied.
        """
        self._gradients.ready(parameter, gradient)

    def finish_step(self) -> None:
        """Make all gradients the sums over all ranks, and give the pieces theirs; collective.

        Raises:
            UserError: in the first step, parameters got no gradient on any rank, and that is not allowed.
        """
        self._unused.ask_once(self.buckets)
        self._shared.end_reading()
        if self._units is not None:
            self._units.release_all()
        self._gradients.finish()
        self._pool.clear()
        self._shared.await_readers()

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Euclidean norm of the whole model's gradient (fp64 scalar), of the same bits on all ranks."""
        return self._norm.of(self.buckets)

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        for bucket in self.buckets:
            if bucket.update is not None:
                bucket.update.mul_(factor)

    def hand_over(self) -> None:
        """Give pieces that are kept elsewhere their gradients; right before the update."""
        for bucket in self.buckets:
            bucket.hand_over()

    @torch.no_grad()
    def publish(self) -> None:
        """After the update of the pieces: make it the parameters' values, on all ranks; collective."""
        pending = []
        for bucket in reversed(self.buckets):
            bucket.round_masters()
            if self._channel is not None and bucket.local is None and not self._shared.holds_values:
                assert bucket.values is not None
                pending.append(self._channel.all_gather(bucket.values, bucket.mine))
            bucket.dismiss()
        for gather in pending:
            gather.wait()
        self._shared.end_writing()

    def abandon_step(self) -> None:
        """Drop what passes since `begin_step` left behind."""
        if self._units is not None:
            self._units.release_all()
        self._gradients.abandon()
        self._pool.clear()

    def extra_state(self) -> dict[str, Tensor]:
        """What a run needs beside parameters and optimizer state to continue bit by bit: PowerSGD's factors and errors.
        It is this rank's own and fits the same layout only; its names and shapes never change."""
        return self._reduction.powersgd.state() if self._reduction.powersgd is not None else {}

    def load_extra_state(self, tensors: dict[str, Tensor]) -> None:
        """Continue from what `extra_state` returned on the same layout."""
        if self._reduction.powersgd is not None:
            self._reduction.powersgd.load(tensors)

    def storage_bytes(self) -> dict[str, int]:
        """Bytes of this rank's live storages: `parameters` (in the format that passes use), `masters` (fp32 copies of
        16-bit ones; part of the optimizer state in the ZeRO paper's count) and `gradients`. Of parameters that ranks of
        a host hold once among them, its share."""
        storages: dict[str, dict[int, int]] = {"parameters": {}, "masters": {}, "gradients": {}}

        def note(kind: str, *tensors: Tensor | None) -> None:
            for tensor in tensors:
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    storages[kind][storage._cdata] = storage.nbytes()

        shared = {"parameters": 0, "gradients": 0}
        for bucket in self.buckets:
            if bucket.rooms.values is not None:
                shared["parameters"] += bucket.nbytes // bucket.shards
            else:
                note("parameters", bucket.local, bucket.values)
            if bucket.values is None:
                note("parameters", *(slot.parameter for slot in bucket.slots))
            note("masters", bucket.masters)
            if bucket.rooms.gradients is not None:
                shared["gradients"] += bucket.nbytes
                note("gradients", bucket.update if bucket.kind.dtype != torch.float32 else None)
            else:
                note("gradients", bucket.full, bucket.share, bucket.update)
        counts = {kind: sum(found.values()) + shared.get(kind, 0) for kind, found in storages.items()}
        counts["gradients"] += self._pool.nbytes
        return counts
