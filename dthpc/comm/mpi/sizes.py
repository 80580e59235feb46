"""Whether the tensors of one operation fit together."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def same_dtype(tensors: Sequence[Tensor]) -> None:
    """Raise ValueError unless all tensors are of one dtype."""
    if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
        found = sorted({str(tensor.dtype) for tensor in tensors})
        raise ValueError(f"the tensors of one operation must be of one dtype, and not {', '.join(found)}")


def fits(fine: bool, why: str) -> None:
    """Raise ValueError, with the sizes in words, unless they fit."""
    if not fine:
        raise ValueError(f"sizes do not fit: {why}")


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether contiguous tensors have memory in common."""
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes


def shape(tensor: Tensor) -> str:
    """A tensor's dtype and shape in words."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
