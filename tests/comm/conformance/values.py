"""The tensors of a case, and what NumPy makes of them.

Values are small whole numbers, so that sums and products of any order are exact in every dtype but fp8, and each
result can be demanded to the bit: in 16 and 8 bits it is the fp32 result rounded once.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import numpy as np
import torch

from tests.comm.conformance.cases import Case

Array = np.ndarray[Any, np.dtype[Any]]
_COMBINE: dict[str, Any] = {
    "SUM": np.add,
    "AVG": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}
_LOGICAL: dict[str, Any] = {"SUM": np.bitwise_or, "PRODUCT": np.bitwise_and}


def shape_of(case: Case, member: int, peer: int = 0) -> tuple[int, ...]:
    """The shape of what `member` gives to `peer`: of its own where the case is uneven."""
    if not case.uneven or not case.shape:
        return case.shape
    rows = (case.shape[0] + member + (2 * peer if case.operation.startswith("all_to_all") else 0)) % 7
    return (rows, *case.shape[1:])


def values(case: Case, member: int, index: int = 0, shape: tuple[int, ...] | None = None) -> Array:
    """The numbers of one tensor, which any rank can compute: int64 or complex128."""
    shape = case.shape if shape is None else shape
    draw = np.random.default_rng([case.seed, member, index])
    if case.dtype == "bool":
        return draw.integers(0, 2, shape)
    low = 0 if case.dtype.startswith("u") else -3
    drawn = draw.integers(low, 4, shape)
    return drawn + 1j * draw.integers(low, 4, shape) if case.dtype.startswith("complex") else drawn


def tensor(case: Case, array: Array) -> torch.Tensor:
    """A tensor of the case's dtype and layout with these numbers."""
    made = empty(case, array.shape)
    made.copy_(torch.from_numpy(np.ascontiguousarray(array)).to(dtype(case)).reshape(array.shape))
    return made


def empty(case: Case, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of the case's dtype and layout with numbers that no result has."""
    if case.layout == "transposed" and len(shape) == 2:
        made = torch.empty(shape[::-1], dtype=dtype(case)).t()
    elif case.layout == "strided" and shape:
        made = torch.empty((*shape[:-1], 2 * shape[-1]), dtype=dtype(case))[..., ::2]
    elif case.layout == "offset":
        made = torch.empty(math.prod(shape) + 3, dtype=dtype(case))[3:].view(shape)
    else:
        made = torch.empty(shape, dtype=dtype(case))
    return made.fill_(True if case.dtype == "bool" else 99)


def dtype(case: Case) -> torch.dtype:
    """torch's dtype of the case."""
    found = getattr(torch, case.dtype)
    assert isinstance(found, torch.dtype)
    return found


def reduced(case: Case, operands: list[Array]) -> torch.Tensor:
    """What a reduction must give, in the order of the ranks."""
    combine = _LOGICAL.get(case.reduction) if case.dtype == "bool" else None
    total = reduce(combine or _COMBINE[case.reduction], operands)
    if case.reduction != "AVG":
        return exact(case, total)
    if "int" in case.dtype:
        return exact(case, np.trunc(total / len(operands)).astype(np.int64))
    if "complex" in case.dtype:
        total = np.asarray(total.astype(np.complex64 if case.dtype == "complex64" else np.complex128))
        total.real /= len(operands)
        total.imag /= len(operands)
        return torch.from_numpy(total)
    wide = np.float64 if case.dtype == "float64" else np.float32
    return torch.from_numpy(np.asarray(total.astype(wide) / wide(len(operands)))).to(dtype(case))


def exact(case: Case, array: Array) -> torch.Tensor:
    """Numbers as a contiguous tensor of the case's dtype, rounded once from fp32 where it is a short float."""
    made = torch.from_numpy(np.ascontiguousarray(array)).reshape(array.shape)
    if dtype(case).is_floating_point and dtype(case).itemsize < 4:
        made = made.to(torch.float32)
    return made.to(dtype(case))
