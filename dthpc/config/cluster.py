"""The typed fields of the machines that a run asks for. `schema.py` tells what they are for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional


@dataclass
class ContainerConfig:
    """A container that the ranks run in."""

    runtime: Optional[str] = None
    """`apptainer` (also for Singularity) or `pyxis` (Slurm plugin of NVIDIA enroot); null: no container."""

    image: Optional[str] = None
    """Path or address of the image."""

    mounts: list[str] = field(default_factory=list)
    """Folders to mount, as `SRC` or `SRC:DST`; the run's folder is always mounted."""

    arguments: list[str] = field(default_factory=list)
    """Further words for `apptainer exec`, or further `--container-*` options for pyxis."""

    python: str = "python3"
    """Interpreter inside the image."""


@dataclass
class ClusterConfig:
    """Where ranks run, and what is asked of Slurm."""

    kind: str = "local"
    """`local` (processes of this machine), `slurm` (sbatch) or `allocation` (srun inside a running `salloc`)."""

    nodes: Any = 1
    """Nodes: a number, or a range such as `2-4`, from which a restart may get any number."""

    tasks_per_node: int = 1
    """Ranks on each node."""

    cpus_per_task: int = 1
    """Cores of each rank."""

    gpus_per_node: int = 0
    """GPUs on each node."""

    gpus_per_task: Optional[int] = None
    """GPUs bound to each rank by Slurm itself; null: a rank sees all GPUs of its node and takes its own."""

    gpu_type: Optional[str] = None
    """Kind of GPU, as in `--gpus-per-node=TYPE:N`."""

    partition: Optional[str] = None
    """Partition; a comma separates several."""

    account: Optional[str] = None
    """Account that is charged."""

    qos: Optional[str] = None
    """Quality of service."""

    constraint: Optional[str] = None
    """Node features, in Slurm's syntax."""

    reservation: Optional[str] = None
    """Reservation."""

    nodelist: Optional[str] = None
    """Nodes that must be part of the allocation, as a host list."""

    exclude: Optional[str] = None
    """Nodes to avoid, as a host list."""

    exclusive: bool = False
    """Whole nodes for this run alone."""

    time: str = "1:00:00"
    """Time limit of one attempt: minutes, or `[D-]HH:MM:SS`, or `HH:MM:SS`, as sbatch reads it."""

    memory: Optional[str] = None
    """Memory of each node, such as `64G`; null: the site's default. `0`: all of it."""

    memory_per_cpu: Optional[str] = None
    """Memory of each core, such as `4G`."""

    mail_user: Optional[str] = None
    """Address for mail about the job."""

    mail_type: Optional[str] = None
    """Occasions for mail, such as `END,FAIL`."""

    comment: Optional[str] = None
    """Comment stored with the job."""

    after: list[str] = field(default_factory=list)
    """Runs (names or folders) or `jobid`s that must have ended well before this one starts."""

    dependency: Optional[str] = None
    """Any other dependency, in Slurm's own syntax."""

    array_parallelism: int = 256
    """Sweeps only: runs of the array that may be active at once."""

    setup: list[str] = field(default_factory=list)
    """Shell lines for the batch script before anything is started: `module load …`, `source …/activate`."""

    python: Optional[str] = None
    """Interpreter on the compute nodes; null: the one that runs the command."""

    container: ContainerConfig = field(default_factory=ContainerConfig)
    """Container for the ranks."""

    sbatch: dict[str, Any] = field(default_factory=dict)
    """Any other sbatch option by its long name, such as `{switches: 1, hint: nomultithread, contiguous: true}`."""

    srun: dict[str, Any] = field(default_factory=dict)
    """Any other srun option by its long name, such as `{mpi: pmi2, distribution: block}`."""

    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables for the ranks."""

    requeue: str = "auto"
    """How the run continues after an attempt: `auto` (requeue where the site allows it, else a new submission),
    `requeue`, `resubmit` or `never`."""
