"""What torch's Gloo back end can't do, so that no case of it is run there. The MPI back end does all cases."""

from __future__ import annotations

from tests.comm.conformance.cases import REDUCING, Case

DTYPES = {
    "all": ("float32", "float64", "float16", "bfloat16", "uint8", "int8", "int32", "int64"),
    "moved": ("float32", "float64", "float16", "bfloat16", "uint8", "int8", "int32", "int64", "bool"),
}
"""Gloo's own dtypes; as booleans it adds bytes, so that a sum of them is none."""

NO_REDUCTION = ("AVG",)
BITS_OF = ("uint8", "int8", "int32", "int64")
CONTIGUOUS_ONLY = True
NOT_UNEVEN = ("all_gather", "gather", "scatter", "reduce_scatter")
"""Operations whose tensors must have one size on all ranks."""


def gloo_can(case: Case) -> bool:
    """Whether Gloo does a case."""
    if case.operation in ("barrier", "objects"):
        return True
    if case.dtype not in DTYPES["all" if case.operation in REDUCING else "moved"]:
        return False
    if case.reduction in NO_REDUCTION or case.layout in ("transposed", "strided"):
        return False
    if case.uneven and case.operation in NOT_UNEVEN:
        return False
    return not (case.operation in GLOO_NEEDS_ROWS and case.shape == ())


GLOO_NEEDS_ROWS = ("all_to_all_single", "all_gather_single", "reduce_scatter_single")
"""Operations that split a tensor along its first dimension, which a number has not."""
