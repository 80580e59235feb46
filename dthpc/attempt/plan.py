"""The launch plan: all that the keeper needs to start ranks and to decide how an attempt goes on, as plain JSON.

The door writes it once into the run's folder. The keeper reads it without Hydra, OmegaConf or torch, so that a restart
costs little and does not depend on the environment that the submitter typed in.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from dthpc.errors import UserError
from dthpc.rundir import RunDir, read_json, write_json


@dataclass(frozen=True)
class LaunchPlan:
    """How one run is started, each time it starts."""

    kind: str
    """`local`, `slurm` or `allocation`."""

    nodes: int
    """Fewest nodes that it runs on."""

    max_nodes: int
    """Most nodes that it runs on; equals `nodes` unless a range was asked."""

    tasks_per_node: int
    """Ranks on each node."""

    cpus_per_task: int
    """Cores of each rank."""

    threads_per_rank: int
    """Threads of the numeric libraries in each rank."""

    gpus_per_node: int
    """GPUs on each node."""

    rank_command: list[str]
    """Words that start one rank, container included."""

    keeper_command: list[str]
    """Words that start the keeper, without the run's folder."""

    srun_options: list[str] = field(default_factory=list)
    """Options of the `srun` that starts the ranks (empty for local runs)."""

    mpi: dict[str, Any] = field(default_factory=dict)
    """Where ranks talk by MPI: its `library`, and for local runs the `launcher`, the words before the number of ranks;
    empty where they do not."""

    environment: dict[str, str] = field(default_factory=dict)
    """Variables that the ranks get on top of the inherited environment."""

    requeue: str = "never"
    """How the next attempt starts: `requeue` (scontrol), `resubmit` (a new sbatch), `restart` (local), `never`."""

    batch_script: str | None = None
    """The sbatch script, for `resubmit`."""

    restart_on_failure: bool = True
    """Whether an attempt whose ranks died is followed by another."""

    max_attempts_without_progress: int = 3
    """Consecutive attempts without a new checkpoint after which the run stops."""

    max_attempts: int | None = None
    """Attempts in all, or no limit."""

    restart_delay_s: float = 0.0
    """Pause before a local restart."""

    grace_s: float = 30.0
    """Seconds that ranks have for saving after they were asked to stop (KillWait or GraceTime of the site)."""

    placement: dict[str, Any] = field(default_factory=dict)
    """What ranks need of their node, as `dthpc.placement.bind.wanted_of` tells it; empty: they are not placed."""

    site: dict[str, Any] = field(default_factory=dict)
    """What was learnt about the site, and what follows from it, for the records."""

    def write(self, run: RunDir) -> None:
        """Store the plan in the run's folder."""
        write_json(run.launch, asdict(self))

    @classmethod
    def read(cls, run: RunDir) -> LaunchPlan:
        """The plan of a run.

        Raises:
            UserError: the folder holds no plan, so it is no run of dthpc.
        """
        stored = read_json(run.launch)
        if not isinstance(stored, dict):
            raise UserError(
                "the folder holds no launch plan",
                key="run",
                value=run.path,
                instead="name a folder that `python -m dthpc.submit` made",
            )
        try:
            return cls(**stored)
        except TypeError as error:
            raise UserError(
                f"its launch plan has an unknown form ({error})",
                key="run",
                value=run.path,
                instead="submit the run again with this version",
            ) from error
