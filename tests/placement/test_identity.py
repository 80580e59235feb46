from __future__ import annotations

import socket

import pytest

from dthpc.errors import UserError
from dthpc.placement.identity import RankIdentity, expand_counts, from_environment

SRUN = {
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_TASKS_PER_NODE": "8(x9)",  # of the allocation, which is larger
    "SLURM_NTASKS": "72",
    "SLURM_NNODES": "9",
    "SLURMD_NODENAME": "n3-ib",
    "DTHPC_ATTEMPT": "1",
}


def test_a_task_of_srun_is_placed_in_its_step() -> None:
    expected = RankIdentity(4, 5, 0, 1, 2, 3, "n3-ib", 1)
    assert from_environment(SRUN) == expected


def test_a_local_rank_is_what_its_keeper_says_even_inside_a_job() -> None:
    own = {"DTHPC_RANK": "1", "DTHPC_WORLD_SIZE": "2", "DTHPC_LOCAL_RANK": "1", "DTHPC_LOCAL_WORLD_SIZE": "2"}
    expected = RankIdentity(1, 2, 1, 2, 0, 1, socket.gethostname(), 1)
    assert from_environment({**SRUN, **own}) == expected


@pytest.mark.parametrize("absent", ["SLURM_NODEID", "DTHPC_ATTEMPT", "SLURM_LOCALID"])
def test_an_incomplete_environment_is_refused_by_the_missing_name(absent: str) -> None:
    with pytest.raises(UserError, match=absent):
        from_environment({name: value for name, value in SRUN.items() if name != absent})


def test_a_process_that_nobody_placed_is_refused() -> None:
    with pytest.raises(UserError, match=r"dthpc\.submit"):
        from_environment({})


def test_counts_are_expanded() -> None:
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]
    assert expand_counts("4") == [4]
    for wrong in ("", "2x3", "2(x),1", "a"):
        with pytest.raises(ValueError, match="no list"):
            expand_counts(wrong)
