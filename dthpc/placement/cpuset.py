"""CPU lists (`0-3,8`), masks (`0xff`, `00000000,000000ff`) and the sets that they stand for."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dthpc.errors import UserError

CpuSet = frozenset[int]
"""Numbers of CPUs (hardware threads) as the operating system counts them."""

MAX_CPUS = 1 << 16
"""Highest CPU number that is believed; Linux itself stops at 8192."""

_SPAN = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9})(?:/(\d{1,9}))?)?)?", re.ASCII)


def parse_cpus(text: str, where: str = "CPU list") -> CpuSet:
    """The CPUs of a list as the kernel, taskset and numactl write it: `0-3,8`, `0-31:2`, `0-31:2/8`, also empty.

    Args:
        text: the list; blanks around its elements are skipped.
        where: what is named in an error.

    Raises:
        UserError: the text has another form, runs backwards, or holds a number that no machine has.
    """
    cpus: set[int] = set()
    for word in text.strip().split(",") if text.strip() else ():
        match = _SPAN.fullmatch(word.strip())
        if match is None:
            raise _refusal(where, text, f"{word!r} is no CPU nor a range of CPUs")
        low, high = int(match[1]), int(match[2] or match[1])
        # With one number the kernel's suffix is a stride, with two it is "used/group": the first `used` of each group.
        used, group = (int(match[3]), int(match[4])) if match[4] else (1, int(match[3] or 1))
        if low > high or high >= MAX_CPUS or not 0 < used <= group:
            raise _refusal(where, text, f"{word!r} is no range of CPUs below {MAX_CPUS:,}")
        cpus.update(cpu for cpu in range(low, high + 1) if (cpu - low) % group < used)
    return frozenset(cpus)


def format_cpus(cpus: Iterable[int]) -> str:
    """The shortest list of the CPUs, ascending: `0-3,8`."""
    spans: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if spans and spans[-1][1] == cpu - 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def parse_mask(text: str, where: str = "CPU mask") -> CpuSet:
    """The CPUs of a mask: `ff`, `0xff`, the kernel's words of 32 bits `00000001,00000000`, and hwloc's
    `0x00000001,,0x0`, where an empty word is nought and `0xf...f` a set without end.

    Raises:
        UserError: the text is no mask, or stands for CPUs without end.
    """
    words = [word.strip().lower() for word in text.strip().split(",")]
    if words[0].endswith("...f") or words[0].endswith("..."):
        raise _refusal(where, text, "the mask stands for CPUs without end")
    value = 0
    for place, word in enumerate(words):
        digits = word.removeprefix("0x")
        # A single word may have any length; in a list of words each holds 32 bits.
        if not re.fullmatch(r"[0-9a-f]*", digits) or (len(words) > 1 and len(digits) > 8) or text.strip() in ("", "0x"):
            raise _refusal(where, text, f"word {place + 1} ({word!r}) is not hexadecimal")
        value = value << 32 | int(digits or "0", 16)
    return _from_bits(value)


def format_mask(cpus: Iterable[int]) -> str:
    """The mask of the CPUs as srun's `--cpu-bind=mask_cpu:` takes it: `0xff`."""
    return hex(sum(1 << cpu for cpu in set(cpus)))


def _from_bits(value: int) -> CpuSet:
    return frozenset(place for place, bit in enumerate(reversed(bin(value)[2:])) if bit == "1")


def _refusal(where: str, text: str, why: str) -> UserError:
    shown = text if len(text) <= 200 else text[:200] + "…"
    return UserError(why, key=where, value=repr(shown), instead="write CPUs as Linux does, such as 0-3,8 or 0xff")
