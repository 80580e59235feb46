"""The exchanges of tensor and sequence parallelism as differentiable functions.

Each is the conjugate of another: what one does forward, the other does backward (Shoeybi et al. 2019, "Megatron-LM",
section 3: f and g; Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section
4.2.2: g and ḡ along the sequence).

    function            forward                     backward
    reduce              all-reduce                  nothing
    reduce_scatter      reduce-scatter (sequence)   all-gather
    split               this rank's part            all-gather
    gather_whole        all-gather (sequence)       this rank's part
    gather_shares       all-gather (last dim.)      this rank's share

`gather_whole` and `gather_shares` are for what every rank then computes whole, so that all have the whole gradient
already. What goes into split matrices, where each rank's gradient is only a summand, is part of the matrix product's
own function, which overlaps the exchange with arithmetic (`dthpc.parallel.tensor.linear`).

What travels has the dtype of the tensor that is given. Partial sums of a 16-bit matrix product are therefore rounded to
16 bits before they are added, as in Megatron-LM: that adds about one rounding of the size that the product itself has
in a single process, and halves the bytes against sums in fp32.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dthpc.parallel.tensor.axis import TensorAxis


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis) -> Tensor:
        return axis.start_all_reduce(x.clone(memory_format=torch.contiguous_format))()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return axis.start_reduce_scatter(x)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.start_gather(grad)(), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return axis.slice_sequence(x).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.start_gather(grad)(), None


class _GatherWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return axis.start_gather(x)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.slice_sequence(grad), None


class _GatherShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis, total: int) -> Tensor:
        ctx.mine = axis.share(total)
        return axis.gather_shares(x, total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.narrow(-1, *ctx.mine), None, None


def reduce(x: Tensor, axis: TensorAxis) -> Tensor:
    """Sum of the ranks' `x`, of one shape."""
    return cast(Tensor, _Reduce.apply(x, axis))  # type: ignore[no-untyped-call]


def reduce_scatter(x: Tensor, axis: TensorAxis) -> Tensor:
    """Sum of the ranks' `x` `[B, T, …]`, of which each keeps its part of the sequence `[B, T / tp, …]`."""
    return cast(Tensor, _ReduceScatter.apply(x, axis))  # type: ignore[no-untyped-call]


def split(x: Tensor, axis: TensorAxis) -> Tensor:
    """`[B, T, …]`, whole on every rank, to each one's part of the sequence `[B, T / tp, …]`."""
    return cast(Tensor, _Split.apply(x, axis))  # type: ignore[no-untyped-call]


def gather_whole(x: Tensor, axis: TensorAxis) -> Tensor:
    """`[B, T / tp, …]` to `[B, T, …]`, for work that every rank does whole."""
    return cast(Tensor, _GatherWhole.apply(x, axis))  # type: ignore[no-untyped-call]


def gather_shares(x: Tensor, axis: TensorAxis, total: int) -> Tensor:
    """The ranks' shares `[…, n]` of a last dimension to `[…, total]`, for work that every rank does whole."""
    return cast(Tensor, _GatherShares.apply(x, axis, total))  # type: ignore[no-untyped-call]
