"""What a job is given besides its configuration: who this rank is, where the run lives, and whether to stop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dthpc.monitor.events import EventLog
from dthpc.placement.identity import RankIdentity
from dthpc.resilience.stop import StopFlag
from dthpc.rundir import AttemptDir, RunDir

if TYPE_CHECKING:
    import torch


@dataclass
class RankContext:
    """The second argument of a job, `run(cfg, ctx)`.

    A job that returns has finished the run. One that was asked to stop saves its state and raises
    `dthpc.resilience.stop.Stopped`. Any other exception is a failure; a `UserError` is one that a restart can't mend.
    """

    identity: RankIdentity
    """Which rank this is."""

    run: RunDir
    """The run's folder."""

    device: torch.device
    """Where this rank computes."""

    backend: str = "gloo"
    """Backend of the default process group, as given to `init_process_group`."""

    stop: StopFlag = field(default_factory=StopFlag)
    """Says whether the rank was asked to stop; ranks must agree on it before they act."""

    events: EventLog | None = None
    """The run's event log on rank 0, `None` on the others."""

    step: int | None = None
    """Last step that was done, set by the job, so that the rank's exit record can tell it."""

    axis_backends: Mapping[str, str] = field(default_factory=dict)
    """Backends of mesh axes that have one of their own (`comm.axes`), as given to `new_group`."""

    @property
    def attempt(self) -> AttemptDir:
        """The folder of this attempt."""
        return self.run.attempt(self.identity.attempt)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes the records that one rank writes for all."""
        return self.identity.rank == 0
