"""What is sent: operands that are cheap to write, whose every result is known, and the count of wrong elements.

Element i of rank r is `PATTERN[(i + 7r) mod 61]`, small whole numbers. So a reduction over any number of ranks has one
of 61 values, which a table tells, and sums are exact in every format as long as they stay below its largest exact whole
number; beyond that, the rounding of the format is allowed for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dthpc.jobs.collectives.terms import SHARED

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
PERIOD, STRIDE = 61, 7
PATTERN = torch.tensor([number * number % PERIOD % 3 + 1 for number in range(PERIOD)], dtype=torch.int64)
"""Values 1 to 3, so that even sums of 8-bit numbers hold those of many ranks; unsigned, as `uint8` wants it."""

_WRONG = 0
"""What results hold before: no result has it."""


@dataclass(frozen=True)
class Case:
    """One operation of one size, as a rank of a group sees it."""

    operation: str
    """One of `dthpc.jobs.collectives.terms.OPERATIONS`."""

    count: int
    """Elements of each rank's share where the operation has shares, else of the whole; as nccl-tests counts."""

    ranks: int
    """Of the group."""

    rank: int
    """Position in the group."""

    dtype: str = "fp32"
    redop: str = "sum"
    in_place: bool = False

    @property
    def total(self) -> int:
        """Elements of the size."""
        return self.count * self.ranks if self.operation in SHARED else self.count

    @property
    def size(self) -> int:
        """Bytes, as nccl-tests counts them."""
        return 0 if self.operation == "barrier" else self.total * DTYPES[self.dtype].itemsize

    @property
    def partner(self) -> int | None:
        """With whom this rank exchanges messages: halves of the group facing each other; None for an odd one out."""
        half = self.ranks // 2
        other = self.rank + half if self.rank < half else self.rank - half
        return other if self.rank < 2 * half else None

    @property
    def is_first_half(self) -> bool:
        """Whether this rank is in the half that sends where messages go one way."""
        return self.rank < self.ranks // 2


def count_of(operation: str, size: int, ranks: int, dtype: str) -> int:
    """Elements (of a share, where the operation has shares) nearest below a size, but at least one."""
    elements = size // DTYPES[dtype].itemsize
    return max(1, elements // ranks if operation in SHARED else elements)


class Arena:
    """Memory for operands and results, taken once and used for all cases, so that no call meets fresh pages."""

    def __init__(self, largest: int, dtype: str, device: torch.device) -> None:
        """Take memory.

        Args:
            largest: bytes of the largest case.
            dtype: of the elements.
            device: where they lie.
        """
        elements = -(-largest // DTYPES[dtype].itemsize)
        self._one = torch.zeros(elements, dtype=DTYPES[dtype], device=device)
        self._other = torch.zeros(elements, dtype=DTYPES[dtype], device=device)

    def lend(self, case: Case) -> tuple[Tensor, Tensor]:
        """Operand and result of a case: parts of the same memory where it works in place."""
        whole, share = case.total, case.count
        mine = slice(case.rank * share, (case.rank + 1) * share)
        if case.operation in ("all_gather", "gather"):
            result = self._other[:whole]
            return (result[mine] if case.in_place else self._one[:share]), result
        if case.operation in ("reduce_scatter", "scatter"):
            operand = self._one[:whole]
            return operand, (operand[mine] if case.in_place else self._other[:share])
        operand = self._one[:whole]
        return operand, (operand if case.in_place else self._other[:whole])


def fill(case: Case, operand: Tensor, result: Tensor) -> None:
    """Write the operand, and what is no result into the result where that is other memory."""
    if not case.in_place or case.operation in ("all_gather", "gather"):
        result.fill_(_WRONG)
    _write(operand, PATTERN, STRIDE * case.rank)


def wrong_elements(case: Case, result: Tensor) -> int:
    """How many elements of this rank's result are not what must come out.

    Args:
        case: what was done.
        result: what came of it.
    """
    name, share = case.operation, case.count
    if name in ("barrier", "ping_pong"):
        return 0
    if name == "all_reduce" or (name == "reduce" and case.rank == 0):
        return _differ(result, _reduced(case), 0, case)
    if name == "reduce_scatter":
        return _differ(result, _reduced(case), case.rank * share, case)
    if name == "broadcast":
        return _differ(result, PATTERN, 0, case)
    if name == "all_gather" or (name == "gather" and case.rank == 0):
        parts = enumerate(split(result, share))
        return sum(_differ(part, PATTERN, STRIDE * source, case) for source, part in parts)
    if name == "scatter":
        return _differ(result, PATTERN, case.rank * share, case)
    if name == "all_to_all":
        parts, offset = enumerate(split(result, share)), case.rank * share
        return sum(_differ(part, PATTERN, offset + STRIDE * source, case) for source, part in parts)
    receives = name == "sendrecv" or (name == "send_recv" and not case.is_first_half)
    if receives and case.partner is not None:
        return _differ(result, PATTERN, STRIDE * case.partner, case)
    return 0


def _reduced(case: Case) -> Tensor:
    """The 61 values of a reduction over all ranks, in fp64 or whole numbers."""
    all_ranks = torch.stack([PATTERN.roll(-STRIDE * rank) for rank in range(case.ranks)])
    if case.redop == "min":
        return all_ranks.amin(0)
    if case.redop == "max":
        return all_ranks.amax(0)
    total = all_ranks.sum(0)
    if not DTYPES[case.dtype].is_floating_point:
        return total.to(DTYPES[case.dtype]).to(torch.int64)  # it wraps as theirs does
    return total.double() / case.ranks if case.redop == "avg" else total


def split(flat: Tensor, elements: int) -> list[Tensor]:
    """Views of so many elements each, and of the rest."""
    return [flat[first : first + elements] for first in range(0, flat.numel(), elements)]


_CHUNK = PERIOD << 14


def _write(flat: Tensor, table: Tensor, offset: int) -> None:
    """`flat[i] = table[(offset + i) mod 61]`."""
    block = _block(table, offset, min(flat.numel(), _CHUNK)).to(flat)
    for part in split(flat, _CHUNK):
        part.copy_(block[: part.numel()])


def _differ(flat: Tensor, table: Tensor, offset: int, case: Case) -> int:
    """Elements that are not `table[(offset + i) mod 61]`, up to the rounding of inexact sums."""
    block = _block(table, offset, min(flat.numel(), _CHUNK)).to(flat.device)
    tolerance = _tolerance(case, table)
    wrong = 0
    for part in split(flat, _CHUNK):
        expected = block[: part.numel()]
        if tolerance == 0:
            wrong += int((part != expected.to(part.dtype)).sum())
        else:
            wrong += int(((part.double() - expected).abs() > tolerance * expected.abs()).sum())
    return wrong


def _block(table: Tensor, offset: int, elements: int) -> Tensor:
    # Chunks are a multiple of the period long, so that all begin with the same element.
    return table.roll(-(offset % PERIOD)).repeat(-(-elements // PERIOD))[:elements]


def _tolerance(case: Case, table: Tensor) -> float:
    dtype = DTYPES[case.dtype]
    if not dtype.is_floating_point:
        return 0.0
    exact = 2 / torch.finfo(dtype).eps
    whole = float(table.abs().max()) * (case.ranks if case.redop == "avg" else 1) <= exact
    divides = case.redop != "avg" or (case.ranks & (case.ranks - 1)) == 0
    return 0.0 if whole and divides else torch.finfo(dtype).eps * case.ranks
