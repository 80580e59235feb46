"""What is decided: for each rank of a node its GPU, cores, memory nodes and NICs, each with the reason in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dthpc.placement.cpuset import CpuSet, format_cpus
from dthpc.placement.topology import Gpu, GpuPart, Nic


@dataclass(frozen=True)
class Unit:
    """What a rank can be given of the GPUs: a whole one, or a piece of one."""

    gpu: Gpu
    part: GpuPart | None = None

    @property
    def name(self) -> str:
        """`GPU3`, its tile `GPU3.1`, its MIG instance `GPU3/MIG1`."""
        if self.part is None:
            return self.gpu.key
        return f"{self.gpu.key}{'.' if self.part.kind == 'tile' else '/MIG'}{self.part.index}"

    @property
    def place(self) -> tuple[int, str, int]:
        """Key of the order in which units are dealt: by the index of the vendor's tools."""
        index = 1 << 30 if self.gpu.index is None else self.gpu.index
        return index, self.gpu.bus_id or self.gpu.key, -1 if self.part is None else self.part.index

    def to_json(self) -> dict[str, Any]:
        """What names it."""
        gpu, part = self.gpu, self.part
        found = {"name": self.name, "index": gpu.index, "bus_id": gpu.bus_id, "uuid": part.uuid if part else gpu.uuid}
        return {key: value for key, value in found.items() if value is not None}


@dataclass(frozen=True)
class NicChoice:
    """One NIC of a rank."""

    nic: Nic
    level: str | None
    """How near it is to the rank's GPU (or to its cores), as nvidia-smi says it; `SYS`: not near."""

    ports: tuple[int, ...] = ()
    """Its ports to use where it has several; empty: it has one, or nobody told."""

    @property
    def near(self) -> bool:
        """Whether it is nearer than another memory node's NICs."""
        return self.level not in (None, "SYS")


@dataclass(frozen=True)
class RankPlace:
    """Where one rank of a node runs."""

    local_rank: int
    units: tuple[Unit, ...] = ()
    """Its GPUs."""

    cpus: CpuSet | None = None
    """CPUs that it may run on; `None`: the topology tells none, so that it is bound to none."""

    compute: CpuSet | None = None
    """Those of them on which its numeric threads run."""

    helpers: CpuSet | None = None
    """Those of them that data loading and communication threads have for themselves; may be empty."""

    cores: int = 0
    """Number of whole cores among `cpus`; 0 where it shares one with other ranks."""

    near: CpuSet | None = None
    """All CPUs nearest to its GPU, of which `cpus` is its share."""

    memory: tuple[int, ...] | None = None
    """Memory nodes to take pages from."""

    nics: tuple[NicChoice, ...] = ()
    why: Mapping[str, str] = field(default_factory=dict)
    """The reason for each of `gpu`, `cores`, `memory` and `nic`."""

    @property
    def compute_cores(self) -> int:
        """Number of numeric threads that suit it."""
        return max(1, len(self.compute or ()))

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json` and for the run's records."""
        return {
            "local_rank": self.local_rank,
            "gpus": [unit.to_json() for unit in self.units],
            "cpus": _text(self.cpus),
            "compute": _text(self.compute),
            "helpers": _text(self.helpers),
            "near_cpus": _text(self.near),
            "memory": None if self.memory is None else list(self.memory),
            "nics": [
                {"name": c.nic.name, "level": c.level, **({"ports": list(c.ports)} if c.ports else {})}
                for c in self.nics
            ],
            "why": dict(self.why),
        }


@dataclass(frozen=True)
class NodePlan:
    """The places of all ranks of one node, or of each of several nodes alike."""

    places: tuple[RankPlace, ...]
    """By local rank."""

    spare: CpuSet = frozenset()
    """CPUs that no rank has and that are not reserved."""

    reserved: CpuSet = frozenset()
    """CPUs left alone on request."""

    crowded: bool = False
    """Whether several ranks share a core."""

    by_gpu: bool = False
    """Whether ranks take their places by the GPUs that each is shown alone, so that a place's number need not be that
    of its rank."""

    notes: tuple[str, ...] = ()
    """What the decision costs or leaves unused, one sentence each."""

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return {
            "ranks": [place.to_json() for place in self.places],
            "spare_cpus": format_cpus(self.spare),
            "reserved_cpus": format_cpus(self.reserved),
            "notes": list(self.notes),
        }


def _text(cpus: CpuSet | None) -> str | None:
    return None if cpus is None else format_cpus(cpus)
