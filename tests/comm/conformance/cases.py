"""Calls of `torch.distributed` as data: what is called, with which tensors, on which group, and how."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "complex64", "complex128", "bool"),
    *("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"),
)
REDUCING = ("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single")
OPERATIONS = (
    *REDUCING,
    *("broadcast", "all_gather", "all_gather_single", "all_gather_coalesced", "gather", "scatter"),
    *("all_to_all", "all_to_all_single", "ring", "any_source", "batch", "barrier", "objects"),
)
UNEVEN = ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all", "all_to_all_single")
"""Operations whose tensors may differ in size from rank to rank."""

LAYOUTS = ("contiguous", "transposed", "strided", "offset")
GROUPS = ("world", "first", "odd", "mesh_rows", "mesh_columns")
"""All ranks; all but the last; every second; the axes of a mesh of 2 columns, which every rank has one of."""


@dataclass(frozen=True)
class Case:
    """One call."""

    operation: str
    dtype: str
    reduction: str
    shape: tuple[int, ...]
    layout: str
    group: str
    uneven: bool
    asynchronous: bool
    root: int
    """Taken modulo the group's size."""

    seed: int


def meaningful(dtype: str, reduction: str) -> bool:
    """Whether a reduction has a meaning for a dtype."""
    if dtype == "bool":
        return reduction != "AVG"
    if dtype.startswith("complex"):
        return reduction in ("SUM", "AVG")  # torch sends the two parts, so a product is none of complex numbers
    if dtype.startswith(("float", "bfloat")):
        return not reduction.startswith("B")
    return not (dtype in ("uint16", "uint32", "uint64") and reduction == "AVG")


def cases(groups: tuple[str, ...]) -> st.SearchStrategy[Case]:
    """Any case on some kinds of groups."""
    reductions = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    kinds = [(dtype, reduction) for dtype in DTYPES for reduction in reductions if meaningful(dtype, reduction)]
    shapes = st.one_of(
        st.just(()),
        st.just((0,)),
        st.tuples(st.integers(1, 9)),
        st.tuples(st.integers(0, 5), st.integers(1, 5)),
        st.just((70, 33)),
        st.just((9000,)),
    )

    def case(drawn: tuple[str, tuple[str, str], tuple[int, ...], str, str, bool, bool, int, int]) -> Case:
        operation, (dtype, reduction), shape, layout, group, uneven, asynchronous, root, seed = drawn
        return Case(
            operation,
            dtype,
            reduction if operation in REDUCING else "",
            shape,
            layout,
            group,
            uneven and operation in UNEVEN,
            asynchronous and operation not in ("objects", "any_source"),
            root,
            seed,
        )

    parts = (st.sampled_from(OPERATIONS), st.sampled_from(kinds), shapes, st.sampled_from(LAYOUTS))
    how = (st.sampled_from(groups), st.booleans(), st.booleans(), st.integers(0, 7), st.integers(0, 2**31))
    return st.tuples(*parts, *how).map(case)
