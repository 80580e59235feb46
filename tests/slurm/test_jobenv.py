"""Environments of jobs, honest and otherwise."""

from __future__ import annotations

import pytest

from dthpc.errors import UserError
from dthpc.slurm.jobenv import parse_environments, read_environment

BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[2,1]",
    "SLURM_NODELIST": "n[2,1]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "2,1",
    "SLURM_NTASKS": "3",
    "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
}


def test_a_batch_job() -> None:
    found = read_environment(BATCH)
    assert (found.job_id, found.nodes, found.master, found.nnodes) == ("7", ["n2", "n1"], "n2", 2)
    assert (found.tasks_per_node, found.ntasks, found.rank, found.gpus) == ([2, 1], 3, None, None)


def test_a_task_of_a_smaller_step_does_not_contradict_its_job() -> None:
    step = {
        **BATCH,
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_NTASKS": "1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_GPUS": "2-3,5",
        "SLURM_TRES_PER_TASK": "cpu=4",
    }
    found = read_environment(step)
    assert (found.nodes, found.nnodes, found.ntasks, found.rank) == (["n1"], 1, 1, 0)
    assert (found.gpus, found.cpus_per_task) == ([2, 3, 5], 4)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"SLURM_NTASKS": "4"}, "SLURM_NTASKS=4, sum of SLURM_TASKS_PER_NODE=3"),
        ({"SLURM_NPROCS": "9"}, "SLURM_NTASKS=3, SLURM_NPROCS=9"),
        ({"SLURM_NNODES": "5"}, "SLURM_NNODES=5, SLURM_JOB_NUM_NODES=2"),
        ({"SLURM_NODELIST": "n7"}, "SLURM_JOB_NODELIST=n[2,1], SLURM_NODELIST=n7"),
        ({"SLURM_JOBID": "8"}, "SLURM_JOB_ID=7, SLURM_JOBID=8"),
    ],
)
def test_contradictions_name_both_values(change: dict[str, str], told: str) -> None:
    with pytest.raises(UserError) as caught:
        read_environment({**BATCH, **change})
    assert told in str(caught.value)
    assert read_environment({**BATCH, **change}, strict=False).conflicts


def test_tasks_that_slurm_filled_in_from_the_cpus_are_no_number_of_tasks() -> None:
    found = read_environment({"SLURM_TASKS_PER_NODE": "8(x3)", "SLURM_JOB_CPUS_PER_NODE": "8(x3)"})
    assert (found.ntasks, found.tasks_per_node) == (None, [8, 8, 8])


@pytest.mark.parametrize("value", ["<redacted>", "***", "[REMOVED]", "xxxx"])
def test_a_blanked_value_is_refused(value: str) -> None:
    with pytest.raises(UserError, match="blanked out"):
        read_environment({"SLURM_JOB_ID": value})


def test_a_value_that_is_no_number_is_refused() -> None:
    with pytest.raises(UserError, match=r"SLURM_PROCID=two"):
        read_environment({"SLURM_PROCID": "two"})


DUMP = """\
$ srun env | sort
declare -x SLURM_JOB_ID="7"
export SLURM_JOB_NODELIST='n[1-2]'
0: SLURM_PROCID=0
1: SLURM_PROCID=1
SLURM_NTASKS = 2
PATH=/bin
SLURM_JOB_NAME="a \\"b\\""
"""


def test_a_dump_of_several_tasks_is_one_job() -> None:
    (found,) = parse_environments(DUMP)
    assert (found.job_id, found.nodes, found.ntasks, found.rank) == ("7", ["n1", "n2"], 2, None)


def test_blank_lines_separate_jobs_and_not_parts_of_one() -> None:
    text = "SLURM_JOB_ID=4\nSLURM_ARRAY_TASK_ID=0\n\nSLURM_NTASKS=2\n\nSLURM_JOB_ID=5\nSLURM_ARRAY_TASK_ID=1\n"
    first, second = parse_environments(text)
    assert (first.job_id, first.array_task_id, first.ntasks) == ("4", 0, 2)
    assert (second.job_id, second.array_task_id) == ("5", 1)


def test_components_of_a_heterogeneous_job() -> None:
    names = {"SLURM_JOB_NODELIST_HET_GROUP_0": "a1", "SLURM_JOB_NODELIST_HET_GROUP_1": "b[1-2]"}
    assert read_environment(names).het_groups == [["a1"], ["b1", "b2"]]


def test_a_text_without_variables_is_refused() -> None:
    with pytest.raises(UserError, match="no SLURM_"):
        parse_environments("PATH=/bin\n")


def test_unique_ids_of_gpus_are_no_indices() -> None:
    assert read_environment({"SLURM_JOB_GPUS": "GPU-12ab,GPU-34cd"}).gpus is None
