"""What a cluster is asked to be, and the checks that refuse it before anything is started."""

import dataclasses
import re

from .errors import MiniError

DEFAULT_NAME = "mini"
LOGIN = "login"

# Keys the tool derives itself: overriding one of them would cut the cluster off from its own state.
OWNED_KEYS = {
    "clustername": "use --name",
    "slurmctldhost": "slurmctld always lives on host 'login'",
    "slurmuser": "the daemons run as root",
    "slurmduser": "the daemons run as root",
    "authinfo": "each cluster has its own munge socket",
    "statesavelocation": "it lives in the cluster's state directory",
    "slurmdspooldir": "it lives in the cluster's state directory",
    "slurmctldlogfile": "see `minicluster logs`",
    "slurmdlogfile": "see `minicluster logs`",
    "slurmctldpidfile": "it lives in the cluster's state directory",
    "slurmdpidfile": "it lives in the cluster's state directory",
    "accountingstoragetype": "use --accounting or --no-accounting",
    "accountingstoragehost": "use --accounting or --no-accounting",
    "preempttype": "use --preempt partition, qos or none",
    "grestypes": "use --gpus",
    "nodename": "use --nodes, --cpus, --gpus, --memory and --node-set",
    "partitionname": "use --partition 'NAME Key=Value ...'",
}


@dataclasses.dataclass
class Spec:
    """Everything `up` needs to know; it is written to state.json, so that later commands see the same cluster."""

    name: str = DEFAULT_NAME
    nodes: int = 3
    cpus: int = 8
    """Invented cores of each node."""
    gpus: int = 4
    """Invented GPUs of each node."""
    memory: int = 8192
    """Invented memory of each node, MB."""
    accounting: bool = True
    """Run slurmdbd and MariaDB: sacct, accounts and QOS are real."""
    preempt: str = "partition"
    """Who preempts whom: by `partition` priority, by `qos`, or `none`."""
    settings: dict = dataclasses.field(default_factory=dict)
    """slurm.conf keys that replace or add to the defaults."""
    node_settings: dict = dataclasses.field(default_factory=dict)
    """Keys of the NodeName line that replace or add to the defaults."""
    cgroup_settings: dict = dataclasses.field(default_factory=dict)
    """Keys of cgroup.conf."""
    partitions: list = dataclasses.field(default_factory=list)
    """Lines `NAME Key=Value ...`: replace the default partition of that name, or add one."""
    switches: list = dataclasses.field(default_factory=list)
    """Lines `NAME Key=Value ...` of topology.conf, such as `leaf1 Nodes=node[1,3]` and `root Switches=leaf[1-2]`: Slurm
    then knows the cluster as a tree of switches (TopologyPlugin=topology/tree)."""
    private_tmp: bool = False
    """Give every node a /tmp and a /dev/shm of its own, as on a real cluster."""

    def __post_init__(self):
        """Refuse what cannot work, naming the key, the value, the reason and the way out."""
        check_name(self.name)
        for key, low, high in (("nodes", 1, 99), ("cpus", 1, 1024), ("gpus", 0, 64), ("memory", 64, 64 << 20)):
            value = getattr(self, key)
            if not isinstance(value, int) or not low <= value <= high:
                raise MiniError(f"--{key} {value}: must be a whole number from {low} to {high}; write --{key} {low}")
        if self.preempt not in ("partition", "qos", "none"):
            raise MiniError(f"--preempt {self.preempt}: unknown; write partition, qos or none")
        if self.preempt == "qos" and not self.accounting:
            raise MiniError("--preempt qos: QOS live in the accounting database; drop --no-accounting")
        for key, value in self.settings.items():
            if key.lower() in OWNED_KEYS:
                raise MiniError(f"--set {key}={value}: minicluster sets {key} itself; {OWNED_KEYS[key.lower()]}")
        for line in self.partitions:
            partition_name(line)
        for line in self.switches:
            switch_name(line)

    @property
    def node_names(self):
        """node1 … nodeN."""
        return [f"node{i}" for i in range(1, self.nodes + 1)]

    @property
    def hosts(self):
        """Every host of the cluster: the login host, then the nodes."""
        return [LOGIN, *self.node_names]


def check_name(name):
    """Refuse a name that cannot be part of an interface, a namespace and a directory name."""
    # `mc-` + name is an interface on the host, and Linux allows 15 characters there.
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,11}", name):
        raise MiniError(
            f"--name {name}: must be 1 to 12 of a-z, 0-9 and '-', starting with a letter, "
            f"because network interfaces are named after it; write for example --name {DEFAULT_NAME}"
        )
    return name


def parse_pairs(option, words):
    """`["Key=Value", …]` as a dict; the value may itself contain '='."""
    pairs = {}
    for word in words or ():
        key, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"\w+", key):
            raise MiniError(f"{option} {word}: is not Key=Value; write for example {option} KillWait=5")
        pairs[key] = value
    return pairs


def partition_name(line):
    """The name in a partition line, written with or without `PartitionName=`."""
    return line_name(line, "--partition", "PartitionName", "debug PriorityTier=5 MaxTime=30")


def switch_name(line):
    """The name in a switch line, written with or without `SwitchName=`."""
    return line_name(line, "--switch", "SwitchName", "leaf1 Nodes=node[1-2]")


def line_name(line, option, key, example):
    """The name at the start of a line `NAME Key=Value ...`."""
    words = line.split()
    name = words[0] if words else ""
    if name.lower().startswith(f"{key.lower()}="):
        name = name.split("=", 1)[1]
    if not re.fullmatch(r"[\w.-]+", name) or any("=" not in word for word in words[1:]):
        shown = f"{option} '{example}'"
        raise MiniError(f"{option} '{line}': is not a name and Key=Value pairs; write for example {shown}")
    return name
