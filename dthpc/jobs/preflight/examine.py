"""The whole examination: every rank measures, the first rank gathers, judges and tells."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dthpc.jobs.preflight.judge import SKEW, NodeReading
from dthpc.jobs.preflight.local import compute, file_system, triad
from dthpc.jobs.preflight.network import Nodes, all_reduce, clock, find_nodes, pairs
from dthpc.jobs.preflight.report import Report
from dthpc.monitor.identity import cpu_model
from dthpc.placement.diagnose import diagnose
from dthpc.placement.diagnose_node import diagnose_node
from dthpc.placement.problem import Problem
from dthpc.placement.read.live import read_live
from dthpc.placement.topology import Topology

if TYPE_CHECKING:
    from dthpc.context import RankContext


@dataclass
class _Found:
    """What one rank found."""

    node: str
    kind: str = ""
    values: dict[str, float] = field(default_factory=dict)
    pairs: dict[str, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def examine(checks: Any, context: RankContext) -> Report:
    """Measure all nodes of this job and compare them; collective.

    Args:
        checks: a `PreflightChecks`.
        context: this rank; `torch.distributed` is initialised.

    Returns:
        The report, the same on every rank.
    """
    start = time.monotonic()
    nodes = find_nodes(context.identity.host)
    found = _Found(nodes.names[nodes.mine])
    if nodes.leads:
        _look(found, checks, context.run.path)
    _measure_alone(found, checks, context.device, nodes)
    if nodes.leads:
        _measure_files(found, checks, context.run.path)
    # All must be done before the network is measured, which others' work would slow.
    dist.barrier()
    group = _measure_together(found, checks, context, nodes)
    return _shared(found, group, checks, nodes, time.monotonic() - start)


def _look(found: _Found, checks: Any, folder: Path) -> None:
    """What the doctor says of this node."""
    topology = read_live()
    found.kind = _kind(topology)
    if not checks.doctor:
        return
    for problem in [*diagnose(topology), *diagnose_node(topology, folder)]:
        if problem.severity in ("error", "warning"):
            (found.errors if problem.severity == "error" else found.warnings).append(_told(problem))


def _told(problem: Problem) -> str:
    return f"{problem.what}: {problem.why}"


def _kind(topology: Topology) -> str:
    """Models of processors and GPUs, without their numbers: a node that has lost a GPU is still one of its kind."""
    models = sorted({gpu.model or gpu.vendor or "GPU" for gpu in topology.gpus or () if gpu.compute})
    return ", ".join([cpu_model() or os.uname().machine, *models])


def _measure_alone(found: _Found, checks: Any, device: torch.device, nodes: Nodes) -> None:
    """Arithmetic and memory, on all ranks of all nodes at once, as a run loads them."""
    cpu = torch.device("cpu")
    places = [(cpu, "cpu_gflops", 1e9, "memory_gb_s")]
    if device.type == "cuda":
        places.append((device, "gpu_tflops", 1e12, "gpu_memory_gb_s"))
    work = int(checks.slowed.get(nodes.names[nodes.mine], 1))
    for place, arithmetic, unit, memory in places:
        if checks.compute_s:
            dist.barrier()
            found.values[arithmetic] = compute(place, checks.compute_s, work) / unit
        if checks.memory_s:
            dist.barrier()
            found.values[memory] = triad(place, checks.memory_s, checks.memory_mb) / 1e9


def _measure_files(found: _Found, checks: Any, folder: Path) -> None:
    for name, where in (("run", folder), ("tmp", Path(tempfile.gettempdir()))):
        try:
            values = file_system(where, checks.files_mb, checks.files)
        except OSError as error:
            found.errors.append(f"{where} can't be written to ({error.strerror})")
            continue
        found.values.update({f"{name}_{key}": value for key, value in values.items()})


def _measure_together(found: _Found, checks: Any, context: RankContext, nodes: Nodes) -> dict[str, float]:
    """The network; returns what is one number for all."""
    # Gloo moves tensors of the host, whatever the rank computes on.
    device = context.device if context.backend == "nccl" else torch.device("cpu")
    if checks.clock_skew_s and len(nodes.names) > 1:
        ahead = clock(nodes, device)
        if nodes.leads:
            found.values[SKEW] = ahead
    if not checks.network_mb or dist.get_world_size() == 1:
        return {}
    elements = checks.network_mb * (1 << 20) // 4
    rate, latency = all_reduce(elements, checks.network_repeats, device)
    if checks.pairs and len(nodes.names) > 1:
        found.pairs = pairs(nodes, elements, checks.network_repeats, checks.pairs, device)
    return {"all_reduce_gb_s": rate / 1e9, "all_reduce_us": latency * 1e6}


def _shared(found: _Found, group: dict[str, float], checks: Any, nodes: Nodes, seconds: float) -> Report:
    """Gather what all found on the first rank, and hand its report to all."""
    first = dist.get_rank() == 0
    every: list[Any] | None = [None] * dist.get_world_size() if first else None
    dist.gather_object(found, every)
    told: list[Any] = [None]
    if first and every is not None:
        told = [Report.of(readings(every, nodes), group, checks, seconds)]
    dist.broadcast_object_list(told, 0)
    report: Report = told[0]
    return report


def readings(found: Sequence[_Found], nodes: Nodes) -> list[NodeReading]:
    """What each node's ranks found, as one reading a node.

    Args:
        found: by rank.
        nodes: of the job.
    """
    return [_reading([found[rank] for rank in ranks]) for ranks in nodes.ranks]


def _reading(ranks: Sequence[_Found]) -> NodeReading:
    values: dict[str, float] = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank.values):
        values[name] = min(rank.values[name] for rank in ranks if name in rank.values)
    rates: dict[str, float] = {}
    for rank in ranks:
        for partner, rate in rank.pairs.items():
            rates[partner] = rates.get(partner, 0.0) + rate
    if rates:
        # A bad node slows all its pairs, and a good one's only where it meets a bad one: the better half speaks.
        values["pair_gb_s"] = sorted(rates.values())[len(rates) // 2] / 1e9
    lead = ranks[0]
    return NodeReading(lead.node, lead.kind, values, tuple(lead.errors), tuple(lead.warnings))
