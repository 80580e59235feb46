"""The cluster as one object: what the verbs call, and what a test fixture uses directly."""

import contextlib
import dataclasses
import json
import os
import pwd
import shutil
import signal
import subprocess
import time

from . import cgroups, host, network, procs
from .daemons import Daemons
from .errors import MiniError
from .layout import Layout, write_files
from .spec import DEFAULT_NAME, LOGIN, Spec, check_name

BUSY_SECONDS = 60
PROOF_SECONDS = 30


class Cluster:
    """A Slurm cluster on this machine, up or not.

    `Cluster("demo", nodes=2, settings={"KillWait": "5"})` describes one, with the fields of `Spec` as keywords;
    `Cluster.attach("demo")` is one that is up already. As a context manager it is up inside and gone after.
    """

    def __init__(self, name=DEFAULT_NAME, **options):
        self.spec = Spec(name=name, **options)
        self.layout = Layout(host.STATE_ROOT / name)
        self.daemons = Daemons(self.spec, self.layout)

    @classmethod
    def attach(cls, name=DEFAULT_NAME):
        """The running cluster of that name."""
        state = read_state(check_name(name))
        if state is None:
            running = ", ".join(names_up()) or "none"
            start = f"slurm/minicluster up --name {name}"
            raise MiniError(f"cluster '{name}' is not up (up are: {running}); start it with: {start}")
        return cls(**state["spec"])

    @property
    def name(self):
        """The cluster's name."""
        return self.spec.name

    def __enter__(self):
        return self.up()

    def __exit__(self, *exception):
        self.down()

    # --- life ---------------------------------------------------------------------------------------------------

    def up(self):
        """Start everything, and return when all nodes are idle and a job has run; on failure nothing is left."""
        host.require(self.spec.accounting)
        with host.locked(self.name, "up") as lock, readable_by_all():
            if read_state(self.name) and any(map(self.daemons.pid, self.daemons.names)):
                raise MiniError(f"cluster '{self.name}' is up already; take it down first, or choose another --name")
            self._remove()
            try:
                self._build(lock)
            except BaseException:
                self._remove()
                raise
        return self

    def _build(self, lock):
        """From nothing to a cluster that has run a job."""
        root = self.layout.root
        root.mkdir()
        # A file system of its own: /run forbids programs and devices on many systems, and all is gone in one stroke.
        procs.checked(["mount", "-t", "tmpfs", "-o", "mode=0755", "minicluster", str(root)], pass_fds=[lock])
        with host.locked(".network", "up", BUSY_SECONDS):
            addresses = network.plan(self.spec)
            network.build(self.name, addresses, keep_fds=[lock])
        write_files(self.spec, self.layout, addresses)
        self.daemons.check_settings()
        for daemon in self.daemons.names:
            if daemon == "slurmctld" and self.spec.preempt == "qos":
                self._create_qos()
            self.daemons.start(daemon)
        self._prove()
        write_state(self.layout, self.spec, addresses)

    def _create_qos(self):
        """QOS that differ in grace time, and one that preempts them."""
        result = self.daemons.sacctmgr(
            "add qos low Priority=1 GraceTime=0 PreemptMode=requeue",
            "add qos low-grace Priority=1 GraceTime=20 PreemptMode=requeue",
            "add qos high Priority=100 Preempt=low,low-grace",
        )
        if result.returncode:
            raise MiniError(f"sacctmgr could not create the QOS: {result.stdout}{result.stderr}")

    def _prove(self):
        """Wait until every node is idle, then run a job."""
        nodes = self.spec.node_names
        for node in nodes:
            self.daemons.wait_until(f"slurmd.{node}", lambda node=node: self.node_states().get(node) == "idle")
        # Who changes partitions may have a default one that holds, or allows, fewer nodes.
        count = 1 if self.spec.partitions else len(nodes)
        result = self.daemons.on_login(["timeout", str(PROOF_SECONDS), "srun", f"-N{count}", "hostname"], cwd="/")
        hosts = set(result.stdout.split())
        if len(hosts) != count or not hosts <= set(nodes):
            said = f"{result.stdout}{result.stderr}\n{self.daemons.last_lines('slurmctld')}"
            raise MiniError(f"`srun -N{count} hostname` failed on the new cluster: {said}")

    def down(self):
        """Stop and remove everything; fine in any state, and when there is nothing."""
        if self.layout.root.exists() or network.existing(self.name):
            host.require_root("down")
            with host.locked(self.name, "down", BUSY_SECONDS):
                self._remove()

    def _remove(self):
        """Kill what lives in the namespaces, then remove namespaces, groups, mounts and state.

        In this order, since the next `down` finds by the namespaces' names what an interrupted one left.
        """
        mine = network.identities(self.name)
        if procs.namespace_of("/proc/self/ns/net") in mine:
            raise MiniError(f"down: called from inside cluster '{self.name}'; call it from the launch host")
        cgroups.thaw(self.name)
        with contextlib.ExitStack() as held:
            # An open namespace keeps its identity, so that no stranger gets it while we still look for it.
            for path in network.existing(self.name).values():
                held.enter_context(open(path))
            if stubborn := procs.kill_members(mine):
                raise MiniError(f"down: processes {stubborn} survive SIGKILL; try again when they are gone")
            network.remove(self.name)
            # Somebody may have entered between the last look and the removal of the name; now nobody can any more.
            procs.kill_members(mine)
        cgroups.remove(self.name)
        while os.path.ismount(self.layout.root):
            procs.checked(["umount", "--lazy", str(self.layout.root)])
        shutil.rmtree(self.layout.root, ignore_errors=True)

    # --- use ----------------------------------------------------------------------------------------------------

    def env(self, base=None, user=None):
        """What it takes to be on the login host: `(environment, argv prefix)` for subprocess.

        `user` also becomes that user; else the command runs as root.
        """
        environment = {**(os.environ if base is None else base), "SLURM_CONF": str(self.layout.slurm_conf)}
        prefix = [str(self.layout.enter), LOGIN]
        if user is not None:
            try:
                found = pwd.getpwnam(user)
            except KeyError:
                raise MiniError(f"user {user}: unknown on this machine; create it with: useradd -m {user}") from None
            environment.update(HOME=found.pw_dir, USER=user, LOGNAME=user)
            prefix += ["setpriv", f"--reuid={found.pw_uid}", f"--regid={found.pw_gid}", "--init-groups"]
        return environment, prefix

    def run(self, argv, *, user=None, env=None, **options):
        """subprocess.run on the login host; text is captured unless told otherwise."""
        environment, prefix = self.env(env, user)
        if not {"stdout", "stderr", "capture_output"} & options.keys():
            options["capture_output"] = True
        options.setdefault("text", True)
        return subprocess.run([*prefix, *map(str, argv)], env=environment, **options)

    def popen(self, argv, *, user=None, env=None, **options):
        """subprocess.Popen on the login host; the child is `argv` itself, so signals reach it."""
        environment, prefix = self.env(env, user)
        return subprocess.Popen([*prefix, *map(str, argv)], env=environment, **options)

    def output(self, *argv, **options):
        """What a command on the login host prints, stripped; its failure is an error."""
        result = self.run(argv, **options)
        if result.returncode:
            raise MiniError(f"{' '.join(map(str, argv))}: exit status {result.returncode}: {result.stderr.strip()}")
        return result.stdout.strip()

    # --- nodes --------------------------------------------------------------------------------------------------

    def link_down(self, node):
        """Pull the node's network cable: for everybody else it has vanished, while its processes live on."""
        network.set_link(self.name, self._node(node), False)

    def link_up(self, node):
        """Plug it in again."""
        network.set_link(self.name, self._node(node), True)
        # Have slurmd register at once: slurmctld asks a node that was down only about once a minute.
        self.daemons.signal(f"slurmd.{node}", signal.SIGHUP)

    def limit(self, node, rate):
        """Shape the node's traffic, both ways: `100mbit` (tc's notation), or None to lift it."""
        network.limit(self.name, self._node(node), rate)

    def kill_slurmd(self, node):
        """SIGKILL the node's slurmd; its job steps live on."""
        self.kill(f"slurmd.{self._node(node)}")

    def restart_slurmd(self, node):
        """Start the node's slurmd, ending the old one first if it is alive."""
        self.restart(f"slurmd.{self._node(node)}")

    def crash(self, node):
        """SIGKILL everything on the node, as a power cut does; `restart_slurmd` boots it."""
        path = network.existing(self.name)[self._node(node)]
        procs.kill_members({procs.namespace_of(path)})

    def kill(self, daemon):
        """SIGKILL any daemon, such as slurmctld."""
        self.daemons.stop(self._daemon(daemon))

    def restart(self, daemon):
        """Start any daemon again, ending the old one first if it is alive."""
        self.daemons.stop(self._daemon(daemon))
        self.daemons.start(daemon)

    def _daemon(self, daemon):
        if daemon not in self.daemons.names:
            raise MiniError(f"daemon {daemon}: cluster '{self.name}' has {', '.join(self.daemons.names)}")
        return daemon

    def _node(self, node):
        if node not in self.spec.node_names:
            raise MiniError(f"node {node}: cluster '{self.name}' has {', '.join(self.spec.node_names)}")
        return node

    def node_states(self):
        """Slurm's view: `{"node1": "idle", …}`; a `*` after the state means that the node does not answer."""
        lines = self.daemons.on_login(["sinfo", "-h", "-N", "-o", "%N %T"]).stdout.splitlines()
        return dict(line.split() for line in lines)

    def wait_node(self, node, *states, seconds=60):
        """Wait until the node is in one of the states; returns the state."""
        return self._wait(f"node {self._node(node)}", states, seconds, lambda: self.node_states().get(node))

    # --- jobs ---------------------------------------------------------------------------------------------------

    def job(self, job_id):
        """`scontrol show job` as a dict; empty once Slurm has forgotten the job."""
        text = self.daemons.on_login(["scontrol", "show", "-o", "job", str(job_id)]).stdout
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait_job(self, job_id, *states, seconds=60):
        """Wait until the job is in one of the states, such as RUNNING; returns the state."""
        return self._wait(f"job {job_id}", states, seconds, lambda: self.job(job_id).get("JobState"))

    @staticmethod
    def _wait(what, states, seconds, state):
        seen = None

        def arrived():
            nonlocal seen
            seen = state()
            return seen in states

        if not procs.wait_for(arrived, seconds, 0.2):
            raise MiniError(f"{what} is {seen} after {seconds} s, not {' or '.join(states)}")
        return seen

    def release(self, job_id):
        """Start a requeued job now: Slurm holds it back for two minutes."""
        self.output("scontrol", "update", f"JobId={job_id}", "StartTime=now")

    def preempt(self, job_id, *, seconds=1):
        """Preempt a running job: submit one that needs its nodes whole and ranks above it; returns that job's id."""
        nodes = self.job(job_id).get("NodeList")
        if not nodes or nodes == "(null)":
            raise MiniError(f"preempt {job_id}: the job is not running, so there is nothing to preempt")
        rank = {"partition": ["-p", "urgent"], "qos": ["--qos=high"]}.get(self.spec.preempt)
        if rank is None:
            raise MiniError(f"preempt {job_id}: cluster '{self.name}' was started with --preempt none")
        what = ["-J", "preemptor", "-o", "/dev/null", "-w", nodes, "--exclusive", f"--wrap=sleep {seconds}"]
        return self.output("sbatch", "--parsable", *rank, *what, cwd="/")

    def set_partition(self, partition, **settings):
        """`scontrol update PartitionName=…`, for example `set_partition("grace", GraceTime=5)`."""
        words = [f"{key}={value}" for key, value in settings.items()]
        self.output("scontrol", "update", f"PartitionName={partition}", *words)

    # --- looking ------------------------------------------------------------------------------------------------

    def status(self):
        """Daemons, nodes and partitions, as plain data; of the latter two nothing is known unless slurmctld answers."""
        pids = {daemon: self.daemons.pid(daemon) for daemon in self.daemons.names}
        nodes, partitions = {}, []
        if pids["slurmctld"]:
            nodes = self.node_states()
            partitions = self.daemons.on_login(["sinfo", "-h", "-o", "%R %a %D"]).stdout.splitlines()
        return {
            "name": self.name,
            "healthy": all(pids.values()) and bool(nodes),
            "daemons": {daemon: {"pid": pid, "alive": pid is not None} for daemon, pid in pids.items()},
            "nodes": nodes,
            "partitions": [dict(zip(("name", "state", "nodes"), line.split(), strict=True)) for line in partitions],
        }


@contextlib.contextmanager
def readable_by_all():
    """Whatever root's umask is, ordinary users must be able to read the configuration and reach the sockets."""
    before = os.umask(0o022)
    try:
        yield
    finally:
        os.umask(before)


def write_state(layout, spec, addresses):
    """Record that the cluster is up, whole or not at all."""
    state = {"spec": dataclasses.asdict(spec), "addresses": addresses, "up_since": time.time()}
    temporary = layout.state_json.with_suffix(".tmp")
    temporary.write_text(json.dumps(state, indent=2) + "\n")
    temporary.rename(layout.state_json)


def read_state(name):
    """What `up` recorded once it was done; None for a cluster that is not up."""
    try:
        return json.loads(Layout(host.STATE_ROOT / name).state_json.read_text())
    except FileNotFoundError:
        return None


def names_up():
    """The clusters that are up."""
    return sorted(path.parent.name for path in host.STATE_ROOT.glob("*/state.json"))
