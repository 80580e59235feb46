"""Mistakes in what a preflight is asked for; free of torch, for the login node."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from dthpc.errors import UserError

TARGET = "dthpc.jobs.preflight.job.run"

_SMALLEST = {
    "compute_s": 0,
    "memory_s": 0,
    "memory_mb": 1,
    "network_mb": 0,
    "network_repeats": 1,
    "pairs": 0,
    "files_mb": 0,
    "files": 0,
    "outlier_z": 0,
    "clock_skew_s": 0,
    "free_gb": 0,
}
_MEASUREMENTS = ("compute_s", "memory_s", "network_mb", "files_mb", "files")
_LARGEST = {"compute_s": 600, "memory_s": 600, "memory_mb": 1 << 16, "network_mb": 1 << 14, "files_mb": 1 << 20}
_SHARES = ("compute_tolerance", "memory_tolerance", "network_tolerance", "files_tolerance")


def check(config: Any) -> list[UserError]:
    """Values that mean nothing, in the job `preflight` and in `resilience.checks`."""
    errors = list(_mistakes("resilience.checks", config.resilience.checks))
    if examines(config):
        errors += _mistakes("job", config.job)
    return errors


def examines(config: Any) -> bool:
    """Whether a configuration runs the job `preflight`, which trains nothing."""
    from omegaconf import OmegaConf

    return not OmegaConf.is_missing(config, "job") and str(config.job.get("_target_")) == TARGET


def _mistakes(key: str, checks: Any) -> Iterator[UserError]:
    for name, smallest in _SMALLEST.items():
        value = checks.get(name)
        if value is not None and not smallest <= value < math.inf:  # nan is not, either
            yield UserError("too small", key=f"{key}.{name}", value=value, instead=f"give at least {smallest}")
    for name, largest in _LARGEST.items():
        value = checks.get(name)
        if value is not None and value > largest:
            yield UserError("too large", key=f"{key}.{name}", value=value, instead=f"give at most {largest}")
    for name in _SHARES:
        value = checks.get(name)
        if value is not None and not 0 < value < 1:
            why = "a share by which a node may fall behind lies between 0 and 1"
            yield UserError(why, key=f"{key}.{name}", value=value, instead=f"{key}.{name}=0.2")
    if not checks.get("doctor") and not any(checks.get(name) for name in _MEASUREMENTS):
        instead = f"{key}.doctor=true, or one of {', '.join(_MEASUREMENTS)} above 0"
        yield UserError("nothing is left to look at", key=f"{key}.doctor", value="false", instead=instead)
    factor = checks.get("two_nodes_factor")
    if factor is not None and not factor > 1:
        why = "of two nodes the slower one must be slower by more than this factor"
        yield UserError(why, key=f"{key}.two_nodes_factor", value=factor, instead=f"{key}.two_nodes_factor=3")
    for node, work in (checks.get("slowed") or {}).items():
        if not work >= 1:
            why = "a node does each product at least once"
            yield UserError(why, key=f"{key}.slowed.{node}", value=work, instead=f"{key}.slowed.{node}=4")
