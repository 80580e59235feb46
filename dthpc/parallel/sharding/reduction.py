"""How a bucket's gradients become sums: over data-parallel ranks, then where a part asks for more."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dthpc.comm.collectives import BufferPool, Pending, all_reduce, reduce_scatter, swap
from dthpc.parallel.mesh import Mesh
from dthpc.parallel.sharding.bucket import Bucket
from dthpc.parallel.sharding.options import ShardOptions
from dthpc.parallel.sharding.powersgd import PowerSGD


class Reduction:
    """The stages of a sum. The first can travel while the backward pass still runs; the others follow it."""

    def __init__(
        self, mesh: Mesh, shards: int, options: ShardOptions, buckets: Sequence[Bucket], pool: BufferPool
    ) -> None:
        """Prepare.

        Args:
            mesh: this rank's groups.
            shards: ranks that divide a bucket among them: the degree of `shard`, or 1.
            options: in which form gradients travel.
            buckets: all of them.
            pool: room for what is on its way.
        """
        self._mesh = mesh
        self._pool = pool
        self._travel = options.gradient_dtype
        self._shard = mesh.group("shard") if shards > 1 else None
        # Without shards, ranks on that axis are replicas too.
        axes = ("replicate",) if shards > 1 else ("shard", "replicate")
        groups = [(axis, mesh.group(axis)) for axis in axes]
        self._replicas = [group for _, group in groups if group is not None]
        self.powersgd: PowerSGD | None = None
        if options.powersgd_rank and self._shard is None and self._replicas:
            (group,) = self._replicas
            self.powersgd = PowerSGD(buckets, group, options.powersgd_rank)

    def first(self, bucket: Bucket) -> Pending | None:
        """Start the first stage on complete full gradients; None where there is nothing to sum."""
        assert bucket.full is not None
        if self._shard is not None:
            return self._scatter(bucket, bucket.full, self._shard)
        if self._replicas and self.powersgd is None:
            return self._sum(bucket.share, self._replicas[0])
        return None

    def rest(self, buckets: Sequence[Bucket]) -> None:
        """Make the other stages, one after the other over all buckets."""
        if self.powersgd is not None:
            self.powersgd.reduce(buckets)
        replicas = self._replicas if self._shard is not None else self._replicas[1:]
        for group in replicas:
            _wait([self._sum(bucket.share, group) for bucket in buckets])
        tensor = self._mesh.group("tp")
        if tensor is not None:
            _wait([all_reduce(bucket.share, tensor) for bucket in buckets if bucket.kind.partial])
        pipeline = self._mesh.group("pp")
        if pipeline is not None:
            _wait([self._add_tied(bucket, pipeline) for bucket in buckets if bucket.kind.tied is not None])

    def _scatter(self, bucket: Bucket, full: Tensor, group: dist.ProcessGroup) -> Pending:
        add, bucket.summed = bucket.every_pass and bucket.summed, True
        sent, borrowed = self._for_travel(full), bucket.every_pass and not bucket.adopted
        pending = reduce_scatter(bucket.share, sent, group, add=add, pool=self._pool)

        def give_back() -> None:
            if sent is not full:
                self._pool.give(sent)
            if borrowed:
                self._pool.give(full)

        return Pending([pending], give_back)

    def _sum(self, flat: Tensor, group: dist.ProcessGroup) -> Pending:
        sent = self._for_travel(flat)
        pending = all_reduce(sent, group)
        if sent is flat:
            return pending

        def unpack() -> None:
            flat.copy_(sent)
            self._pool.give(sent)

        return Pending([pending], unpack)

    def _for_travel(self, flat: Tensor) -> Tensor:
        if self._travel is None or flat.dtype != torch.float32:
            return flat
        return self._pool.take(flat.numel(), self._travel, flat.device).copy_(flat)

    def _add_tied(self, bucket: Bucket, group: dist.ProcessGroup) -> Pending:
        assert bucket.kind.tied is not None
        share = bucket.share
        theirs = self._pool.take(share.numel(), share.dtype, share.device)
        pending = swap(theirs, share, group, bucket.kind.tied)

        def add() -> None:
            share.add_(theirs)
            self._pool.give(theirs)

        return Pending([pending], add)


def _wait(pending: list[Pending]) -> None:
    for one in pending:
        one.wait()
