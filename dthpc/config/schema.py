"""The typed schema of a run's configuration: one dataclass a group, a docstring under each field.

Hydra composes the YAML files of `conf/` over these classes, so that a wrong type or an unknown key is refused while
the command line is read. Everything here is free of torch: the login node imports it.

Groups that build an object (`model`, `data`, `loss`, `job`, `callbacks`) are open: they hold a `_target_` and that
object's own arguments, which is how a user's class plugs in without a change to this package.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from omegaconf import MISSING

from dthpc.config.preflight import ShortChecks


@dataclass
class RunConfig:
    """Identity of the run and where it lives."""

    name: Optional[str] = None
    """Name of the run and of its folder. Null: `<job>-<model>-<digest>`, the digest taken over everything that decides
    the result, so that the same command always means the same run and resumes it."""

    root: str = "runs"
    """Folder that holds the runs; relative to where the command is typed. On a cluster, it must be on a file system
    that all nodes share."""

    seed: int = 1234
    """Seed of initial weights, sample order and dropout."""

    on_change: str = "refuse"
    """What to do when a run of this name exists with another configuration: `refuse` (default), or `accept`: go on from
    its checkpoint with the new one."""


@dataclass
class TrainConfig:
    """The training loop."""

    steps: int = MISSING
    """Optimizer updates to make in all, over all attempts."""

    seq_len: int = MISSING
    """Tokens in one sample."""

    global_batch: int = MISSING
    """Samples in one step, over all ranks and accumulation."""

    micro_batch: Optional[int] = None
    """Samples in one forward pass of one rank; null: the rank's whole share of the global batch. A smaller value
    accumulates gradients, and they are communicated once a step."""

    eval_every: int = 0
    """Steps between evaluations on held-out data; 0: only at the end; -1: never."""

    eval_samples: Optional[int] = None
    """Held-out samples of one evaluation during training; null: all of them. The one at the end takes all."""

    grad_clip: Optional[float] = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it. Null: no clipping."""


@dataclass
class ScheduleConfig:
    """Learning rate as a pure function of the step."""

    name: str = "cosine"
    """`constant`, `cosine`, `linear` or `wsd` (warm-up, stable, decay)."""

    warmup_steps: Optional[int] = None
    """Steps over which the rate rises linearly from zero; null: a twentieth of all steps, at most 2000."""

    min_ratio: float = 0.1
    """Final rate over peak rate, for the schedules that decay."""

    decay_fraction: float = 0.2
    """Share of the steps that `wsd` spends on its decay."""


@dataclass
class OptimConfig:
    """The optimizer."""

    _target_: str = "torch.optim.AdamW"
    """The optimizer class: any `torch.optim.Optimizer`."""

    lr: float = 1e-3
    """Peak learning rate."""

    scale_lr: Optional[str] = None
    """How the rate follows the batch size: `linear` (the usual rule for SGD, Goyal et al. 2017) makes it
    `lr · train.global_batch / base_batch`, `sqrt` (for Adam and its kin, Malladi et al. 2022) takes the root of that
    quotient. Null: `lr` as it is."""

    base_batch: Optional[int] = None
    """With `scale_lr`: the global batch, in samples, for which `lr` was found."""

    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; norms and biases are not decayed."""

    no_decay: list[str] = field(default_factory=list)
    """Patterns of parameter names that are not decayed although they are matrices, such as `embed.*`."""

    arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the class, such as `{betas: [0.9, 0.95], eps: 1e-8}`."""

    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Learning rate schedule."""


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


@dataclass
class CheckpointConfig:
    """What is saved, when, and for how long it is kept."""

    every: int = 0
    """Steps between checkpoints; 0: only at the end and when the run is stopped."""

    keep: int = 3
    """Verified checkpoints to keep; older ones are removed. 0: keep all."""

    keep_every: int = 0
    """Keep for good the checkpoints whose step is a multiple of this; 0: none."""

    save_lead_s: Optional[int] = None
    """Seconds before the time limit at which the run saves and asks for its requeue; null: derived from the site."""


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
    can), `true` (or it is an error) or `false`."""

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


@dataclass
class PlacementConfig:
    """Where ranks run: cores, memory, GPUs and NICs of each."""

    threads_per_rank: Optional[int] = None
    """Threads of the numeric libraries in one rank; null: `cluster.cpus_per_task`. Part of what makes results
    repeatable bit by bit, so it does not follow the node that a restart happens to get."""

    bind: str = "auto"
    """Who binds ranks to cores and memory: `rank` (each itself, before torch starts), `srun` (by its options, where the
    step owns whole nodes that are alike), `none`, or `auto` (`rank`)."""

    strict: bool = False
    """Whether a rank that does not run where it was placed ends the run, rather than that it is reported."""

    topology: Optional[str] = None
    """File with a text of a compute node's topology (`nvidia-smi topo -m`, `lstopo --of xml`, …; see `python -m
    dthpc.doctor`), so that a dry run shows where ranks go there. The run itself reads its nodes."""

    by_switch: bool = True
    """Whether ranks fill the nodes of one switch before those of the next, where Slurm knows the network
    (`scontrol show topology`) and `cluster.srun.distribution` is not set."""

    cores_per_rank: Optional[int] = None
    """Cores of each rank, helpers included; null: its share of the cores nearest to its GPU, or of all cores."""

    helpers: Optional[int] = None
    """Cores of each rank's share that data loading and communication threads have for themselves; null: a quarter for a
    rank with a GPU, a sixteenth for one without."""

    smt: str = "one"
    """Hardware threads: `one` of each core, `all`, or `spread` (computing on the first, helpers on the second)."""

    reserve: Optional[str] = None
    """CPUs left to the system: a list such as `0,8`, or `l3` or `numa` for the first core of each such domain."""

    nics: Optional[int] = None
    """NICs of each rank; null: its share of those nearest to its GPU."""

    memory: str = "prefer"
    """Where a rank's memory comes from: its memory nodes as long as they have room (`prefer`), only these (`bind`), or
    wherever its threads run (`none`)."""

    omp_bind: str = "false"
    """`OMP_PROC_BIND` of the ranks: `false`, `close` or `spread`. Anything but `false` binds the main thread to one
    core, which what it starts inherits, data loaders among them."""


@dataclass
class ResilienceConfig:
    """What happens when an attempt ends before the run does."""

    restart_on_failure: bool = True
    """Requeue a run whose ranks died, not only one that was preempted or ran out of time."""

    max_attempts_without_progress: int = 3
    """Consecutive attempts that may end without a new checkpoint before the run stops with the reason."""

    max_attempts: Optional[int] = None
    """Attempts in all; null: no limit."""

    requeue_delay_s: int = 0
    """Local runs only: seconds before a restart."""

    preflight: bool = False
    """Examine the nodes for a few seconds before training: a job with bad nodes is queued again without them."""

    checks: ShortChecks = field(default_factory=ShortChecks)
    """What is measured then, and from when on a node is bad."""


@dataclass
class MonitorConfig:
    """Records."""

    log_every: int = 10
    """Steps between metric records."""

    tensorboard: bool = True
    """Write TensorBoard files next to `events.jsonl`."""


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


@dataclass
class Config:
    """The whole configuration of a run."""

    run: RunConfig = field(default_factory=RunConfig)
    """Identity of the run."""

    job: Any = MISSING
    """What the run executes: `_target_` names a callable `(config, context) -> None`."""

    model: Any = MISSING
    """The model: `_target_` names a callable that returns a `torch.nn.Module`."""

    loss: Any = MISSING
    """The loss: `_target_` names a callable `(outputs, targets) -> (sum of losses, number of targets)`."""

    data: Any = MISSING
    """The data: `_target_` names a class with `train` and `valid` data sets."""

    train: TrainConfig = field(default_factory=TrainConfig)
    """The training loop."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer and its schedule."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """The layout."""

    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Number formats."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints."""

    comm: CommConfig = field(default_factory=CommConfig)
    """Communication."""

    placement: PlacementConfig = field(default_factory=PlacementConfig)
    """Placement of ranks."""

    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)
    """Restarts."""

    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    """Records."""

    callbacks: dict[str, Any] = field(default_factory=dict)
    """Named callbacks of the training loop, each with its `_target_`."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Where ranks run."""

    follow: Optional[bool] = None
    """Show the run's progress until it ends. Null: yes for local runs, no for Slurm."""

    dry_run: bool = False
    """Print what would be submitted, and the checks, and submit nothing."""

    json: bool = False
    """Print one JSON object instead of text."""


@dataclass
class GPTModel:
    """A decoder-only transformer: the options of `dthpc.models.gpt.GPT`."""

    _target_: str = "dthpc.models.gpt.GPT"
    """The model class."""

    dim: int = MISSING
    """Width of the residual stream."""

    layers: int = MISSING
    """Transformer blocks."""

    heads: int = MISSING
    """Attention heads; `dim` divides by it."""

    kv_heads: Optional[int] = None
    """Heads of keys and values (grouped-query attention); null: as many as `heads`."""

    hidden: Optional[int] = None
    """Width of the feed-forward layer; null: 4·dim, or about 8/3·dim for SwiGLU."""

    vocab_size: Optional[int] = None
    """Rows of the embedding; null: what the data's tokenizer has."""

    max_seq_len: Optional[int] = None
    """Longest sequence; null: `train.seq_len`."""

    norm: str = "rms"
    """`rms` or `layer`."""

    position: str = "rope"
    """`rope` or `learned`."""

    mlp: str = "swiglu"
    """`swiglu` or `gelu`."""

    tie_embeddings: bool = True
    """Use the embedding's matrix for the output as well."""

    dropout: float = 0.0
    """Share of activations dropped in training."""


@dataclass
class TextDataFields:
    """Text for a language model: the options of `dthpc.data.text.TextData`."""

    _target_: str = "dthpc.data.text.TextData"
    """The data class."""

    source: Any = MISSING
    """Where the text comes from: `_target_` names a class such as `dthpc.data.corpus.TextFiles`."""

    tokenizer: Any = field(default_factory=lambda: {"_target_": "dthpc.data.tokenizer.ByteTokenizer"})
    """Text to tokens: `_target_` names a class such as `dthpc.data.tokenizer.ByteTokenizer`."""

    seq_len: int = MISSING
    """Tokens of a sample; follows `train.seq_len`."""

    valid_fraction: float = 0.05
    """Share of the text that is held out, by a rule that depends on the text alone: its paths and records."""

    cache_dir: Optional[str] = None
    """Folder of the packed tokens; null: `$DTHPC_CACHE`, else `dthpc` in the user's cache folder."""

    max_train_tokens: Optional[int] = None
    """Use only so many tokens of the training text; null: all."""
