"""Where a cluster keeps what, and the files that must lie there before its first daemon starts."""

import os
import shutil
import stat
from pathlib import Path

from . import cgroups, conf, host
from .spec import LOGIN

# Linux sets this major number aside for local use: no driver answers. The null device would not do, since
# ConstrainDevices takes the GPUs that a job did not ask for from it, and no program can live without /dev/null.
GPU_MAJOR = 120
# These two write to their standard streams only; Slurm's daemons also keep a log with time stamps.
PLAIN_LOGGERS = ("munged", "mariadb")


class Layout:
    """The paths of one cluster: pure arithmetic on its state directory."""

    def __init__(self, root):
        self.root = root
        self.etc = root / "etc"
        self.slurm_conf = self.etc / "slurm.conf"
        self.hosts = root / "hosts"
        self.enter = root / "enter"
        self.state_json = root / "state.json"
        self.pids = root / "pids"
        self.log = root / "log"
        self.munge = root / "munge"
        self.munge_socket = self.munge / "socket"
        self.database = root / "mariadb"
        self.database_socket = self.database / "socket"
        self.gpus = root / "dev"
        self.cgroups = root / "cgroups"
        self.save = root / "save"
        self.spool = root / "spool"
        self.private = root / "private"
        self.sys = root / "sys"

    def log_of(self, daemon):
        """The daemon's log."""
        return self.log / f"{daemon}.log"

    def output_of(self, daemon):
        """What the daemon wrote to its standard streams: the only trace of a start that fails early."""
        return self.log_of(daemon) if daemon in PLAIN_LOGGERS else self.log / f"{daemon}.out"


def write_files(spec, layout, addresses):
    """Fill a fresh state directory."""
    make_directories(spec, layout)
    layout.hosts.write_text(conf.hosts_file(addresses))
    shutil.copy(Path(__file__).with_name("enter.sh"), layout.enter)
    layout.enter.chmod(0o755)
    layout.slurm_conf.write_text(conf.slurm_conf(spec, layout, addresses))
    (layout.etc / "gres.conf").write_text(conf.gres_conf(spec, layout))
    if spec.switches:
        (layout.etc / "topology.conf").write_text(conf.topology_conf(spec))
    # 22.05 brought the key for systemd; older versions refuse what they do not know.
    (layout.etc / "cgroup.conf").write_text(conf.cgroup_conf(spec, host.slurm_version() >= (22, 5)))
    if spec.accounting:
        # slurmdbd insists that nobody else can read it.
        (layout.etc / "slurmdbd.conf").touch(0o600)
        (layout.etc / "slurmdbd.conf").write_text(conf.slurmdbd_conf(layout, addresses))
    for i in range(spec.gpus):
        os.mknod(layout.gpus / f"nvidia{i}", stat.S_IFCHR | 0o666, os.makedev(GPU_MAJOR, i))
    for node, lines in cgroups.create(spec.name, spec.node_names).items():
        (layout.cgroups / node).write_text("".join(f"{line}\n" for line in lines))
        cgroups.pin(spec.name, node, layout.cgroups / f"{node}.namespace")


def make_directories(spec, layout):
    """Every directory, with what each must allow to whom."""
    for path in (
        layout.etc,
        layout.pids,
        layout.log,
        layout.munge,
        layout.spool,
        layout.gpus,
        layout.cgroups,
        layout.sys,
    ):
        path.mkdir(mode=0o755)
    for path in (layout.save, layout.database):
        path.mkdir(mode=0o700)
    for node in spec.node_names:
        (layout.spool / node).mkdir(mode=0o755)
    for machine in spec.node_names if spec.private_tmp else ():
        for kind in ("tmp", "shm"):
            (layout.private / machine / kind).mkdir(parents=True)
            (layout.private / machine / kind).chmod(0o1777)
    for daemon in daemon_names(spec):
        # Slurm would make its logs readable to root alone.
        layout.log_of(daemon).touch(0o644)


def daemon_names(spec):
    """Every daemon of the cluster, in the order of their start."""
    accounting = ["mariadb", "slurmdbd"] if spec.accounting else []
    return ["munged", *accounting, "slurmctld", *(f"slurmd.{node}" for node in spec.node_names)]


def machine_of(daemon):
    """The host that a daemon runs on."""
    return daemon.partition(".")[2] or LOGIN
