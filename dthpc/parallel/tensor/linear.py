"""Linear layers split over tensor-parallel ranks, with their exchanges inside the layer's own backward pass.

Shoeybi et al. 2019, "Megatron-LM", section 3, and with sequence parallelism Korthikanti et al. 2022, "Reducing
Activation Recomputation in Large Transformer Models", section 4.2. The backward pass of a column layer sends the
input's gradient off before it computes the weights' gradients, so the two overlap; layers that read the same input add
their parts of its gradient first, and send it once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dthpc.parallel.pipeline.weights import WeightStore, weight_gradients
from dthpc.parallel.tensor.axis import TensorAxis


class ColumnLinear(nn.Module):
    """A linear layer of which this rank computes some output features, of the whole sequence.

    Maps `[B, T, in_features]`, or with sequence parallelism `[B, T / tp, in_features]`, to `[B, T, out_features]`,
    where `out_features` counts this rank's. In fp32, or the autocast dtype.
    """

    def __init__(self, axis: TensorAxis, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        """Take the rank's part of the parameters: `[out_features, in_features]` and `[out_features]`."""
        super().__init__()
        self.axis = axis
        self.weight = weight
        self.bias = bias
        self.weight_store: WeightStore | None = None
        """Decides whether weight gradients wait (`dthpc.parallel.pipeline.weights`); None: never."""
        self.shared: SharedInput | None = None
        """The layers that read the same input; None: this one is alone."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        if self.shared is not None:
            return self.shared.output(self, x)
        return column_linear(x, [self], self.axis)[0]

    def extra_repr(self) -> str:
        """Sizes of the part."""
        return f"in_features={self.weight.shape[1]}, out_features={self.weight.shape[0]}, bias={self.bias is not None}"


class RowLinear(nn.Module):
    """A linear layer of which this rank takes some input features; the ranks' products are summed.

    Maps `[B, T, in_features]`, where `in_features` counts this rank's, to `[B, T, out_features]`, or with sequence
    parallelism to `[B, T / tp, out_features]`. In fp32, or the autocast dtype.
    """

    def __init__(self, axis: TensorAxis, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        """Take the rank's part of the weight, `[out_features, in_features]`, and the whole bias."""
        super().__init__()
        self.axis = axis
        self.weight = weight
        self.bias = bias
        self.weight_store: WeightStore | None = None
        """Decides whether weight gradients wait; None: never."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return row_linear(x, self)

    def extra_repr(self) -> str:
        """Sizes of the part."""
        return f"in_features={self.weight.shape[1]}, out_features={self.weight.shape[0]}, bias={self.bias is not None}"


class SharedInput:
    """Column layers that are called with the same tensor, one after the other: the first call computes all."""

    def __init__(self, members: Sequence[ColumnLinear]) -> None:
        self._members = list(members)
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

    def output(self, member: ColumnLinear, x: Tensor) -> Tensor:
        """What `member` gives for `x`; a call with another tensor, or a second one with the same, computes anew."""
        if x is not self._input or id(member) not in self._outputs:
            self._input = x
            outputs = column_linear(x, self._members, member.axis)
            self._outputs = {id(other): out for other, out in zip(self._members, outputs, strict=True)}
        result = self._outputs.pop(id(member))
        if not self._outputs:
            self._input = None
        return result


def column_linear(x: Tensor, layers: Sequence[ColumnLinear], axis: TensorAxis) -> tuple[Tensor, ...]:
    """Outputs of column layers that read the same input, with one exchange for all in each direction.

    Args:
        x: `[B, T, n]`, or with sequence parallelism `[B, T / tp, n]`.
        layers: each with a weight `[m, n]` of its own m.
        axis: the ranks.

    Returns:
        `[B, T, m]` for each layer.
    """
    weights = [layer.weight for layer in layers]
    biases = [layer.bias for layer in layers]
    outputs = _Columns.apply(x, axis, layers, *weights, *biases)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, ...], outputs)


def row_linear(x: Tensor, layer: RowLinear) -> Tensor:
    """Sum over the ranks of `x` `[B, T, n]` times the layer's weight, transposed, plus its bias.

    Returns:
        `[B, T, m]`, or with sequence parallelism this rank's part of the sequence, `[B, T / tp, m]`.
    """
    return cast(Tensor, _Row.apply(x, layer, layer.weight, layer.bias))  # type: ignore[no-untyped-call]


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: TensorAxis, layers: Sequence[ColumnLinear], *parameters: Any
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        dtype = _compute_dtype(x)
        ctx.axis, ctx.layers, ctx.input_dtype = axis, layers, x.dtype
        x = x.to(dtype)
        weights, biases = parameters[: len(layers)], parameters[len(layers) :]
        # Only this rank's part of the sequence is kept: that is what sequence parallelism saves of activations.
        ctx.save_for_backward(x, *weights)
        whole = axis.start_gather(x)() if axis.sequence_parallel else x
        return tuple(
            F.linear(whole, weight.to(dtype), None if bias is None else bias.to(dtype))
            for weight, bias in zip(weights, biases, strict=True)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        axis = ctx.axis
        whole = axis.start_gather(x) if axis.sequence_parallel else lambda: x
        grad_x = _input_gradient(grads, weights, x.dtype) if ctx.needs_input_grad[0] else None
        x = whole()
        reducing = None
        if grad_x is not None:
            reduce = axis.start_reduce_scatter if axis.sequence_parallel else axis.start_all_reduce
            reducing = reduce(grad_x.view(x.shape))
        found = [_parameter_gradients(layer, x, grad) for layer, grad in zip(ctx.layers, grads, strict=True)]
        grad_x = None if reducing is None else reducing().to(ctx.input_dtype)
        return (grad_x, None, None, *(weight for weight, _ in found), *(bias for _, bias in found))


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: RowLinear, weight: Tensor, bias: Tensor | None) -> Tensor:
        axis, dtype = layer.axis, _compute_dtype(x)
        ctx.layer, ctx.input_dtype = layer, x.dtype
        x = x.to(dtype)
        ctx.save_for_backward(x, weight)
        out = F.linear(x, weight.to(dtype))
        out = (axis.start_reduce_scatter if axis.sequence_parallel else axis.start_all_reduce)(out)()
        return out if bias is None else out.add_(bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        axis, bias = ctx.layer.axis, ctx.layer.bias
        whole = axis.start_gather(grad) if axis.sequence_parallel else lambda: grad
        # The bias is added to what this rank has of the sequence, so its gradient never waits for the others'.
        grad_bias = grad.flatten(0, -2).sum(0).to(bias.dtype) if ctx.needs_input_grad[3] else None
        grad = whole()
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = cast(Tensor, _input_gradient([grad], [weight], x.dtype)).view(x.shape).to(ctx.input_dtype)
        return grad_x, None, _parameter_gradients(ctx.layer, x, grad, bias=False)[0], grad_bias


def _compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which autocast would multiply; custom functions must cast for themselves."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def _input_gradient(grads: Sequence[Tensor | None], weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Sum of grad · weight over layers that read the same input, `[rows, n]`; None where no layer has a gradient."""
    total: Tensor | None = None
    for grad, weight in zip(grads, weights, strict=True):
        if grad is None:
            continue
        rows, weight = grad.flatten(0, -2), weight.to(dtype)
        total = rows @ weight if total is None else total.addmm_(rows, weight)
    return total


def _parameter_gradients(
    layer: ColumnLinear | RowLinear, x: Tensor, grad: Tensor | None, *, bias: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of a layer's weight and, if asked for, bias; None for those that do not exist or are to wait."""
    if grad is None:
        return None, None
    added = layer.bias if bias else None
    if layer.weight_store is not None and layer.weight_store.deferring:
        layer.weight_store.keep(layer.weight, added, x, grad)
        return None, None
    return weight_gradients(layer.weight, added, x, grad)
