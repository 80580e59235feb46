"""Gradients that travel as low-rank factors with error feedback: PowerSGD (Vogels et al. 2019), by torch's own hook.

The hook is made for DistributedDataParallel. It is handed buckets that answer what it asks of one of those. Its state
is laid out beforehand, so that it has the same names and shapes in every checkpoint.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from dthpc.parallel.sharding.bucket import Bucket

PLAIN_STEPS = 2
"""Steps before compression begins; the least that the hook allows with error feedback."""


class PowerSGD:
    """Sums buckets over replicas, approximately."""

    def __init__(self, buckets: Sequence[Bucket], group: dist.ProcessGroup, rank: int) -> None:
        """Lay the state out.

        Args:
            buckets: all of a rank's.
            group: the replicas.
            rank: of the approximation.
        """
        self._size = dist.get_world_size(group)
        # Without the epsilon a gradient of zeros would be divided by its norm.
        self._state = PowerSGDState(
            group, matrix_approximation_rank=rank, start_powerSGD_iter=PLAIN_STEPS, orthogonalization_epsilon=1e-8
        )
        self._views = {bucket: _View(bucket, number, len(buckets)) for number, bucket in enumerate(buckets)}
        for bucket, view in self._views.items():
            self._prepare(view.index(), bucket)

    def _prepare(self, number: int, bucket: Bucket) -> None:
        state, device, dtype = self._state, bucket.kind.device, bucket.kind.dtype
        columns = rows = 0
        for slot in bucket.slots:
            height = slot.parameter.shape[0] if slot.parameter.dim() else 1
            width = slot.parameter.numel() // max(1, height)
            rank = min(height, width, state.matrix_approximation_rank)
            if (height + width) * rank * state.min_compression_rate < height * width:
                rows, columns = rows + height * rank, columns + width * rank
        drawn = torch.randn(columns, generator=torch.Generator().manual_seed(number))
        state.error_dict[number] = torch.zeros(bucket.count, dtype=dtype, device=device)
        state.p_memory_dict[number] = torch.zeros(rows, dtype=dtype, device=device)
        state.q_memory_dict[number] = drawn.to(dtype).to(device)

    def reduce(self, buckets: Sequence[Bucket]) -> None:
        """Replace the complete gradients of all buckets by approximations of their sums; one bucket after the other,
        because the hook sends from callbacks whose order would differ between ranks."""
        hook: Any = powerSGD_hook
        holders = sys.getrefcount(self._state.process_group)
        for bucket in buckets:
            hook(self._state, self._views[bucket]).wait()
            bucket.share.mul_(self._size)
        # The hook's callbacks hold the group, and are let go of by threads of the group itself. Were one of them last
        # in holding it, the group would end in its own thread, and with it the process.
        for _ in range(1000):
            if sys.getrefcount(self._state.process_group) <= holders:
                break
            time.sleep(1e-4)

    def state(self) -> dict[str, Tensor]:
        """This rank's own state, by fixed names."""
        tensors = {"powersgd.iteration": torch.tensor(self._state.iter)}
        for kind, held in self._dicts().items():
            tensors.update({f"powersgd.{kind}.{number}": tensor for number, tensor in held.items()})
        return tensors

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Continue from what `state` returned on the same layout."""
        self._state.iter = int(tensors["powersgd.iteration"])
        for kind, held in self._dicts().items():
            for number, tensor in held.items():
                tensor.copy_(tensors[f"powersgd.{kind}.{number}"])

    def _dicts(self) -> dict[str, dict[int, Tensor]]:
        return {
            "error": self._state.error_dict,
            "p": self._state.p_memory_dict,
            "q": self._state.q_memory_dict,
        }


class _View:
    """What the hook asks of a bucket of DistributedDataParallel."""

    def __init__(self, bucket: Bucket, number: int, count: int) -> None:
        self._bucket = bucket
        self._number = number
        self._count = count

    def index(self) -> int:
        return self._number

    def is_last(self) -> bool:
        return self._number == self._count - 1

    def buffer(self) -> Tensor:
        return self._bucket.share

    def gradients(self) -> list[Tensor]:
        return [
            self._bucket.share[slot.start : slot.stop].view(slot.parameter.shape or (1,)) for slot in self._bucket.slots
        ]

    def parameters(self) -> list[nn.Parameter]:
        return [slot.parameter for slot in self._bucket.slots]
