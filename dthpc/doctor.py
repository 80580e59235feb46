"""`python -m dthpc.doctor`: this node, or a recorded one: its topology, where ranks would go, what is wrong with it.

No torch, no Hydra. With `--topology FILE` it plans for a machine that one is not on, whatever kind of text FILE holds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from dthpc.comm.fabric.report import report
from dthpc.errors import UserError, UserErrors, nearest, raise_together, tell
from dthpc.monitor.table import print_lines
from dthpc.options import OptionParser, choice, file, filled, whole
from dthpc.placement.cpuset import parse_cpus
from dthpc.placement.diagnose import diagnose
from dthpc.placement.diagnose_node import diagnose_node
from dthpc.placement.draw import draw
from dthpc.placement.plan.here import visible_words
from dthpc.placement.plan.nodes import Plan, decide_nodes
from dthpc.placement.plan.units import compute_gpus, units_of
from dthpc.placement.plan.unmet import unmet
from dthpc.placement.plan.wish import MOST_RANKS, RESERVE, SMT, TALK, Wish
from dthpc.placement.problem import Problem
from dthpc.placement.read.combine import combine
from dthpc.placement.read.live import read_live
from dthpc.placement.read.recognise import read_path, read_text
from dthpc.placement.table import print_placement
from dthpc.placement.topology import Topology

EXIT_PROBLEMS = 1
EXIT_USER_ERROR = 2

SCHEMA = 1
"""Version of the JSON object."""

_OPTIONS = {
    "cluster.tasks_per_node": "--ranks",
    "cluster.gpus_per_node": "--gpus",
    "placement.cores_per_rank": "--cores-per-rank",
    "placement.helpers": "--helpers",
    "placement.smt": "--smt",
    "placement.reserve": "--reserve",
    "placement.nics": "--nics",
    "allowed CPUs": "--cpus",
}
"""This command's option for each key of the configuration that says the same."""

_EPILOG = f"""\
--topology takes what `nvidia-smi topo -m`, `lstopo --of xml`, `lscpu`, `numactl -H`, `rocm-smi --showtopo`, `ibstat`,
`scontrol show node`, NCCL (its topology file) and others print, or a recorded /sys; several
of them tell more of one node.

exit codes: 0 fine; {EXIT_PROBLEMS} an error was found on the node; {EXIT_USER_ERROR} texts or demands do not fit
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Look at a node.

    Args:
        argv: words of the command line; those of the process by default.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments = _parser().parse_args(words)
        for hint in _without_effect(arguments):
            print(f"dthpc: {hint}", file=sys.stderr)
        return _examine(arguments, sys.stdout)
    except UserError as found:
        error = _as_options(found, any(word.startswith("--vis") for word in words))
        tell(error, "--json" in words, {"schema": SCHEMA})
        return EXIT_USER_ERROR
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


_COUNTS = {
    "--ranks": "ranks on the node (default: one a GPU, or one a memory node)",
    "--gpus": "GPUs that the ranks use together (default: one each; 0: none)",
    "--cores-per-rank": "cores of each rank (default: its share)",
    "--helpers": "cores of each share for data loading and communication threads",
    "--nics": "NICs of each rank (default: its share of the nearest)",
}
"""Options with a whole number, and what it is."""

_TEXTS = {
    "--reserve": ("CPUS", "0,8", "CPUs left alone, such as 0,8, or the word l3 or numa: the first core of each"),
    "--cpus": ("CPUS", "0-31", "CPUs that may be used, such as 0-31 (default: all that are allowed)"),
    "--axes": ("A=N,…", "tp=4", "the layout from the innermost axis, such as tp=4,shard=2: who talks most"),
}
"""Options with a text: how it is called, an example, and what it is."""


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        bare="--topology",
        prog="python -m dthpc.doctor",
        description="Show a node's topology, where ranks would go on it, and what is wrong with it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--topology",
        nargs="+",
        type=file("--topology", "topo.txt"),
        metavar="FILE",
        help="texts of another node; -: standard input (default: this node)",
    )
    for option, told in _COUNTS.items():
        add(option, type=whole(option), metavar="N", help=told)
    words = f"{{{','.join(SMT)}}}"
    add("--smt", type=choice("--smt", SMT), default="one", metavar=words, help="threads of a core (default: one)")
    for option, (metavar, example, told) in _TEXTS.items():
        add(option, type=filled(option, example), metavar=metavar, help=told)
    add("--visible", metavar="IDS", help="GPUs that may be used, as in CUDA_VISIBLE_DEVICES")
    add(
        "--folder",
        type=file("--folder", "runs"),
        default=Path("runs"),
        metavar="FOLDER",
        help="where runs are written (default: runs)",
    )
    add(
        "--network",
        nargs="*",
        type=file("--network", "node1.txt"),
        metavar="FILE",
        help="which network ranks would use, of nodes that texts show (`ip addr`, `ifconfig`, `ibdev2netdev`, NCCL's "
        "log, settings, …; one file a node); without a file: of this one",
    )
    add("--json", action="store_true", help="print one JSON object: the topology read, the plan, the problems")
    return parser


def _examine(arguments: argparse.Namespace, out: TextIO) -> int:
    if arguments.network is not None:
        return report(arguments.network, arguments.json, out)
    live = arguments.topology is None
    topology = read_live() if live else combine([_read(path) for path in arguments.topology])
    wish = _wish(arguments, topology, live)
    plan = decide_nodes([(topology.host or "node", topology)], wish)
    raise_together(unmet(topology, wish, plan.nodes[0][1]))
    problems = diagnose(topology, plan.nodes[0][1])
    if live:
        problems += diagnose_node(topology, arguments.folder)
    if arguments.json:
        _print_json(topology, plan, problems, out)
    else:
        _print(topology, plan, problems, out)
    return EXIT_PROBLEMS if any(problem.severity == "error" for problem in problems) else 0


def _read(path: Path) -> Topology:
    return read_text(sys.stdin.read(), "standard input") if str(path) == "-" else read_path(path)


def _wish(arguments: argparse.Namespace, topology: Topology, live: bool) -> Wish:
    visible = visible_words(os.environ) if live and compute_gpus(topology) else None
    if arguments.visible is not None:
        visible = [word.strip() for word in arguments.visible.split(",") if word.strip()]
    words = arguments.reserve in RESERVE
    ranks = _ranks(topology, visible) if arguments.ranks is None else arguments.ranks
    return Wish(
        ranks=ranks,
        gpus=arguments.gpus,
        cores_per_rank=arguments.cores_per_rank,
        helpers=arguments.helpers,
        smt=arguments.smt,
        reserved=frozenset() if arguments.reserve is None or words else parse_cpus(arguments.reserve, "--reserve"),
        reserve=arguments.reserve if words else None,
        nics=arguments.nics,
        allowed=None if arguments.cpus is None else parse_cpus(arguments.cpus, "--cpus"),
        visible=visible,
        axes=_axes(arguments.axes, ranks),
    )


def _ranks(topology: Topology, visible: Sequence[str] | None) -> int:
    """One a GPU; without GPUs, one a memory node that has CPUs."""
    return len(units_of(topology, 0, visible)) or sum(1 for node in topology.numa or () if node.cpus) or 1


def _axes(text: str | None, ranks: int) -> list[tuple[str, int]]:
    """Axes, innermost first. Those that lie inside a node divide its ranks; an outer one may go beyond."""
    axes: list[tuple[str, int]] = []
    inside = 1
    for word in text.split(",") if text else ():
        name, _, degree = (part.strip() for part in word.partition("="))
        inside *= int(degree) if degree.isascii() and degree.isdigit() else 0
        if inside < 1:
            why = f"{word!r} is no axis with its degree"
        elif inside > MOST_RANKS:
            why = f"{inside} ranks are more than a layout is planned for (at most {MOST_RANKS})"
        elif name not in TALK or name in dict(axes):
            why = f"{name!r} is named twice" if name in TALK else f"{name!r} is no axis: {nearest(name, TALK)}"
        elif ranks % inside and inside % ranks:
            named = "×".join([*dict(axes), name])
            why = f"{inside} ranks of {named} fit neither into the node's {ranks} nor over whole nodes"
        else:
            axes.append((name, int(degree)))
            continue
        raise UserError(why, key="--axes", value=text, instead="such as tp=4,shard=2 for 8 ranks")
    return axes


def _without_effect(arguments: argparse.Namespace) -> Iterator[str]:
    """What was asked and says nothing about what is looked at, one sentence each."""
    asked = [action for action in _parser()._actions if getattr(arguments, action.dest, None) != action.default]
    given = [action.option_strings[-1] for action in asked if action.dest not in ("help", "json", "network")]
    if arguments.network is not None and given:
        verb = "has" if len(given) == 1 else "have"
        yield f"{', '.join(given)} {verb} no effect: --network tells of networks alone"
    elif arguments.topology is not None and "--folder" in given:
        yield "--folder has no effect: with --topology, another machine is looked at, whose folders are not here"


def _as_options(error: UserError, visible: bool) -> UserError:
    """The error under the names of this command's options, where configuration keys stand for them.

    Args:
        error: what was found.
        visible: whether GPUs were named by `--visible`, not by the environment.
    """
    if isinstance(error, UserErrors):
        return UserErrors([_as_options(one, visible) for one in error.errors])
    instead = error.instead
    if visible and error.key == "CUDA_VISIBLE_DEVICES":
        return UserError(
            error.why, key="--visible", value=error.value, instead="GPUs that the topology shows, or leave it out"
        )
    for key, option in _OPTIONS.items():
        instead = instead and instead.replace(f"{key}=", f"{option} ")
    return UserError(error.why, key=_OPTIONS.get(error.key or "", error.key), value=error.value, instead=instead)


def _print(topology: Topology, plan: Plan, problems: Sequence[Problem], out: TextIO) -> None:
    print_lines(out, draw(topology))
    if topology.sources:
        print_lines(out, "read from: " + ", ".join(f"{source.kind} ({source.where})" for source in topology.sources))
    print_lines(out, "\nPlacement")
    print_placement(out, plan)
    print_lines(out, "\nProblems")
    for problem in problems:
        for line in problem.lines():
            print_lines(out, f"  {line}")
    if not problems:
        print_lines(out, "  none found")
    for note in topology.notes:
        print_lines(out, f"  note: {note}")


def _print_json(topology: Topology, plan: Plan, problems: Sequence[Problem], out: TextIO) -> None:
    value = {
        "schema": SCHEMA,
        "topology": topology.to_json(),
        "plan": plan.nodes[0][1].to_json(),
        "problems": [problem.to_json() for problem in problems],
    }
    out.write(json.dumps(value, indent=2, allow_nan=False) + "\n")
    out.flush()


if __name__ == "__main__":
    sys.exit(main())
