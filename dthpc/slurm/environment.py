"""The environment of a submission, freed of what an outer job or launcher left in it.

A submission typed inside a job (an interactive session, a sweep driver, another run) inherits that job's variables.
sbatch, srun, MPI or torch read some of them as if they had been set on purpose: `SLURM_DISTRIBUTION` reorders the new
job's ranks, `SLURM_CPU_BIND` binds them to cores they do not have, `SLURM_MEM_PER_CPU` contradicts `--mem`, and
`MASTER_PORT` names a port of somebody else's rank 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

LEAKS: dict[str, str] = {
    r"SLURM_\w+": "describe the outer job, and srun and sbatch take many of them for options",
    r"SLURMD_\w+": "name the node and daemon of the outer job",
    r"SRUN_\w+": "are set by srun for the tasks of a step",
    r"PMI_\w+|PMI2_\w+|PMIX_\w+|HYDRA_\w+|HYDI_\w+": "connect a process to the outer MPI launcher",
    r"OMPI_COMM_WORLD_\w+|OMPI_UNIVERSE_SIZE|OMPI_MCA_(ess|orte_ess|pmix|prte)\w*": "rank and launcher of Open MPI",
    r"PALS_\w+|ALPS_APP_\w+|MPI_LOCALRANKID|MPI_LOCALNRANKS|MV2_COMM_WORLD_\w+": "rank under another MPI launcher",
    r"MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|NODE_RANK": (
        "are a rank's place in the outer job, which torch would believe"
    ),
    r"ROLE_(RANK|WORLD_SIZE|NAME)|TORCHELASTIC_\w+": "are set by torchrun for its workers",
    r"SUBMITIT_\w+": "make submitit believe that it is inside its own job",
    r"DTHPC_\w+": "are dthpc's own, set by the keeper for its ranks",
    r"CUDA_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK": (
        "list the GPUs of the outer job; removed only inside a job, since a user may set them outside"
    ),
}
"""What is removed (regular expressions of whole names), and why."""

KEPT: dict[str, str] = {
    "SLURM_CONF": "where Slurm's configuration is",
    "SLURM_CONF_SERVER": "where Slurm's configuration comes from",
    "SLURM_CLUSTERS": "which cluster the user's commands talk to",
    "SLURM_TIME_FORMAT": "how the user likes times printed",
    "SLURM_DEBUG_FLAGS": "what the user wants logged",
    "SLURM_JWT": "the user's token for authentication",
    "DTHPC_CACHE": "where the user keeps packed data",
}
"""Variables of the same shape that users and sites set on purpose, and why. `SBATCH_*` are sbatch's documented options,
`SALLOC_*` salloc's; neither is set by a job, so both stay too."""

_ONLY_INSIDE = re.compile(r"CUDA_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK")
_PATTERN = re.compile("|".join(f"(?:{pattern})" for pattern in LEAKS))


def scrub(env: Mapping[str, str]) -> dict[str, str]:
    """An environment without what an outer job or launcher left in it; everything of the user's stays."""
    removed = leaked(env)
    return {name: value for name, value in env.items() if name not in removed}


def leaked(env: Mapping[str, str]) -> list[str]:
    """Names of the variables that `scrub` removes, sorted."""
    inside = "SLURM_JOB_ID" in env
    return sorted(
        name
        for name in env
        if _PATTERN.fullmatch(name) and name not in KEPT and (inside or not _ONLY_INSIDE.fullmatch(name))
    )
