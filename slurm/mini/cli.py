"""The command line: parse, call, print."""

import argparse
import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path

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
    dashes = argv.index("--") if "--" in argv else len(argv)
    grammar = parser()
    arguments = grammar.parse_args(argv[:dashes])
    arguments.command = argv[dashes + 1 :]
    if arguments.command and arguments.act is not run:
        grammar.error("only `run` takes a command after --")
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
    sub = verb("status", status, "daemons, nodes and partitions")
    sub.add_argument("--json", action="store_true", help="for programs")
    sub = verb("run", run, "run a command on the login host: run [--name NAME] [--user USER] -- CMD ...")
    sub.add_argument("--user", help="run it as this user (default: root)")
    verb("env", env, "print what to export to use the cluster from this shell")
    sub = verb("node", node, "make a node vanish, come back, or lose its daemon")
    sub.add_argument("node")
    sub.add_argument(
        "action", choices=list(NODE_ACTIONS), help="; ".join(f"{k}: {v[1]}" for k, v in NODE_ACTIONS.items())
    )
    sub = verb("daemon", daemon, "kill -9 a daemon, or start it again")
    sub.add_argument("daemon", help="as `status` calls it: slurmctld, slurmdbd, ...")
    sub.add_argument("action", choices=list(DAEMON_ACTIONS))
    sub = verb("limit", limit, "shape a node's traffic, both ways")
    sub.add_argument("node")
    sub.add_argument("rate", help="in tc's notation, such as 100mbit; or off")
    verb("preempt", preempt, "preempt a running job, by an urgent job on its nodes").add_argument("job")
    sub = verb("logs", logs, "paths of the daemons' logs, or the end of one")
    sub.add_argument("daemon", nargs="?")
    sub.add_argument("-n", "--lines", type=int, default=40)
    sub.add_argument("-f", "--follow", action="store_true")
    verb("list", list_clusters, "the clusters that are up", named=False)
    return top


def add_up_options(sub):
    """The options of `up`; their defaults are those of Spec."""
    numbers = {"nodes": "number of nodes", "cpus": "cores a node", "gpus": "GPUs a node", "memory": "MB a node"}
    for option, text in numbers.items():
        value = getattr(Spec, option)
        sub.add_argument(f"--{option}", type=int, default=value, help=f"{text}, invented (default: %(default)s)")
    text = "slurmdbd and MariaDB, for sacct and QOS (default: on)"
    sub.add_argument("--accounting", action=argparse.BooleanOptionalAction, default=Spec.accounting, help=text)
    text = "what ranks jobs for preemption: partition (default), qos or none"
    sub.add_argument("--preempt", default=Spec.preempt, metavar="KIND", help=text)
    for option, text in (
        ("--set", "slurm.conf settings, over the defaults"),
        ("--node-set", "settings of the NodeName line"),
        ("--cgroup-set", "cgroup.conf settings"),
    ):
        sub.add_argument(option, nargs="+", action="extend", metavar="Key=Value", help=text)
    text = "change a default partition or add one"
    sub.add_argument("--partition", action="append", metavar="'NAME Key=Value ...'", help=text)
    text = "a switch of the network's tree, such as 'leaf1 Nodes=node[1-2]' (topology/tree)"
    sub.add_argument("--switch", action="append", metavar="'NAME Key=Value ...'", help=text)
    sub.add_argument(
        "--private-tmp", action="store_true", help="a /tmp and /dev/shm for each node, as on real machines"
    )


# --- verbs ------------------------------------------------------------------------------------------------------------


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
        switches=arguments.switch or [],
        private_tmp=arguments.private_tmp,
    )
    began = time.monotonic()
    cluster.up()
    spec, took = cluster.spec, time.monotonic() - began
    me = os.path.relpath(Path(sys.argv[0]).parent) + "/minicluster"
    name = "" if spec.name == DEFAULT_NAME else f" --name {spec.name}"
    print(
        f"cluster '{spec.name}' is up after {took:.1f} s: {spec.nodes} nodes, "
        f"each with {spec.cpus} cores, {spec.gpus} GPUs and {spec.memory} MB (invented)\n"
        f"  {me} run{name} -- sinfo\n"
        f"      a command on its login host; `-- bash` for a shell\n"
        f'  eval "$({me} env{name})"\n'
        f"      use it from this shell, as any user\n"
        f"  {me} status{name}\n"
        f"      daemons, nodes, partitions\n"
        f"  {me} down{name}\n"
        f"      stop and remove it"
    )


def down(arguments):
    """`minicluster down`"""
    Cluster(arguments.name).down()
    print(f"cluster '{arguments.name}' is down")


def status(arguments):
    """`minicluster status`; the exit status tells whether every daemon lives"""
    found = Cluster.attach(arguments.name).status()
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        for name, state in found["daemons"].items():
            print(f"{name:16} {'pid ' + str(state['pid']) if state['alive'] else 'DEAD'}")
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
    print("# With it this machine is one more submit host of the cluster. Node names resolve on its own hosts only;")
    print(f"# to be on its login host, as root: {shlex.join(cluster.env()[1])} CMD ...")


NODE_ACTIONS = {
    "down": (Cluster.link_down, "pull its network cable"),
    "up": (Cluster.link_up, "plug it in again"),
    "kill": (Cluster.kill_slurmd, "kill -9 its slurmd"),
    "crash": (Cluster.crash, "kill -9 everything on it"),
    "restart": (Cluster.restart_slurmd, "start its slurmd"),
}
DAEMON_ACTIONS = {"kill": Cluster.kill, "restart": Cluster.restart}


def node(arguments):
    """`minicluster node NODE ACTION`"""
    host.require_root("node")
    act, _ = NODE_ACTIONS[arguments.action]
    act(Cluster.attach(arguments.name), arguments.node)


def daemon(arguments):
    """`minicluster daemon DAEMON ACTION`"""
    host.require_root("daemon")
    DAEMON_ACTIONS[arguments.action](Cluster.attach(arguments.name), arguments.daemon)


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
    paths = {name: str(cluster.layout.log_of(name)) for name in cluster.daemons.names}
    if arguments.daemon is None:
        for name, path in paths.items():
            print(f"{name:16} {path}")
    elif arguments.daemon not in paths:
        raise MiniError(f"logs {arguments.daemon}: no such daemon; the cluster has {', '.join(paths)}")
    else:
        follow = ["-F"] if arguments.follow else []
        os.execvp("tail", ["tail", "-n", str(arguments.lines), *follow, paths[arguments.daemon]])


def list_clusters(arguments):
    """`minicluster list`"""
    for name in names_up():
        spec = Cluster.attach(name).spec
        accounting = "with" if spec.accounting else "without"
        print(f"{name:14} {spec.nodes} nodes, {accounting} accounting, preemption by {spec.preempt}")
