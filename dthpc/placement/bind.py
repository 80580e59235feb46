"""A rank places itself: it reads its node, finds its place in the plan that all ranks of the node find alike, puts it
into force before torch is there, and later proves that it holds and writes that down."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dthpc.errors import UserError
from dthpc.placement.apply import Settings, apply_settings, settings_of, srun_binding
from dthpc.placement.cpuset import CpuSet
from dthpc.placement.decide import decide
from dthpc.placement.plan.here import plan_here, step_cpus
from dthpc.placement.plan.nodes import Plan
from dthpc.placement.plan.places import NodePlan, RankPlace
from dthpc.placement.plan.wanted import wish_of
from dthpc.placement.read.live import read_live
from dthpc.placement.table import placement_text
from dthpc.placement.topology import Topology
from dthpc.placement.verify import Verification, verify


@dataclass(frozen=True)
class Bound:
    """A rank that has placed itself, or why it has not."""

    plan: NodePlan | None
    """Of its node; `None` where none could be made."""

    local: int
    """Which of the plan's places is its own."""

    settings: Settings
    reason: str
    """Why its cores are bound, or not."""

    problems: tuple[str, ...] = ()
    """What could not be set."""

    strict: bool = False
    by_srun: bool = False
    """Whether `srun` has bound it, so that its CPUs are looked at although they were not set here."""

    host: str = "node"
    found: list[Verification] = field(default_factory=list)
    """What it found when it last looked; empty before."""

    @property
    def place(self) -> RankPlace | None:
        return None if self.plan is None else self.plan.places[self.local]

    def verify(self, env: Mapping[str, str] = os.environ) -> Verification:
        """Look whether the placement holds; where nothing is bound, only GPUs and NICs are looked at.

        Raises:
            UserError: something does not hold, and `placement.strict` is set.
        """
        if self.place is None:
            return Verification(())
        bound = self.by_srun or self.settings.affinity is not None
        place = self.place if bound else replace(self.place, cpus=None)
        seen = verify(place, self.settings, env)
        self.found[:] = [seen]
        if self.strict:
            seen.demand()
        return seen

    def table(self) -> str:
        """The placement of its node, for people."""
        if self.plan is None:
            return self.reason
        return f"{placement_text(Plan(((self.host, self.plan),)))}\n{self.reason}"

    def to_json(self) -> dict[str, Any]:
        """For the run's records."""
        return {
            "host": self.host,
            "reason": self.reason,
            "place": None if self.place is None else self.place.to_json(),
            "settings": self.settings.to_json(),
            "problems": list(self.problems),
            "verification": self.found[0].to_json() if self.found else None,
        }

    def write(self, folder: Path, rank: int) -> None:
        """Leave the record in the folder `placement` of an attempt."""
        path = folder / "placement" / f"rank-{rank:05d}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), indent=2, sort_keys=True) + "\n", encoding="utf-8")


def bind_rank(
    wanted: Mapping[str, Any], local_rank: int, env: Mapping[str, str], topology: Topology | None = None
) -> Bound:
    """Place this process. Before torch, and before any pool of threads.

    Args:
        wanted: what `wanted_of` made.
        local_rank: of this process.
        env: its environment, as the user and the scheduler made it.
        topology: of this node; read here if `None`.

    Raises:
        UserError: no plan can be made, or not be put into force, and `placement.strict` is set.
    """
    strict = bool(wanted["strict"])
    try:
        wish = wish_of(wanted)
        topology = read_live(tools=wish.gpus != 0) if topology is None else topology
        by_srun = wanted["bind"] == "srun"
        topology = replace(topology, allowed=topology.existing) if by_srun else topology
        plan, mine = plan_here(topology, wish, local_rank, env, whole=by_srun)
    except UserError as error:
        if strict:
            raise
        return Bound(None, local_rank, Settings(), f"not placed: {error.message()}")
    binds, reason = who_binds(str(wanted["bind"]), env, frozenset(os.sched_getaffinity(0)))
    settings = _settings(wanted, plan, mine, env, binds)
    problems = tuple(apply_settings(settings))
    if problems and strict:
        raise UserError("; ".join(problems), key="placement.strict", value=True, instead="placement.strict=false")
    return Bound(plan, mine, settings, reason, problems, strict, by_srun, topology.host or "node")


def _settings(wanted: Mapping[str, Any], plan: NodePlan, mine: int, env: Mapping[str, str], binds: bool) -> Settings:
    """All but the number of threads: that decides the last bits of a result, so that the launch plan sets it."""
    memory, omp_bind = str(wanted["memory"]), str(wanted["omp_bind"])
    made = settings_of(plan, mine, env, threads=wanted["threads"], bind=binds, memory=memory, omp_bind=omp_bind)
    told, kept = (
        {name: value for name, value in each.items() if name != "OMP_NUM_THREADS"}
        for each in (made.environment, made.kept)
    )
    return replace(made, environment=told, kept=kept)


def who_binds(bind: str, env: Mapping[str, str], own: CpuSet) -> tuple[bool, str]:
    """Whether a rank binds its own cores and memory, and why.

    Of its own accord it does so only on cores that are the run's alone: two runs that share cores without a cgroup
    would bind their first ranks to the same ones, and leave others idle.

    Args:
        bind: `placement.bind`.
        env: the rank's environment.
        own: CPUs that it may run on.
    """
    if bind == "rank":
        return True, "each rank binds itself: placement.bind=rank"
    if bind == "srun":
        return False, "srun binds the ranks: placement.bind=srun"
    if bind == "none":
        return False, "cores are not bound: placement.bind=none"
    if "SLURM_JOB_ID" not in env:
        return False, "cores are not bound: other runs may use the same machine (placement.bind=rank binds them)"
    given = env.get("SLURM_CPUS_ON_NODE", "")
    usable = len(step_cpus(env, set(own)))
    if given.isdigit() and int(given) < usable:
        why = f"Slurm gave {given} CPUs and does not say which of {usable}, so that other jobs may use the same"
        return False, f"cores are not bound: {why} (placement.bind=rank binds them)"
    return True, "each rank binds itself: the CPUs of the step are the run's alone"


def srun_words(wanted: Mapping[str, Any], topology: Topology | None = None) -> list[str]:
    """The options of `srun` that bind the ranks, made on the first of the step's nodes for all of them.

    Args:
        wanted: what `wanted_of` made.
        topology: of this node; read here if `None`.

    Raises:
        UserError: the job does not have whole nodes, or the wish does not fit the node.
    """
    wish = wish_of(wanted)
    topology = read_live(tools=wish.gpus != 0) if topology is None else topology
    if topology.existing != topology.usable_cpus():
        raise UserError(
            "srun's masks mean what they say only where a job has whole nodes, and this one has a part",
            key="placement.bind",
            value="srun",
            instead="cluster.exclusive=true, or placement.bind=rank",
        )
    return srun_binding(decide(topology, wish), str(wanted["memory"]))
