"""The typed fields of how ranks talk. `schema.py` tells what they are for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional


@dataclass
class CommAxes:
    """Backends of single axes of the mesh: `nccl`, `gloo` or `mpi`; null: `comm.backend`."""

    pp: Optional[str] = None
    """Messages between pipeline stages."""

    replicate: Optional[str] = None
    """Between replicas."""

    shard: Optional[str] = None
    """Between ranks that share one set of parameters (ZeRO)."""

    cp: Optional[str] = None
    """Between parts of a sequence."""

    tp: Optional[str] = None
    """Between parts of a layer."""


@dataclass
class CommConfig:
    """How ranks talk."""

    backend: Any = "auto"
    """`auto` (NCCL where every rank has a GPU, else Gloo, or MPI where its launcher started the ranks), `nccl`, `gloo`
    or `mpi` (by mpi4py); or by device type: `{cpu: gloo, cuda: nccl}`."""

    axes: CommAxes = field(default_factory=CommAxes)
    """Backends of single axes of the mesh."""

    tune: bool = False
    """Whether back ends that work are measured at the start, for about a second, and the fastest is taken."""

    fabric: str = "auto"
    """What carries the ranks between nodes: `infiniband`, `roce`, `slingshot`, `efa` (an error where a node lacks it),
    `tcp`, or `auto`: what all nodes have."""

    environment: dict[str, Any] = field(default_factory=dict)
    """Variables for NCCL, UCX, libfabric and MPI in the ranks (those of libraries in use), unless the user exported
    them; null takes one of a preset out."""

    mpi_plugin: str = "auto"
    """With MPI under Slurm: how `srun` wires the ranks up (`srun --mpi`): `pmi2`, `pmix`, `cray_shasta`, `none`, or
    `auto`: the first of those that the MPI library can use and this Slurm lists."""

    interface: Optional[str] = None
    """Network interface for the ranks' traffic; null: decided from those of all nodes, and proven before it is used."""

    shared_memory: Any = "auto"
    """Whether ranks that compute on the CPUs of one host talk over memory instead of the network: `auto` (where they
    can), `true` (or it is an error) or `false`. With `false`, MPI's groups keep to MPI's own calls as well."""

    hierarchical: Any = False
    """Whether replicas that share nodes sum gradients in three steps, in the node, across, and in the node: `true` (or
    it is an error), `false`, or `auto`: where it measures quicker at a run's start. What `auto` finds is kept for the
    run, but another run of the same command may find otherwise, and then differ in the last bits."""

    timeout_s: int = 600
    """Seconds after which a collective that does not end is an error, in every process group; after half of them the
    ranks that have not come are told."""

    silence_s: int = 60
    """Seconds without a sign of life after which a rank counts as lost (it is stopped, or its node is gone), and the
    attempt ends; 0: never, for debuggers. A rank whose process ends is noticed at once."""

    flight_record: int = 1000
    """Collectives and messages that each rank remembers and writes down when it is ended; 0: none."""

    rendezvous_timeout_s: int = 300
    """Seconds that ranks wait for each other at the start."""
