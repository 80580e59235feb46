"""The command line: parse, call, print."""

import argparse
import json
import os
import shlex
import signal
import sys
import time

from . import host
from .cluster import Cluster, names_up
from .errors import MiniError
from .spec import DEFAULT_NAME, Spec, parse_pairs


def main(argv=None):
    """Run one verb; returns the exit status."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    # A polite kill takes the same way out as Ctrl-C, so that `up` cleans up behind itself.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return arguments.act(arguments) or 0
    except MiniError as error:
        print(f"minicluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has gone, as in `minicluster logs | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def parse(argv):
    """The arguments; everything after the first `--` is the command of `run`, untouched."""
    ours, dashes, command = argv, None, []
    if "--" in argv:
        dashes = argv.index("--")
        ours, command = argv[:dashes], argv[dashes + 1 :]
    arguments = parser().parse_args(ours)
    arguments.command = command
    if dashes is not None and arguments.act is not run:
        parser().error("only `run` takes a command after --")
    return arguments


def parser():
    """The grammar of the verbs."""
    top = argparse.ArgumentParser(prog="minicluster", description="A real Slurm cluster on this one machine.")
    verbs = top.add_subparsers(required=True, metavar="VERB")

    def verb(name, act, text, named=True):
        sub = verbs.add_parser(name, help=text, description=text)
        sub.set_defaults(act=act)
        if named:
            sub.add_argument("--name", default=DEFAULT_NAME, help="which cluster (default: %(default)s)")
        return sub

    verb("install", install, "install the distribution's Slurm, munge and MariaDB, starting none of them", named=False)
    add_up_options(verb("up", up, "start a cluster; returns when it has run a job"))
    verb("down", down, "stop a cluster and remove every trace of it, in whatever state it is")
    verb("status", status, "daemons, nodes and partitions").add_argument("--json", action="store_true", help="for programs")
    verb("run", run, "run a command on the login host: run [--name NAME] [--user USER] -- CMD ...").add_argument("--user", help="run it as this user")
    verb("env", env, "print what to export to use the cluster from this shell")
    sub = verb("node", node, "make a node vanish, come back, or lose its daemon")
    sub.add_argument("node")
    sub.add_argument("action", choices=list(NODE_ACTIONS), help="; ".join(f"{name}: {text}" for name, (_, text) in NODE_ACTIONS.items()))
    sub = verb("limit", limit, "shape a node's traffic, both ways")
    sub.add_argument("node")
    sub.add_argument("rate", help="tc's notation, such as 100mbit, or off")
    verb("preempt", preempt, "preempt a running job, by an urgent job on its nodes").add_argument("job")
    sub = verb("logs", logs, "paths of the daemons' logs, or the end of one")
    sub.add_argument("daemon", nargs="?")
    sub.add_argument("-n", "--lines", type=int, default=40)
    sub.add_argument("-f", "--follow", action="store_true")
    verb("list", list_clusters, "the clusters that are up", named=False)
    return top


def add_up_options(sub):
    """The options of `up`; their defaults are those of Spec."""
    for option, text in (("nodes", "number of nodes"), ("cpus", "cores a node"), ("gpus", "GPUs a node"), ("memory", "MB a node")):
        sub.add_argument(f"--{option}", type=int, default=getattr(Spec, option), help=f"{text}, invented (default: %(default)s)")
    sub.add_argument("--accounting", action=argparse.BooleanOptionalAction, default=True, help="slurmdbd and MariaDB, for sacct and QOS (default: on)")
    sub.add_argument("--preempt", default=Spec.preempt, help="what ranks jobs for preemption: partition (default), qos, or none")
    sub.add_argument("--set", nargs="+", action="extend", metavar="Key=Value", help="slurm.conf settings, over the defaults")
    sub.add_argument("--node-set", nargs="+", action="extend", metavar="Key=Value", help="settings of the NodeName line")
    sub.add_argument("--cgroup-set", nargs="+", action="extend", metavar="Key=Value", help="cgroup.conf settings")
    sub.add_argument("--partition", action="append", metavar="'NAME Key=Value ...'", help="change a partition or add one")
    sub.add_argument("--private-tmp", action="store_true", help="a /tmp and /dev/shm for each node, as on real machines")


# --- verbs ------------------------------------------------------------------------------------------------------


def install(arguments):
    """`minicluster install`"""
    host.install(print)


def up(arguments):
    """`minicluster up`"""
    cluster = Cluster(
        arguments.name,
        nodes=arguments.nodes,
        cpus=arguments.cpus,
        gpus=arguments.gpus,
        memory=arguments.memory,
        accounting=arguments.accounting,
        preempt=arguments.preempt,
        settings=parse_pairs("--set", arguments.set),
        node_settings=parse_pairs("--node-set", arguments.node_set),
        cgroup_settings=parse_pairs("--cgroup-set", arguments.cgroup_set),
        partitions=arguments.partition or [],
        private_tmp=arguments.private_tmp,
    )
    began = time.monotonic()
    cluster.up()
    me, name = os.path.join(os.path.relpath(os.path.dirname(sys.argv[0]) or "."), "minicluster"), "" if arguments.name == DEFAULT_NAME else f" --name {arguments.name}"
    spec = cluster.spec
    print(
        f"cluster '{spec.name}' is up after {time.monotonic() - began:.1f} s: "
        f"{spec.nodes} nodes with {spec.cpus} cores, {spec.gpus} GPUs and {spec.memory} MB each (invented)\n"
        f"  {me} run{name} -- sinfo          a command on its login host\n"
        f"  {me} run{name} -- bash           a shell there\n"
        f'  eval "$({me} env{name})"         use it from this shell\n'
        f"  {me} status{name}                daemons, nodes, partitions\n"
        f"  {me} down{name}                  stop and remove it"
    )


def down(arguments):
    """`minicluster down`"""
    Cluster(arguments.name).down()


def status(arguments):
    """`minicluster status`; the exit status tells whether every daemon lives"""
    found = Cluster.attach(arguments.name).status()
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        for daemon, state in found["daemons"].items():
            print(f"{daemon:16} {'pid ' + str(state['pid']) if state['alive'] else 'DEAD'}")
        for name, state in found["nodes"].items():
            print(f"{name:16} {state}")
        for partition in found["partitions"]:
            print(f"partition {partition['name']:12} {partition['state']}, {partition['nodes']} nodes")
    return 0 if found["healthy"] else 1


def run(arguments):
    """`minicluster run -- CMD`: becomes CMD, so that signals, terminal and exit status are its own"""
    if not arguments.command:
        raise MiniError("run: no command; write for example: slurm/minicluster run -- sinfo")
    host.require_root("run")
    environment, prefix = Cluster.attach(arguments.name).env(user=arguments.user)
    os.execve(prefix[0], [*prefix, *arguments.command], environment)


def env(arguments):
    """`minicluster env`: for eval, so notes are comments"""
    cluster = Cluster.attach(arguments.name)
    print(f"export SLURM_CONF={shlex.quote(str(cluster.layout.slurm_conf))}")
    print("# This shell stays on this machine, which reaches the cluster as one more submit host. Node names do not resolve here;")
    print(f"# for that, be on the login host: {' '.join(cluster.env()[1])} CMD ... (as root), or `minicluster run -- CMD ...`.")


NODE_ACTIONS = {
    "down": (Cluster.link_down, "pull its network cable"),
    "up": (Cluster.link_up, "plug it in again"),
    "kill": (Cluster.kill_slurmd, "kill -9 its slurmd"),
    "restart": (Cluster.restart_slurmd, "start slurmd again"),
    "crash": (Cluster.crash, "kill -9 everything on it"),
}


def node(arguments):
    """`minicluster node NODE ACTION`"""
    host.require_root("node")
    NODE_ACTIONS[arguments.action][0](Cluster.attach(arguments.name), arguments.node)


def limit(arguments):
    """`minicluster limit NODE RATE`"""
    host.require_root("limit")
    Cluster.attach(arguments.name).limit(arguments.node, None if arguments.rate == "off" else arguments.rate)


def preempt(arguments):
    """`minicluster preempt JOBID`"""
    host.require_root("preempt")
    print(Cluster.attach(arguments.name).preempt(arguments.job))


def logs(arguments):
    """`minicluster logs [DAEMON]`"""
    cluster = Cluster.attach(arguments.name)
    paths = {daemon: str(cluster.layout.log_of(daemon)) for daemon in cluster.daemons.names()}
    if arguments.daemon is None:
        for daemon, path in paths.items():
            print(f"{daemon:16} {path}")
    elif arguments.daemon not in paths:
        raise MiniError(f"logs {arguments.daemon}: no such daemon; the cluster has {', '.join(paths)}")
    else:
        follow = ["-F"] if arguments.follow else []
        os.execvp("tail", ["tail", "-n", str(arguments.lines), *follow, paths[arguments.daemon]])


def list_clusters(arguments):
    """`minicluster list`"""
    for name in names_up():
        spec = Cluster.attach(name).spec
        print(f"{name:14} {spec.nodes} nodes, {'with' if spec.accounting else 'without'} accounting, preemption by {spec.preempt}")
