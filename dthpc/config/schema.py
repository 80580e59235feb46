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

from dthpc.config.cluster import ClusterConfig
from dthpc.config.comm import CommConfig
from dthpc.config.parallel import ParallelConfig, PrecisionConfig
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
    """Consecutive attempts that may end without a new checkpoint before the run stops with the reason. The same
    exception after the same step twice stops it at once, unless another node might mend it."""

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
