"""Slurm's own ways of writing times, memory sizes, TRES and GRES, as numbers.

What Slurm prints and what sbatch reads differ: a bare `90` is 90 seconds in most outputs but 90 minutes for `--time`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from dthpc.errors import UserError


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


UNLIMITED_WORDS = words("unlimited infinite -1")
ABSENT_WORDS = words("(null) n/a none unknown not_set partition_limit invalid") | {""}

_PRINTED_TIME = re.compile(
    r"(?:(?P<days>\d+)-(?=\d+:\d+:))?(?:(?:(?P<hours>\d+):)?(?P<minutes>\d+):)?(?P<seconds>\d+)(?:\.\d+)?", re.ASCII
)
_TYPED_TIME = re.compile(
    r"(?:(?P<days>\d{1,6})-(?P<day_hours>\d{1,6})(?::(?P<day_minutes>\d{1,6})(?::(?P<day_seconds>\d{1,6}))?)?"
    r"|(?P<hours>\d{1,6}):(?P<minutes>\d{1,6}):(?P<seconds>\d{1,6})"
    r"|(?P<lone_minutes>\d{1,9})(?::(?P<lone_seconds>\d{1,6}))?)",
    re.ASCII,
)
_PRINTED_MEMORY = re.compile(r"(\d+(?:\.\d+)?)([KMGTP]?)[Bnc]?", re.ASCII | re.IGNORECASE)
_TYPED_MEMORY = re.compile(r"(\d{1,15})([KMGT]?)B?", re.ASCII | re.IGNORECASE)
_POWERS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40, "P": 50}
_THOUSANDS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}


def is_absent(text: str) -> bool:
    """Whether Slurm says that there is no value: `(null)`, `N/A`, `Unknown`, …"""
    return text.strip().lower() in ABSENT_WORDS


def time_to_seconds(text: str) -> float:
    """Seconds of a time as Slurm prints it.

    `1-02:03:04`, `02:03:04`, `18:18` (minutes and seconds), `90` (seconds), and `30 sec` of `scontrol show config`.
    `UNLIMITED` is infinity.

    Raises:
        UserError: it is no time.
    """
    word = text.strip()
    if word.lower() in UNLIMITED_WORDS:
        return math.inf
    match = _PRINTED_TIME.fullmatch(re.sub(r"\s*sec$", "", word))
    if match is None:
        raise UserError("is no time as Slurm prints it", key="time", value=repr(text), instead="[D-]HH:MM:SS")
    days, hours, minutes, seconds = (int(match[name] or 0) for name in ("days", "hours", "minutes", "seconds"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def optional_seconds(text: str) -> float | None:
    """As `time_to_seconds`, with `None` where Slurm says that there is no value."""
    return None if is_absent(text) else time_to_seconds(text)


def sbatch_time_to_seconds(text: str, key: str = "cluster.time") -> float:
    """Seconds of a time limit as sbatch reads it: `90` (minutes), `M:SS`, `H:MM:SS`, `D-H`, `D-H:MM`, `D-H:MM:SS`.

    `0` and `UNLIMITED` ask for no limit: infinity. Slurm itself rounds the limit up to whole minutes.

    Raises:
        UserError: sbatch would refuse it.
    """
    word = str(text).strip()
    if word.lower() in UNLIMITED_WORDS:
        return math.inf
    match = _TYPED_TIME.fullmatch(word)
    if match is None:
        raise UserError(
            "is no time that sbatch reads",
            key=key,
            value=text,
            instead="write minutes (90), H:MM:SS (1:30:00) or D-H:MM:SS (2-12:00:00)",
        )
    part = {name: int(digits or 0) for name, digits in match.groupdict().items()}
    hours = part["days"] * 24 + part["day_hours"] + part["hours"]
    minutes = part["day_minutes"] + part["minutes"] + part["lone_minutes"]
    seconds = (hours * 60 + minutes) * 60 + part["day_seconds"] + part["seconds"] + part["lone_seconds"]
    return seconds or math.inf


def seconds_to_time(seconds: float) -> str:
    """A time as Slurm writes it: `[D-]HH:MM:SS`, or `UNLIMITED`."""
    if math.isinf(seconds):
        return "UNLIMITED"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{hours:02d}:{minutes:02d}:{rest:02d}"


def memory_to_bytes(text: str, unit: str = "M") -> int:
    """Bytes of a size as Slurm prints it (`257393M`, `62.50G`, `1631132K`); `unit` is meant where none is written.

    Raises:
        UserError: it is no size.
    """
    match = _PRINTED_MEMORY.fullmatch(text.strip())
    if match is None:
        raise UserError("is no memory size as Slurm prints it", key="memory", value=repr(text), instead="64G")
    return int(float(match[1]) * (1 << _POWERS[(match[2] or unit).upper()]))


def sbatch_memory_to_mb(text: str, key: str = "cluster.memory") -> int:
    """Mebibytes of a size as sbatch reads it: a whole number with K, M (meant where none is written), G or T.

    Raises:
        UserError: sbatch would refuse it.
    """
    match = _TYPED_MEMORY.fullmatch(str(text).strip())
    if match is None:
        raise UserError(
            "is no memory size that sbatch reads",
            key=key,
            value=text,
            instead="write a whole number with K, M, G or T, such as 64G, or 1500M rather than 1.5G",
        )
    size = int(match[1]) << _POWERS[(match[2] or "M").upper()]
    return -(-size // 2**20)


def parse_tres(text: str) -> dict[str, str]:
    """`billing=8,cpu=8,gres/gpu:a100=1,mem=64G` as a dictionary; nothing for `(null)`.

    Raises:
        UserError: an entry is not `name=value`.
    """
    if is_absent(text):
        return {}
    pairs = {}
    for entry in text.strip().split(","):
        name, equals, value = entry.partition("=")
        if not name or not equals:
            raise UserError(f"{entry!r} is not name=value", key="TRES", value=repr(text))
        pairs[name] = value
    return pairs


def gpus_of_tres(tres: dict[str, str]) -> tuple[int, str | None]:
    """GPUs in a TRES record and their type, where exactly one type is named."""
    typed = {name.partition(":")[2]: int(count) for name, count in tres.items() if name.startswith("gres/gpu:")}
    total = int(tres["gres/gpu"]) if "gres/gpu" in tres else sum(typed.values())
    return total, next(iter(typed)) if len(typed) == 1 else None


@dataclass(frozen=True)
class Gres:
    """One generic resource of a node or of a request."""

    name: str
    """`gpu`, `mps`, `shard`, `nic`, …"""

    kind: str | None
    """Type, such as `a100`."""

    count: int
    """How many."""

    index: str | None = None
    """Which ones, as in `(IDX:0-3)`, or which sockets they are near, as in `(S:0-1)`."""


def parse_gres(text: str) -> list[Gres]:
    """The entries of `gpu:a100:4(S:0-1),nic:2`, `gres:gpu:1` or `gres/gpu:2`; nothing for `(null)`.

    Raises:
        UserError: an entry has another form.
    """
    if is_absent(text):
        return []
    # A comma inside parentheses belongs to the entry: `gpu:8(S:0,2)`.
    return [_parse_gres_entry(entry, text) for entry in re.split(r",(?![^(]*\))", text.strip())]


def gpus_of_gres(entries: list[Gres]) -> tuple[int, str | None]:
    """GPUs among generic resources and their type, where exactly one type is named."""
    found = [entry for entry in entries if entry.name == "gpu"]
    kinds = {entry.kind for entry in found}
    return sum(entry.count for entry in found), kinds.pop() if len(kinds) == 1 else None


def _parse_gres_entry(entry: str, text: str) -> Gres:
    match = re.fullmatch(r"(?:gres[:/])?([^():/=]+)((?:[:=][^():]+)*)(?:\((.*)\))?", entry.strip())
    fields = re.split("[:=]", match[2])[1:] if match else []
    count = 1
    if fields and (number := re.fullmatch(r"(\d+)([KMG]?)", fields[-1], re.ASCII)):
        count = int(number[1]) * _THOUSANDS[number[2]]
        fields.pop()
    kinds = [field for field in fields if field != "no_consume"]
    if match is None or len(kinds) > 1:
        raise UserError(f"{entry!r} is no generic resource", key="GRES", value=repr(text), instead="NAME[:TYPE]:COUNT")
    return Gres(match[1], kinds[0] if kinds else None, count, match[3])
