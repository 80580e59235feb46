"""Sums whose bits do not depend on when summands come."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_into(out: Tensor, summands: list[Tensor], add: bool) -> None:
    """Add tensors in their order, 16-bit floats in fp32 and rounded once; `out` may be the first of them."""
    if out.dtype.is_floating_point and out.dtype.itemsize < 4 and len(summands) + add > 2:
        total = out.float() if add else summands.pop(0).float()
        for other in summands:
            total.add_(other)
        out.copy_(total)
        return
    first, *rest = summands
    if add:
        rest = summands
    elif rest and out.dtype == first.dtype:
        torch.add(first, rest.pop(0), out=out)
    elif out.data_ptr() != first.data_ptr():
        out.copy_(first)
    for other in rest:
        out.add_(other)
