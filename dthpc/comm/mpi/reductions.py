"""Reductions: which of torch's MPI can do with the same meaning, and the others by our own rule.

MPI reduces whole numbers, fp32, fp64 and complex numbers itself. It does not know bf16, fp16 and fp8, and the order of
its comparisons decides what becomes of NaN, so that ranks may end with different bits. These are reduced here, on one
rank per element: operands are taken in the order of the ranks, 16-bit and 8-bit floats are summed and multiplied in
fp32 and rounded once, minimum and maximum give NaN where any rank has NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_SHORT = {torch.float16, torch.bfloat16} | {
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
    if hasattr(torch, name)
}


@dataclass(frozen=True)
class Rule:
    """How one reduction of one dtype is done."""

    name: str
    """`SUM`, `AVG`, …"""

    datatype: Any = None
    """MPI's datatype; None: it is done here."""

    operation: Any = None
    """MPI's operation."""

    combine: Callable[[list[Tensor]], Tensor] | None = None
    """Makes one tensor of all ranks' in their order, which it leaves as they are."""

    before: Callable[[Tensor], Tensor] | None = None
    """What is made of the input first, as a new tensor."""

    after: Callable[[Tensor], object] | None = None
    """What is done to MPI's result in place."""


class Reductions:
    """The rules for one MPI library and a group of `size` ranks."""

    def __init__(self, mpi: Any, size: int) -> None:
        self._size = size
        self._known: dict[tuple[torch.dtype, str], Rule] = {}
        self._datatypes = _datatypes(mpi)
        self._operations = {"SUM": mpi.SUM, "PRODUCT": mpi.PROD, "MIN": mpi.MIN, "MAX": mpi.MAX}
        self._bits = {"BAND": mpi.BAND, "BOR": mpi.BOR, "BXOR": mpi.BXOR}

    def rule(self, dtype: torch.dtype, op: Any) -> Rule:
        """How torch's reduction `op` of a dtype is done.

        Raises:
            ValueError: it has no meaning for the dtype.
        """
        name = _name(op)
        if name == "PREMUL_SUM":
            return self._premultiplied(dtype, op)
        rule = self._known.get((dtype, name))
        if rule is None:
            rule = self._known[dtype, name] = self._make(dtype, name)
        return rule

    def _make(self, dtype: torch.dtype, name: str) -> Rule:
        if dtype == torch.bool:
            return self._logical(name)
        real = dtype.is_floating_point
        if name in self._bits:
            if real or dtype.is_complex:
                raise ValueError(f"{name} works on bits of integers, and the tensor is {dtype}")
            return Rule(name, self._datatype(dtype), self._bits[name])
        if name in ("MIN", "MAX"):
            if dtype.is_complex:
                raise ValueError(f"complex numbers have no order, so there is no {name} of {dtype}")
            if real:
                return Rule(name, combine=_extreme(torch.minimum if name == "MIN" else torch.maximum))
        if dtype in _SHORT:
            return Rule(name, combine=_in_single(name, self._size))
        operation = self._operations["SUM" if name == "AVG" else name]
        return Rule(name, self._datatype(dtype), operation, after=self._divide(dtype) if name == "AVG" else None)

    def _logical(self, name: str) -> Rule:
        """Booleans: a sum says whether any is true, as in NCCL; a product, whether all are."""
        as_bits = {"SUM": "BOR", "MAX": "BOR", "BOR": "BOR", "PRODUCT": "BAND", "MIN": "BAND", "BAND": "BAND"}
        if name == "AVG":
            raise ValueError("there is no AVG of torch.bool")
        return Rule(name, self._datatypes[torch.uint8], self._bits[as_bits.get(name, "BXOR")])

    def _divide(self, dtype: torch.dtype) -> Callable[[Tensor], object]:
        if dtype.is_complex:
            # Part by part: how torch divides complex numbers depends on where they lie, in the last bit.
            return lambda total: torch.view_as_real(total).div_(self._size)
        if dtype.is_floating_point:
            return lambda total: total.div_(self._size)
        return lambda total: total.copy_(torch.div(total, self._size, rounding_mode="trunc"))

    def _premultiplied(self, dtype: torch.dtype, op: Any) -> Rule:
        factor = op.__getstate__()[1]
        total = self._make(dtype, "SUM")
        return Rule(
            "PREMUL_SUM",
            total.datatype,
            total.operation,
            total.combine,
            before=lambda tensor: (tensor * factor).to(dtype),
        )

    def _datatype(self, dtype: torch.dtype) -> Any:
        if dtype not in self._datatypes:
            raise ValueError(f"tensors of {dtype} can be moved, and not reduced")
        return self._datatypes[dtype]


_NAMES: dict[Any, str] = {member: name for name, member in dist.ReduceOp.RedOpType.__members__.items()}


def _name(op: Any) -> str:
    # torch has `ReduceOp.SUM` as a member of an enumeration, and as an object that holds one.
    return _NAMES[getattr(op, "op", op)]


def _datatypes(mpi: Any) -> dict[torch.dtype, Any]:
    return {
        torch.float32: mpi.FLOAT,
        torch.float64: mpi.DOUBLE,
        torch.complex64: mpi.C_FLOAT_COMPLEX,
        torch.complex128: mpi.C_DOUBLE_COMPLEX,
        torch.int8: mpi.INT8_T,
        torch.int16: mpi.INT16_T,
        torch.int32: mpi.INT32_T,
        torch.int64: mpi.INT64_T,
        torch.uint8: mpi.UINT8_T,
        torch.uint16: mpi.UINT16_T,
        torch.uint32: mpi.UINT32_T,
        torch.uint64: mpi.UINT64_T,
    }


def _extreme(choose: Callable[[Tensor, Tensor], Tensor]) -> Callable[[list[Tensor]], Tensor]:
    def combine(parts: list[Tensor]) -> Tensor:
        dtype = parts[0].dtype
        wide = [part.float() for part in parts] if dtype in _SHORT and dtype.itemsize == 1 else parts
        found = wide[0]
        for part in wide[1:]:
            found = choose(found, part)
        return found.to(dtype)

    return combine


def _in_single(name: str, size: int) -> Callable[[list[Tensor]], Tensor]:
    def combine(parts: list[Tensor]) -> Tensor:
        total = parts[0].to(torch.float32, copy=True)
        for part in parts[1:]:
            wide = part if part.itemsize > 1 else part.float()
            total.mul_(wide) if name == "PRODUCT" else total.add_(wide)
        if name == "AVG":
            total.div_(size)
        return total.to(parts[0].dtype)

    return combine
