"""What is slow, and where, in words: against the link's rate, the other links, and an earlier run; free of torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dthpc.jobs.collectives.line import Line
from dthpc.jobs.collectives.links import Slow
from dthpc.jobs.collectives.matrix import Matrix
from dthpc.monitor.units import size

BANDWIDTH_BOUND = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "sendrecv")
"""Operations whose usual algorithms use the whole link for long messages; trees and roots do not."""

LARGE = 1 << 20
"""Bytes from which on bandwidth decides."""

SMALL = 1 << 13
"""Bytes up to which latency decides."""


_TOO_QUICK = 1.5
"""Part of the link's rate from which on something else than the link must have been measured."""


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be."""

    kind: str
    """`wrong`, `link`, `node`, `pair`, `reference`."""

    where: str
    """Node, link, or group and operation."""

    ratio: float | None
    """Reached over expected; None for wrong results."""

    threshold: float | None
    """Below which it is told."""

    words: str
    """One sentence."""

    def to_json(self) -> dict[str, Any]:
        """For `collectives.json`."""
        return asdict(self)


def judge(
    lines: Sequence[Line], matrices: Sequence[Matrix], link_gbps: float | None, reference: Any, threshold: float
) -> list[Finding]:
    """Everything that is wrong or slow, what explains the most first.

    Args:
        lines: all that was measured.
        matrices: of pairs.
        link_gbps: rate of a node's link; None: not known.
        reference: content of `collectives.json` of an earlier run; None: there is none.
        threshold: `job.slow`.
    """
    return [
        *_wrong(lines),
        *(_of_matrix(matrix, slow, threshold) for matrix in matrices for slow in matrix.slow),
        *_pairs_against_link(matrices, link_gbps, threshold),
        *_against_link(lines, link_gbps, threshold),
        *_against_reference(lines, matrices, reference, threshold),
    ]


def doubts(lines: Sequence[Line], link_gbps: float | None) -> list[str]:
    """What is too quick for the link to be true, one sentence for each library."""
    found: dict[str, str] = {}
    for line in lines:
        share = line.link_share(link_gbps)
        if share is not None and share > _TOO_QUICK and line.size >= LARGE:
            found.setdefault(
                line.backend,
                f"{line.backend} reaches {share:.1f} times the link's {link_gbps:g} Gbit/s: it goes another way "
                "(memory that the nodes share, a second network), or the link's rate is another",
            )
    return list(found.values())


def verdict(findings: Iterable[Finding]) -> str:
    """`ok`, `slow`, or `wrong` where results are."""
    kinds = {finding.kind for finding in findings}
    return "wrong" if "wrong" in kinds else "slow" if kinds else "ok"


def _wrong(lines: Sequence[Line]) -> Iterator[Finding]:
    for line in lines:
        if line.wrong:
            where = f"{line.operation} over {line.group} ({line.backend})"
            words = f"{where}: {line.wrong} elements of {size(line.size)} are not what must come out"
            yield Finding("wrong", where, None, None, words)


def _of_matrix(matrix: Matrix, slow: Slow, threshold: float) -> Finding:
    names = [matrix.labels[member] for member in slow.members]
    reached = f"{rate(slow.bandwidth)}, {slow.ratio:.0%} of the {rate(slow.expected)} that the others reach"
    limit = f"(slow below {threshold:.0%})"
    between_nodes = matrix.name == "nodes"
    if slow.kind == "node":
        blame = "its NIC, cable or switch port, or what else the node does" if between_nodes else "its core or memory"
        verb = {"both": "is slow to and from everybody", "sends": "sends slowly to everybody"}
        what = verb.get(slow.direction, "receives slowly from everybody")
        member = names[0] if between_nodes else f"{names[0]} of {matrix.name.removeprefix('ranks of ')}"
        return Finding("node", names[0], slow.ratio, threshold, f"{member} {what}: {reached} {limit}: {blame}")
    arrow = " ↔ " if slow.direction == "both" else " → "
    where = arrow.join(names)
    rest = "both are quick with others: the link or route between them" if len(matrix.labels) > 2 else "this way only"
    return Finding("pair", where, slow.ratio, threshold, f"link {where} is slow: {reached} {limit}; {rest}")


def _pairs_against_link(matrices: Sequence[Matrix], link_gbps: float | None, threshold: float) -> Iterator[Finding]:
    """All pairs alike, and all below the link's rate: no comparison among them tells that."""
    for matrix in matrices:
        if matrix.name != "nodes" or link_gbps is None or not matrix.bandwidth:
            continue
        best = max(matrix.bandwidth.values())
        share = best / (link_gbps / 8)
        if share < threshold:
            words = (
                f"no pair of nodes reaches more than {rate(best)}, {share:.0%} of the link's {link_gbps:g} Gbit/s "
                f"(slow below {threshold:.0%}): the interface, its MTU, or {matrix.backend}"
            )
            yield Finding("link", "all pairs of nodes", share, threshold, words)


def _against_link(lines: Sequence[Line], link_gbps: float | None, threshold: float) -> Iterator[Finding]:
    """The largest size of each operation that can fill the link."""
    largest: dict[tuple[str, str, str], Line] = {}
    for line in lines:
        if line.operation in BANDWIDTH_BOUND and line.size >= LARGE and line.link_share(link_gbps) is not None:
            kept = largest.setdefault((line.backend, line.group, line.operation), line)
            if (line.size, line.algbw) > (kept.size, kept.algbw):
                largest[line.backend, line.group, line.operation] = line
    for (backend, group, operation), line in largest.items():
        share = line.link_share(link_gbps)
        if share is not None and share < threshold:
            words = (
                f"{operation} over {group} ({backend}) of {size(line.size)} uses {share:.0%} of the link's "
                f"{link_gbps:g} Gbit/s (slow below {threshold:.0%})"
            )
            yield Finding("link", f"{operation} over {group} ({backend})", share, threshold, words)


def _against_reference(
    lines: Sequence[Line], matrices: Sequence[Matrix], reference: Any, threshold: float
) -> Iterator[Finding]:
    if reference is None:
        return
    before = {_key(entry): float(entry["p50_us"]) for entry in reference["lines"]}
    ratios: dict[tuple[str, str, str, str], list[float]] = {}
    for line in lines:
        known = before.get(line.key)
        kind = "latency" if line.size <= SMALL else "bandwidth" if line.size >= LARGE else None
        if known and kind:
            ratios.setdefault((line.backend, line.group, line.operation, kind), []).append(known / line.p50_us)
    for (backend, group, operation, kind), found in ratios.items():
        ratio = math.exp(sum(map(math.log, found)) / len(found))
        if ratio < threshold:
            sizes = f"up to {size(SMALL)}" if kind == "latency" else f"from {size(LARGE)} on"
            where = f"{operation} over {group} ({backend})"
            limit = f"(slow from {1 / threshold:.2f} on)"
            words = f"{where} {sizes} takes {1 / ratio:.2f} times as long as in the reference {limit}"
            yield Finding("reference", where, ratio, threshold, words)
    yield from _pairs_against_reference(matrices, reference, threshold)


def _key(entry: dict[str, Any]) -> tuple[Any, ...]:
    names = ("backend", "group", "ranks", "nodes", "operation", "size", "dtype", "redop", "in_place")
    return tuple(entry.get(name) for name in names)


def _pairs_against_reference(matrices: Sequence[Matrix], reference: Any, threshold: float) -> Iterator[Finding]:
    """Links, by the names of their ends."""
    before: dict[tuple[str, str, int, str, str], float] = {}
    for entry in reference.get("pairs", []):
        for sender, row in zip(entry["labels"], entry["bandwidth"], strict=True):
            for receiver, value in zip(entry["labels"], row, strict=True):
                if value:
                    key = (entry["name"], entry["backend"], entry["size"], sender, receiver)
                    before[key] = value
    for matrix in matrices:
        for (a, b), value in matrix.bandwidth.items():
            sender, receiver = matrix.labels[a], matrix.labels[b]
            known = before.get((matrix.name, matrix.backend, matrix.size, sender, receiver))
            if known and value < threshold * known:
                where = f"{sender} → {receiver}"
                words = (
                    f"{where} reaches {rate(value)}, {value / known:.0%} of the {rate(known)} of the reference "
                    f"(slow below {threshold:.0%})"
                )
                yield Finding("reference", where, value / known, threshold, words)


def rate(value: float) -> str:
    """GB/s (10⁹ bytes) with three figures, small ones in MB/s."""
    number, unit = (value, "GB/s") if value >= 0.9995 else (value * 1e3, "MB/s")
    return f"{number:#.3g}".rstrip(".") + f" {unit}"
