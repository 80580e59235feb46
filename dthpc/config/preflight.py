"""The typed fields of a preflight: what is measured on every node, and from when on a node is bad."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class PreflightChecks:
    """What a preflight measures on every node, and from when on a node is bad. 0 leaves a measurement out."""

    doctor: bool = True
    """Look at each node as `python -m dthpc.doctor` does: an error that not all nodes have makes a node bad."""

    compute_s: float = 1.5
    """Seconds of matrix products on the rank's CPUs, and as many on its GPU."""

    memory_s: float = 1.0
    """Seconds of the triad a = b + s·c over arrays larger than the caches."""

    memory_mb: int = 128
    """Size of each of the triad's three arrays, of each rank, in MiB."""

    network_mb: int = 64
    """Size of the tensors that are all-reduced, by all ranks and by pairs of nodes, in MiB."""

    network_repeats: int = 5
    """Times that each all-reduce is done; the fastest counts."""

    pairs: int = 15
    """Other nodes that each node is paired with, where there are more than two nodes."""

    files_mb: int = 256
    """Size of the file that each node writes, synchronises and reads in the run's folder and in TMPDIR, in MiB."""

    files: int = 100
    """Small files that are made, looked at and removed there, for the latency of metadata."""

    compute_tolerance: float = 0.15
    """Share by which a node may compute slower than the median of its like."""

    memory_tolerance: float = 0.2
    """The same for memory bandwidth."""

    network_tolerance: float = 0.3
    """The same for the bandwidth between nodes."""

    files_tolerance: float = 0.8
    """The same for file systems, which others use at the same time."""

    outlier_z: float = 3.5
    """Robust standard deviations that a node must lie below the median, besides the tolerance."""

    two_nodes_factor: float = 3.0
    """Of two nodes alone the slower one is bad only if it is slower by this factor: one is as good a median as the
    other."""

    clock_skew_s: float = 1.0
    """Seconds that a node's clock may differ from the median of all."""

    free_gb: float = 1.0
    """Room that must be left in the run's folder and in TMPDIR, in GiB."""

    slowed: dict[str, int] = field(default_factory=dict)
    """Fault injection, to rehearse: nodes whose matrix products are done so many times over, while one is counted."""


@dataclass
class ShortChecks(PreflightChecks):
    """The same in a few seconds, for the start of a training job."""

    compute_s: float = 0.6
    memory_s: float = 0.3
    memory_mb: int = 64
    network_mb: int = 16
    network_repeats: int = 3
    pairs: int = 3
    files_mb: int = 0
    files: int = 20
    compute_tolerance: float = 0.3
    memory_tolerance: float = 0.4
    network_tolerance: float = 0.5


@dataclass
class PreflightJob(PreflightChecks):
    """The job that examines nodes: the options of `dthpc.jobs.preflight.job.run`."""

    _target_: str = "dthpc.jobs.preflight.job.run"
    """The job."""

    fail: bool = False
    """Whether the job ends with an error where a node is bad, so that jobs that wait for it (`cluster.after`) do not
    start."""
