"""What is taken out of an environment, and what stays."""

from __future__ import annotations

import re

from dthpc.slurm.environment import KEPT, LEAKS, leaked, scrub

OUTER = {
    "SLURM_JOB_ID": "7",
    "SLURM_DISTRIBUTION": "cyclic",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
    "SLURM_TRES_PER_TASK": "cpu=4",
    "SRUN_CPUS_PER_TASK": "4",
    "PMI_RANK": "0",
    "PMIX_NAMESPACE": "x",
    "OMPI_COMM_WORLD_RANK": "0",
    "HYDI_CONTROL_FD": "5",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "x",
    "SUBMITIT_EXECUTOR": "slurm",
    "DTHPC_RANK": "3",
    "CUDA_VISIBLE_DEVICES": "0",
}
OWN = {
    "PATH": "/bin",
    "SLURM_CONF": "/etc/slurm.conf",
    "SBATCH_ACCOUNT": "mine",
    "SALLOC_PARTITION": "p",
    "OMP_NUM_THREADS": "4",
    "NCCL_DEBUG": "INFO",
    "OMPI_MCA_btl": "tcp",
    "DTHPC_CACHE": "/cache",
    "RANKING": "x",
}


def test_what_an_outer_job_left_goes_and_what_is_the_users_stays() -> None:
    assert scrub({**OUTER, **OWN}) == OWN
    assert leaked({**OUTER, **OWN}) == sorted(OUTER)


def test_gpus_hidden_by_the_user_stay_hidden_outside_a_job() -> None:
    assert scrub({"CUDA_VISIBLE_DEVICES": "1"}) == {"CUDA_VISIBLE_DEVICES": "1"}


def test_every_rule_has_a_reason() -> None:
    assert all(re.compile(pattern) and reason for pattern, reason in LEAKS.items())
    assert all(KEPT.values())
