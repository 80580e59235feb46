"""The typed keys of the jobs of this package that have any, for the group `job`; see `dthpc.config.schema`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional


@dataclass
class CollectivesJob:
    """What `job=collectives` measures: the options of `dthpc.jobs.collectives.job.run`."""

    _target_: str = "dthpc.jobs.collectives.job.run"
    """The job."""

    sizes: Any = "8-64M*4"
    """Message sizes in bytes, as nccl-tests counts them: `FIRST-LAST*FACTOR` (`8-1G*2`, `8-max`: as much as fits), one
    size (`64K`), or a list of these. K, M, G are powers of 1024. The last size of a range is always measured."""

    operations: list[str] = field(default_factory=lambda: ["all"])
    """Which: `all_reduce`, `all_gather`, `reduce_scatter`, `broadcast`, `reduce`, `gather`, `scatter`, `all_to_all`,
    `barrier`, `send_recv` (one way), `sendrecv` (both ways at once), `ping_pong`; `all`: all of them."""

    backends: list[str] = field(default_factory=lambda: ["auto"])
    """Over what: `gloo`, `mpi`, `nccl` (torch.distributed), `raw_gloo` (its process group called directly), `raw_mpi`
    (mpi4py on NumPy buffers, as osu-micro-benchmarks call MPI); `auto`: all that work in this launch."""

    groups: list[str] = field(default_factory=lambda: ["auto"])
    """Among whom: `world`, `node` (the ranks of each node), `cross` (one rank of each node), or an axis of
    `parallel` (`pp`, `replicate`, `shard`, `cp`, `tp`); `auto`: all that differ."""

    dtype: str = "fp32"
    """`fp64`, `fp32`, `fp16`, `bf16`, `int64`, `int32`, `int8` or `uint8`."""

    redop: str = "sum"
    """Reduction: `sum`, `avg`, `min` or `max`."""

    in_place: str = "both"
    """Whether the result lies in the operand's memory: `both`, `true` or `false`. Forms that a library lacks are left
    out: torch reduces in place only."""

    iterations: Optional[int] = None
    """Timed calls of each operation and size; null: as many as `seconds` has room for, between 5 and 1000."""

    seconds: float = 0.1
    """Time for each operation, size, group and backend, where `iterations` is null."""

    warmup: int = 2
    """Calls before those that are timed."""

    check: bool = True
    """Compare every element of every result with what must come out, once for each line."""

    memory_share: float = 0.5
    """Part of the free memory of a node that the buffers of its ranks and what libraries copy may take."""

    pairs: str = "auto"
    """Pairwise matrix: `nodes` (one rank of each with each), `ranks` (in each node), `both`, `none`; `auto`: whichever
    has more than one member."""

    pair_size: str = "4M"
    """Message of the pairwise measurement."""

    hierarchical: bool = True
    """Also measure all-reduce in three steps (in the node, across, in the node), where ranks make it possible."""

    link_gbps: Optional[float] = None
    """Rate of a node's network link in Gbit/s; null: what the kernel says of the interface, if it knows."""

    reference: Optional[str] = None
    """`collectives.json` of an earlier run, to compare with."""

    slow: float = 0.8
    """What reaches less than this part of the expected bandwidth (the link's, the other links', the reference's) is
    called slow."""

    plots: bool = True
    """Draw SVG files."""
