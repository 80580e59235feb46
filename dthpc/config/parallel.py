"""The typed fields of layouts and number formats. `schema.py` tells what they are for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional


@dataclass
class GradientConfig:
    """What travels when gradients are reduced over data-parallel ranks."""

    dtype: str = "fp32"
    """Format in which gradients travel: `fp32`, or `bf16` for half the bytes (sums are rounded)."""

    powersgd_rank: int = 0
    """Rank of PowerSGD's low-rank approximation of each matrix, with error feedback; 0: whole gradients."""


@dataclass
class ActivationConfig:
    """Activations that are computed again in the backward pass rather than kept."""

    mode: str = "none"
    """`none`, `full` (whole layers are computed again) or `selective` (only their attention)."""

    every: int = 1
    """Only every n-th layer; 1: all of them."""


@dataclass
class OffloadConfig:
    """Where optimizer state and parameter shards lie between their uses."""

    optimizer: Optional[str] = None
    """Optimizer state and fp32 master weights: null (on the device), `cpu` (host memory) or `nvme` (files)."""

    parameters: Optional[str] = None
    """Parameter shards of ZeRO stage 3: null, `cpu` or `nvme`."""

    folder: Optional[str] = None
    """Folder for the files of `nvme`, best on a disk of the node; they have no names and end with their rank."""


@dataclass
class OuterConfig:
    """Asynchronous data parallelism: replicas take steps of their own and meet now and then (local SGD, DiLoCo)."""

    every: int = 0
    """Steps between two meetings of the replicas; 0: gradients are reduced in every step."""

    lr: float = 0.7
    """Learning rate of the outer Nesterov step; 1 with momentum 0 is plain averaging of parameters (local SGD)."""

    momentum: float = 0.9
    """Momentum of the outer step."""

    delay: int = 0
    """Bound on staleness: steps that a meeting's exchange may travel while the replicas go on; less than `every`."""


@dataclass
class ParallelConfig:
    """The layout: degrees whose product is the number of ranks, and how each axis works."""

    dp: Optional[int] = None
    """Data-parallel degree; null: what the other degrees leave of the ranks."""

    zero: int = 0
    """ZeRO stage: what is sharded over data-parallel ranks. 0: nothing; 1: optimizer state; 2: gradients too; 3:
    parameters too."""

    replicate: Any = None
    """Hybrid sharding (HSDP): how many groups of data-parallel ranks each hold all shards; `nodes`: one in each node,
    however many there are. Null: 1 with ZeRO, `dp` without."""

    tp: int = 1
    """Tensor-parallel degree."""

    sequence_parallel: bool = False
    """Split the sequence over the tensor-parallel ranks between their matrices (Korthikanti et al. 2022)."""

    pp: int = 1
    """Pipeline degree."""

    schedule: str = "1f1b"
    """Pipeline schedule: `gpipe`, `1f1b`, `interleaved`, `zb_h1`, `zbv`, or `pipedream` (controlled staleness)."""

    chunks: Optional[int] = None
    """Pipeline chunks of layers on each rank; null: 2 for `interleaved` and `zbv`, else 1."""

    stages: Any = "auto"
    """How layers are dealt to pipeline stages: `auto` (balanced by estimated cost), `measured` (by measured time),
    `uniform` (by number), or a list with the number of layers of each stage."""

    cp: int = 1
    """Context-parallel degree; only 1 in this version."""

    ep: int = 1
    """Expert-parallel degree; only 1 in this version."""

    order: list[str] = field(default_factory=lambda: ["pp", "replicate", "shard", "cp", "tp"])
    """Axes from the outermost (ranks far apart) to the innermost (neighbouring ranks, inside a node)."""

    bucket_mb: int = 25
    """Size of a gradient bucket, in MiB; buckets are reduced while the backward pass still runs."""

    allow_unused: bool = False
    """Whether parameters may get no gradient in the first step; it counts as zero. Else they are named and refused."""

    gradients: GradientConfig = field(default_factory=GradientConfig)
    """What travels when gradients are reduced."""

    activations: ActivationConfig = field(default_factory=ActivationConfig)
    """Activation checkpointing."""

    offload: OffloadConfig = field(default_factory=OffloadConfig)
    """Optimizer state and parameters in host memory or on disk."""

    outer: OuterConfig = field(default_factory=OuterConfig)
    """Asynchronous data parallelism."""


@dataclass
class PrecisionConfig:
    """Number formats. Master weights and optimizer state are always fp32."""

    compute: str = "fp32"
    """Format of forward and backward arithmetic: `fp32`, `bf16` or `fp16` (with dynamic loss scaling)."""

    parameters: str = "fp32"
    """Format in which matrices and their gradients are held: `fp32`, or `compute` for 16-bit ones beside fp32 masters
    (the ZeRO paper's mixed precision). Vectors (norms, biases) are always held in fp32."""

    deterministic: bool = True
    """Use only algorithms that give the same bits each time."""

    loss_scale: float = 65536.0
    """fp16 only: first loss scale."""

    loss_scale_growth_every: int = 2000
    """fp16 only: steps without overflow after which the scale doubles; an overflow halves it and skips the update."""
