"""The placement of this node from inside a rank: every rank finds the same plan by itself, without asking others."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dthpc.errors import UserError
from dthpc.placement.cpuset import CpuSet, parse_mask
from dthpc.placement.decide import decide
from dthpc.placement.plan.places import NodePlan, Unit
from dthpc.placement.plan.units import compute_gpus, units_of
from dthpc.placement.plan.wish import Wish
from dthpc.placement.topology import Topology

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def plan_here(
    topology: Topology, wish: Wish, local_rank: int, env: Mapping[str, str], whole: bool = False
) -> tuple[NodePlan, int]:
    """The plan of this node, and which of its places is this rank's.

    It rests on what all ranks of the node see alike: the CPUs that the step's ranks have together, and the GPUs. Where
    each rank is shown its own GPUs alone (`--gpus-per-task`), the place is found by these.

    Args:
        topology: of this node, read live.
        wish: what the ranks need.
        local_rank: of this rank.
        env: its environment.
        whole: whether the step has the whole node, whatever this rank may use of it.

    Raises:
        UserError: the wish does not fit the node.
    """
    own = os.sched_getaffinity(0)
    topology = topology if whole else replace(topology, allowed=step_cpus(env, own))
    visible = visible_words(env)
    # Where there is no GPU, what somebody's profile exports restricts nothing.
    if visible is None or wish.gpus == 0 or not compute_gpus(topology):
        return decide(topology, wish), local_rank
    shown = units_of(topology, wish.ranks, visible)
    if wish.ranks > 1 and wish.gpus and len(shown) * wish.ranks == wish.gpus:
        return _by_own_gpus(topology, wish, shown, visible, local_rank)
    return decide(topology, replace(wish, visible=visible)), local_rank


def step_cpus(env: Mapping[str, str], own: set[int]) -> CpuSet:
    """CPUs that the ranks of this node have together.

    Where `srun` has bound each rank to a mask of its own, their union: within it, ranks may be bound anew.

    Args:
        env: environment of a rank.
        own: CPUs that this rank may use now.
    """
    words = env.get("SLURM_CPU_BIND_LIST", "")
    if "mask_cpu" not in env.get("SLURM_CPU_BIND_TYPE", "") or not words:
        return frozenset(own)
    try:
        union = frozenset().union(*(parse_mask(word) for word in words.split(",")))
    except UserError:
        return frozenset(own)
    # A list that does not describe this rank is of another step.
    return union if own <= union else frozenset(own)


def visible_words(env: Mapping[str, str]) -> list[str] | None:
    """Devices that the environment restricts this process to; `None` where it does not."""
    text = next((env[name] for name in _VISIBLE if env.get(name)), None)
    return None if text is None else text.split(",")


def _by_own_gpus(
    topology: Topology, wish: Wish, shown: Sequence[Unit], visible: Sequence[str], local_rank: int
) -> tuple[NodePlan, int]:
    """The plan where each rank is shown its own GPUs alone, so that no rank sees those of the others as they do."""
    own = {unit.gpu.bus_id for unit in shown}
    whole = _seen_by_all(topology)
    if len(whole.gpus or ()) == wish.gpus and None not in own and all(unit.part is None for unit in shown):
        plan = replace(decide(whole, wish), by_gpu=True)
        for mine, place in enumerate(plan.places):
            if {unit.gpu.bus_id for unit in place.units} == own:
                return _with_units(plan, mine, shown), mine
    # The other ranks' GPUs can't be told from those of other jobs, so that only this rank's share of all is sure.
    alone = decide(topology, replace(wish, gpus=None, visible=visible[:1]))
    note = "This rank sees no GPU but its own: it gets its fraction of the cores nearest to that."
    alone = replace(alone, by_gpu=True, notes=(note, *alone.notes[1:]))
    return _with_units(alone, local_rank, shown), local_rank


def _seen_by_all(topology: Topology) -> Topology:
    """A node as each rank sees it, whichever GPUs the drivers show it: numbered by the bus unless all numbers are told,
    and without the links that only visible GPUs tell of."""
    every = [gpu for gpu in topology.gpus or () if gpu.vendor == compute_gpus(topology)[0].vendor]
    if any(gpu.index is None for gpu in every) and all(gpu.bus_id for gpu in every):
        every.sort(key=lambda gpu: gpu.bus_id or "")
        every = [replace(gpu, index=number) for number, gpu in enumerate(every)]
    keys = {gpu.key for gpu in every}
    links = tuple(link for link in topology.links or () if not {link.a, link.b} <= keys)
    return replace(topology, gpus=tuple(replace(gpu, compute=True) for gpu in every), links=links)


def _with_units(plan: NodePlan, mine: int, units: Sequence[Unit]) -> NodePlan:
    """The plan with this rank's GPUs as the drivers call them here."""
    places = (replace(place, units=tuple(units)) if i == mine else place for i, place in enumerate(plan.places))
    return replace(plan, places=tuple(places))
