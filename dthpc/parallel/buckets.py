"""Gradients in flat buckets, summed over the data-parallel ranks while the backward pass still runs.

torch's DistributedDataParallel lays its buckets out anew after the first step of a process, in the order in which the
gradients came. A ring all-reduce adds each element in an order that depends on its place in the bucket, so with three
ranks or more a resumed run differs in the last bits from one that was never stopped (measured). Here the layout is a
function of the parameters alone, and stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class _Bucket:
    """One flat buffer, and the parameters whose gradients are views of it."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        first = parameters[0]
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        pieces = torch.split(self.flat, [p.numel() for p in parameters])
        self.views = [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]
        self.missing = len(parameters)


class GradientBuckets:
    """Owns the gradients of a model: zeroes, sums over ranks, measures and scales them.

    A gradient is a plain sum over the group: divide the loss by the global number of targets before `backward`. Ranks
    may run any number of backward passes in a step, also none; one communication a step is made in any case, and
    parameters that took no part in it count as zero.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None, bucket_bytes: int = 25 << 20
    ) -> None:
        """Make the buckets and attach the gradients.

        Args:
            parameters: those to train; gradients are expected roughly in the reverse of this order.
            group: the data-parallel ranks; None for a single process.
            bucket_bytes: a bucket is closed when it holds as much. The first one to be ready is smaller, so that
                communication starts early.
        """
        self._group = group if group is not None and dist.get_world_size(group) > 1 else None
        self._buckets = [_Bucket(part) for part in _partition(list(parameters), bucket_bytes)]
        self._reducing = False
        self._launched = 0
        self._works: list[Any] = []
        self.zero()
        if self._group is not None:
            for bucket in self._buckets:
                for parameter in bucket.parameters:
                    parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                        partial(self._on_gradient, bucket)
                    )

    @property
    def flat(self) -> list[Tensor]:
        """The buckets' buffers, which together hold every gradient once."""
        return [bucket.flat for bucket in self._buckets]

    def zero(self) -> None:
        """Start a step: all gradients zero, and in their buckets."""
        for bucket in self._buckets:
            bucket.flat.zero_()
            bucket.missing = len(bucket.parameters)
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view
        self._launched = 0

    @contextmanager
    def last_backward(self, last: bool = True) -> Iterator[None]:
        """Around a backward pass: the step's last one sends each bucket off as soon as it is complete."""
        self._reducing = last
        try:
            yield
        finally:
            self._reducing = False

    def finish(self) -> None:
        """End a step's backward passes: send off what is left, and wait until every gradient is the group's sum."""
        if self._group is None:
            return
        self._launch(len(self._buckets))
        for work in self._works:
            work.wait()
        self._works.clear()

    def norm(self) -> Tensor:
        """Euclidean norm over all gradients (fp32 scalar); call it after `finish`."""
        norms = torch.stack([torch.linalg.vector_norm(flat) for flat in self.flat])
        total: Tensor = torch.linalg.vector_norm(norms)
        return total

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        for flat in self.flat:
            flat.mul_(factor)

    def _on_gradient(self, bucket: _Bucket, _parameter: Tensor) -> None:
        if not self._reducing:
            return
        bucket.missing -= 1
        # Every rank must send the buckets in the same order, so a complete one waits for those before it.
        ready = self._launched
        while ready < len(self._buckets) and self._buckets[ready].missing == 0:
            ready += 1
        self._launch(ready)

    def _launch(self, end: int) -> None:
        for bucket in self._buckets[self._launched : end]:
            self._works.append(dist.all_reduce(bucket.flat, group=self._group, async_op=True))
        self._launched = max(self._launched, end)


def _partition(parameters: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Parameters in reverse order, cut into buckets of one dtype and device each."""
    parts: list[list[nn.Parameter]] = []
    filled = 0
    limit = min(bucket_bytes, 1 << 20)
    for parameter in reversed([p for p in parameters if p.requires_grad]):
        size = parameter.numel() * parameter.element_size()
        fits = bool(parts) and _kind(parts[-1][0]) == _kind(parameter)
        if not fits or filled >= limit:
            if parts:
                limit = bucket_bytes
            parts.append([])
            filled = 0
        parts[-1].append(parameter)
        filled += size
    return parts


def _kind(parameter: nn.Parameter) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device
