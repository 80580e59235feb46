"""Latency and time a byte from times over sizes; free of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dthpc.jobs.collectives.terms import CostModel


@dataclass(frozen=True)
class Fit:
    """Hockney's model t = α + n·β of a message, through an algorithm's cost."""

    model: str
    """Name of the algorithm whose cost was fitted."""

    alpha_us: float
    """Latency of a message, in µs."""

    alpha_error_us: float
    """Standard error of it."""

    beta_ns_per_kb: float
    """Time a byte, in ns for 1000 bytes: its reciprocal is the bandwidth in TB/s."""

    beta_error_ns_per_kb: float
    """Standard error of it."""

    points: int
    """Sizes that it was fitted to."""

    residual: float
    """Root mean square of the relative deviations of the measured times."""

    @property
    def bandwidth(self) -> float | None:
        """1/β in GB/s; None where no time a byte was found."""
        return 1e3 / self.beta_ns_per_kb if self.beta_ns_per_kb > 0 else None


def fit(model: CostModel, points: Sequence[tuple[float, float]]) -> Fit | None:
    """Fit α and β by least squares of the relative errors: weights 1/t².

    Times of messages span five decades, and their errors grow with them; without weights the largest alone would
    decide. A negative latency or time a byte means nothing: it is set to nought and the other fitted alone.

    Args:
        model: cost of the algorithm.
        points: (bytes, seconds) with positive seconds.

    Returns:
        None for fewer than three different sizes.
    """
    if len({size for size, _ in points}) < 3 or (model.volume and not model.latencies):
        return None
    # Divided by t, every row is to come out as 1: (latencies/t)·α + (volume·n/t)·β = 1.
    rows = [(model.latencies / t, model.volume * size / t) for size, t in points]
    alpha, beta = _solve(rows)
    residuals = [1 - a * alpha - b * beta for a, b in rows]
    free = max(1, len(rows) - (alpha > 0) - (beta > 0))
    variance = sum(r * r for r in residuals) / free
    error_alpha, error_beta = _errors(rows, alpha > 0, beta > 0, variance)
    spread = math.sqrt(sum(r * r for r in residuals) / len(rows))
    return Fit(model.name, alpha * 1e6, error_alpha * 1e6, beta * 1e12, error_beta * 1e12, len(rows), spread)


def _solve(rows: list[tuple[float, float]]) -> tuple[float, float]:
    aa, ab, bb, a1, b1 = _sums(rows)
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        alpha, beta = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
        if alpha >= 0 and beta >= 0:
            return alpha, beta
    only_alpha, only_beta = (a1 / aa if aa else 0.0), (b1 / bb if bb else 0.0)
    errors = [sum((1 - a * x - b * y) ** 2 for a, b in rows) for x, y in ((only_alpha, 0.0), (0.0, only_beta))]
    return (only_alpha, 0.0) if errors[0] <= errors[1] else (0.0, only_beta)


def _errors(rows: list[tuple[float, float]], alpha: bool, beta: bool, variance: float) -> tuple[float, float]:
    """Standard errors from the inverse of the normal matrix; nought for what was not fitted."""
    aa, ab, bb, _, _ = _sums(rows)
    determinant = aa * bb - ab * ab
    if alpha and beta and determinant > 0:
        return math.sqrt(variance * bb / determinant), math.sqrt(variance * aa / determinant)
    return (math.sqrt(variance / aa) if alpha else 0.0), (math.sqrt(variance / bb) if beta else 0.0)


def _sums(rows: list[tuple[float, float]]) -> tuple[float, float, float, float, float]:
    return (
        sum(a * a for a, _ in rows),
        sum(a * b for a, b in rows),
        sum(b * b for _, b in rows),
        sum(a for a, _ in rows),
        sum(b for _, b in rows),
    )
