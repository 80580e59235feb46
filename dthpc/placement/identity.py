"""Which of the run's ranks this process is, read from what started it."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from dthpc.errors import UserError


@dataclass(frozen=True)
class RankIdentity:
    """One rank's place among the ranks of an attempt."""

    rank: int
    """Number among all ranks, from 0."""

    world_size: int
    """Number of ranks."""

    local_rank: int
    """Number among the ranks of this node, from 0."""

    local_world_size: int
    """Ranks on this node."""

    node_rank: int
    """Number of this node among the nodes, from 0."""

    nodes: int
    """Number of nodes."""

    host: str
    """Name of this node, as the scheduler calls it where there is one."""

    attempt: int
    """Number of the attempt, from 0."""


def from_environment(env: Mapping[str, str]) -> RankIdentity:
    """The identity that the keeper (`DTHPC_*`, local ranks) or `srun` (`SLURM_*`) gave to this process.

    The keeper's own variables win, so that local ranks are right inside an allocation too.

    Raises:
        UserError: the variables of neither are complete.
    """
    try:
        if "DTHPC_RANK" in env:
            return _from_keeper(env)
        if "SLURM_PROCID" in env:
            return _from_srun(env)
    except (KeyError, ValueError, IndexError) as error:
        raise UserError(
            f"the environment of this rank is not complete ({error})",
            instead="start ranks through `python -m dthpc.submit`, which sets it",
        ) from error
    raise UserError(
        "this process was started neither by dthpc's keeper nor by srun",
        instead="start ranks through `python -m dthpc.submit`",
    )


def _from_keeper(env: Mapping[str, str]) -> RankIdentity:
    return RankIdentity(
        rank=int(env["DTHPC_RANK"]),
        world_size=int(env["DTHPC_WORLD_SIZE"]),
        local_rank=int(env["DTHPC_LOCAL_RANK"]),
        local_world_size=int(env["DTHPC_LOCAL_WORLD_SIZE"]),
        node_rank=int(env.get("DTHPC_NODE_RANK", "0")),
        nodes=int(env.get("DTHPC_NODES", "1")),
        host=socket.gethostname(),
        attempt=int(env["DTHPC_ATTEMPT"]),
    )


def _from_srun(env: Mapping[str, str]) -> RankIdentity:
    # The SLURM_STEP_* names describe this srun; without the prefix they may describe the whole allocation.
    node_rank = int(env["SLURM_NODEID"])
    tasks = expand_counts(env.get("SLURM_STEP_TASKS_PER_NODE") or env["SLURM_TASKS_PER_NODE"])
    return RankIdentity(
        rank=int(env["SLURM_PROCID"]),
        world_size=int(env.get("SLURM_STEP_NUM_TASKS") or env["SLURM_NTASKS"]),
        local_rank=int(env["SLURM_LOCALID"]),
        local_world_size=tasks[node_rank],
        node_rank=node_rank,
        nodes=int(env.get("SLURM_STEP_NUM_NODES") or env["SLURM_NNODES"]),
        host=env.get("SLURMD_NODENAME") or socket.gethostname(),
        attempt=int(env["DTHPC_ATTEMPT"]),
    )


def expand_counts(text: str) -> list[int]:
    """Numbers of tasks on each node from Slurm's short form: `2(x3),1` is `[2, 2, 2, 1]`.

    Raises:
        ValueError: the text has another form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"{text!r} is no list of task counts")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
