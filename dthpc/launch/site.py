"""What the Slurm site is like, asked once at each submit, and what follows from it for signals, saving and requeue."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from dthpc.errors import UserError
from dthpc.launch.request import Request
from dthpc.slurm.client import SlurmClient
from dthpc.slurm.listings import SINFO_COLUMNS, SlurmConfig
from dthpc.slurm.mpi_types import ask_mpi_types
from dthpc.slurm.records import PartitionRecord, parse_partitions, state_is_usable
from dthpc.slurm.tables import separated_rows
from dthpc.slurm.topology import Switch, leaves_of, parse_topology
from dthpc.slurm.units import Gres, optional_seconds, parse_gres, seconds_to_time

EARLY_S = 60
"""Slurm may send the signal of `--signal=SIG@SECONDS` this much earlier than asked (man sbatch)."""

SIGNAL = "USR2"
"""The signal asked of Slurm before the time limit; NCCL used to consume USR1."""


@dataclass(frozen=True)
class NodeShape:
    """Nodes of one partition that are alike."""

    partition: str
    count: int
    cpus: int
    memory_mb: int
    gres: list[Gres]
    state: str
    usable: bool
    """Whether jobs are started on them."""

    def gpus(self, kind: str | None = None) -> int:
        """GPUs of one node; of one type only, where it is named."""
        found = (entry for entry in self.gres if entry.name == "gpu")
        return sum(entry.count for entry in found if kind in (None, entry.kind))


@dataclass(frozen=True)
class QosLimits:
    """What accounting tells of the chosen QOS."""

    name: str
    grace_s: float
    preempt_mode: str | None
    """`None`: the cluster's mode holds."""


@dataclass(frozen=True)
class Site:
    """The settings that matter to a run. Times in seconds."""

    version: tuple[int, ...]
    kill_wait_s: float
    """From SIGTERM to SIGKILL."""

    preempt_type: str
    preempt_mode: str
    user_signal_on_preemption: bool
    """Whether a preempted job gets the signal of `--signal` rather than SIGTERM."""

    job_requeue: bool
    mpi_default: str
    select_type: str
    task_plugins: str
    accounting: bool
    max_array_size: int
    partitions: list[PartitionRecord]
    shapes: list[NodeShape]
    qos: QosLimits | None = None
    mpi_types: tuple[str, ...] | None = None
    """What `srun --mpi=list` lists; `None` where nobody asked, or it does not tell."""

    switches: list[Switch] = field(default_factory=list)
    """The network, where Slurm knows it (`TopologyPlugin`)."""

    @property
    def binds_cores(self) -> bool:
        """Whether `srun --cpu-bind` has a plugin that obeys it."""
        return "affinity" in self.task_plugins

    @property
    def takes_gpu_options(self) -> bool:
        """Whether `--gpus-per-node` and its kind are known; the older plugin knows `--gres` alone."""
        return "cons_res" not in self.select_type

    def partition(self, name: str) -> PartitionRecord | None:
        """One partition, or `None`."""
        return next((record for record in self.partitions if record.name == name), None)

    def chosen(self, partition: str | None) -> list[PartitionRecord]:
        """The partitions a job may run in: those named, else the default one. Unknown names are left out."""
        if partition is None:
            return [record for record in self.partitions if record.default]
        return [found for name in partition.split(",") if (found := self.partition(name.strip()))]

    def shapes_of(self, partition: str) -> list[NodeShape]:
        """The kinds of nodes in a partition."""
        return [shape for shape in self.shapes if shape.partition == partition]

    def as_dict(self) -> dict[str, Any]:
        """What the records keep: all but the list of partitions."""
        left_out = ("partitions", "shapes", "qos", "switches")
        told = {name: value for name, value in vars(self).items() if name not in left_out}
        told["version"] = ".".join(map(str, self.version))
        return told


def probe(client: SlurmClient, qos: str | None = None, mpi: bool = False) -> Site:
    """Ask Slurm for its settings, all commands at once.

    Args:
        client: runs Slurm's commands.
        qos: the QOS whose limits matter.
        mpi: whether ranks talk by MPI, so that it matters how Slurm can wire it up.

    Raises:
        UserError: its commands are absent, or the controller does not answer.
    """
    client.require("sbatch", "srun", "scontrol")
    with ThreadPoolExecutor(4) as pool:
        try:
            config = pool.submit(client.config)
            partitions = pool.submit(client.ask, ["scontrol", "--oneliner", "show", "partition"])
            shapes = pool.submit(_shapes, client)
            limits = pool.submit(_qos, client, qos) if qos else None
            types = pool.submit(ask_mpi_types, client) if mpi else None
            switches = _switches(client, config.result())
            found = config.result(), parse_partitions(partitions.result()), shapes.result()
            site = _site(*found, limits.result() if limits else None, switches)
            return replace(site, mpi_types=types.result() or None) if types else site
        except KeyboardInterrupt:
            # The pool waits for its threads, and they for a Slurm that may not answer for a minute.
            client.abandon()
            raise


def _site(
    config: SlurmConfig,
    partitions: list[PartitionRecord],
    shapes: list[NodeShape],
    qos: QosLimits | None,
    switches: list[Switch],
) -> Site:
    # The option moved between versions, and either spelling says the same.
    user_signal = config.flags("SlurmctldParameters") | config.flags("PreemptParameters")
    array_size = config.get("MaxArraySize", "1001")
    return Site(
        version=config.version,
        kill_wait_s=config.seconds("KillWait", 30.0),
        preempt_type=config.get("PreemptType", "preempt/none"),
        preempt_mode=config.get("PreemptMode", "OFF"),
        user_signal_on_preemption=bool(user_signal & {"preempt_send_user_signal", "send_user_signal"}),
        job_requeue=config.get("JobRequeue", "1") == "1",
        mpi_default=config.get("MpiDefault", "none"),
        select_type=config.get("SelectType"),
        task_plugins=config.get("TaskPlugin"),
        accounting=config.accounting,
        max_array_size=int(array_size) if array_size.isdigit() else 1001,
        partitions=partitions,
        shapes=shapes,
        qos=qos,
        switches=switches,
    )


def _switches(client: SlurmClient, config: SlurmConfig) -> list[Switch]:
    """The network; empty where the site has not described it, or what Slurm says of it can't be read."""
    if config.get("TopologyPlugin") in ("", "topology/none", "topology/default", "topology/flat"):
        return []
    answer = client.try_once(["scontrol", "show", "topology"])
    try:
        return parse_topology(answer.output) if answer.code == 0 else []
    except UserError:
        return []


def _shapes(client: SlurmClient) -> list[NodeShape]:
    form = "|".join(SINFO_COLUMNS.values())
    text = client.ask(["sinfo", "--noheader", "--all", f"--format={form}"])
    shapes = []
    for row in separated_rows(text, list(SINFO_COLUMNS), "sinfo"):
        cpus, memory = (int("".join(takewhile(str.isdigit, row[name])) or 0) for name in ("CPUS", "MEMORY"))
        usable = state_is_usable(row["STATE"])
        gres = parse_gres(row["GRES"])
        shapes.append(NodeShape(row["PARTITION"], int(row["NODES"]), cpus, memory, gres, row["STATE"], usable))
    return shapes


def _qos(client: SlurmClient, name: str) -> QosLimits | None:
    """Grace time and mode of a QOS; `None` where accounting is off or does not tell."""
    if client.find("sacctmgr") is None:
        return None
    command = ["sacctmgr", "--noheader", "--parsable2", "show", "qos", name, "format=Name,GraceTime,PreemptMode"]
    answer = client.try_once(command)
    try:
        rows = separated_rows(answer.output, ["name", "grace", "mode"], "sacctmgr") if answer.code == 0 else []
        row = next(row for row in rows if row["name"] == name)
        mode = row["mode"].upper()
        return QosLimits(name, optional_seconds(row["grace"]) or 0.0, None if mode in ("", "CLUSTER") else mode)
    except (UserError, StopIteration):
        return None


@dataclass(frozen=True)
class Decisions:
    """How a run on this site is warned, how long it may save, and how it goes on."""

    lead_s: int
    """Seconds before the time limit at which Slurm is asked to signal; 0: there is no time limit of Slurm's."""

    grace_s: float
    """Seconds between the first signal and SIGKILL that a run can count on."""

    requeue: str
    """`requeue`, `resubmit`, `restart` or `never`."""

    preemption: str
    """How a preempted job is warned here."""

    reasons: dict[str, str] = field(default_factory=dict)
    """One line for each decision: why."""

    @property
    def signal(self) -> str | None:
        """The value of `--signal`."""
        return f"{SIGNAL}@{self.lead_s}" if self.lead_s else None

    def as_dict(self) -> dict[str, Any]:
        """For the records and the dry run."""
        return {**vars(self), "signal": self.signal}


def derive(site: Site | None, cfg: Any, request: Request) -> Decisions:
    """What follows from the site and the configuration.

    Args:
        site: the site; `None` for local runs.
        cfg: the configuration.
        request: what it asks for.
    """
    requeue, why_requeue = _requeue(site, cfg, request)
    if request.kind == "local" or site is None:
        # A local run is stopped by its user or its keeper, which waits as long as Slurm does by default.
        reasons = {"requeue": why_requeue, "grace": "local runs wait as long as Slurm does by default (KillWait)"}
        return Decisions(0, 30.0, requeue, "nothing preempts a local run", reasons)
    lead, why_lead = _lead(cfg, request) if request.kind == "slurm" else (0, "the allocation's own signals hold")
    grace, preemption = _preemption(site, cfg)
    reasons = {"signal": why_lead, "grace": preemption, "requeue": why_requeue, **_order(site, cfg, request)}
    return Decisions(lead, grace, requeue, preemption, reasons)


def _order(site: Site, cfg: Any, request: Request) -> dict[str, str]:
    """In which order ranks fill nodes, where the site has described its network."""
    leaves = leaves_of(site.switches)
    if len(leaves) < 2 or request.max_nodes < 3:
        return {}
    if cfg.cluster.srun.get("distribution") is not None:
        return {"ranks": f"numbered as cluster.srun.distribution={cfg.cluster.srun.distribution} says"}
    if not cfg.placement.by_switch:
        return {"ranks": "numbered node by node in the order of names: placement.by_switch=false"}
    most = max(len(leaf.nodes) for leaf in leaves)
    spread = f"the {len(leaves)} leaf switches have up to {most} nodes each"
    if request.nodes <= most:
        spread += "; cluster.sbatch.switches=1 waits for nodes under one"
    return {"ranks": f"numbered switch by switch, so that neighbours sit near each other ({spread})"}


def _lead(cfg: Any, request: Request) -> tuple[int, str]:
    early = f"Slurm may signal up to {EARLY_S} s earlier"
    asked = cfg.checkpoint.save_lead_s
    if asked is not None:
        return int(asked), f"checkpoint.save_lead_s={asked}; {early}"
    if math.isinf(request.time_s):
        return 300, f"no time limit was asked, and the partition's may end the job; {early}"
    lead = int(min(300, max(30, request.time_s / 10), request.time_s / 4))
    return lead, f"a tenth of {seconds_to_time(request.time_s)}, between 30 and 300 s; {early}"


def _preemption(site: Site, cfg: Any) -> tuple[float, str]:
    """The shortest grace over the partitions that the job may run in, and how a preempted job is warned there."""
    found = [_preemption_in(site, record) for record in site.chosen(cfg.cluster.partition)]
    return min(found, default=_preemption_in(site, None))


def _preemption_in(site: Site, partition: PartitionRecord | None) -> tuple[float, str]:
    where = f"partition {partition.name}" if partition else "the cluster"
    mode, grace = site.preempt_mode, 0.0
    if site.preempt_type == "preempt/partition_prio" and partition:
        mode, grace = partition.preempt_mode or mode, partition.grace_time_s
    elif site.preempt_type == "preempt/qos" and site.qos:
        where, mode, grace = f"QOS {site.qos.name}", site.qos.preempt_mode or mode, site.qos.grace_s
    kill = f"KillWait={site.kill_wait_s:g} s"
    if site.preempt_type == "preempt/none" or mode.upper() in ("OFF", "DISABLED"):
        return site.kill_wait_s, f"{where} is not preempted; a cancelled job has {kill}"
    if grace == 0:
        return site.kill_wait_s, f"{where} is preempted ({mode}) with GraceTime=0: SIGTERM, then {kill}"
    first = f"SIG{SIGNAL}" if site.user_signal_on_preemption else "SIGTERM"
    return grace, f"{where} is preempted ({mode}) with {first} at once, then GraceTime={grace:g} s"


def _requeue(site: Site | None, cfg: Any, request: Request) -> tuple[str, str]:
    asked = cfg.cluster.requeue
    if asked == "never":
        return "never", "cluster.requeue=never"
    if request.kind == "local":
        return "restart", "the keeper starts the ranks again"
    if request.kind == "allocation":
        return "restart", "an allocation of salloc can't be requeued: the keeper starts the ranks again while it lasts"
    if asked == "resubmit":
        return "resubmit", "cluster.requeue=resubmit: each attempt is a job of its own"
    if asked == "requeue":
        return "requeue", "cluster.requeue=requeue"
    default = "is on" if site is None or site.job_requeue else "is off, and --requeue overrides it"
    return "requeue", f"the job asks for --requeue (the site's JobRequeue {default})"


def unknown_partitions(site: Site, partition: str | None) -> Sequence[str]:
    """Names in `cluster.partition` that the site does not have."""
    names = partition.split(",") if partition else []
    return [name.strip() for name in names if site.partition(name.strip()) is None]
