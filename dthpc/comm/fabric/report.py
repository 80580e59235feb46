"""What was read of the nodes' networks, what ranks would use, and why: for people and as JSON. Free of torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from dthpc.comm.fabric.decide import FabricPlan, NodeChoice, decide
from dthpc.comm.fabric.live import read_network
from dthpc.comm.fabric.model import Interface, NodeNetwork
from dthpc.comm.fabric.recognise import from_path, from_text, must_tell
from dthpc.monitor.table import print_lines

EXIT_PROBLEMS = 1

SCHEMA = 1
"""Version of the JSON object."""


def report(files: Sequence[Path], as_json: bool, out: TextIO) -> int:
    """Print the networks of nodes and the decision for ranks on all of them.

    Args:
        files: a text of each node, or of several; `-`: standard input. This machine is asked where there are none.
        as_json: whether one JSON object is printed.
        out: where.

    Returns:
        0; `EXIT_PROBLEMS` where ranks could not work so.

    Raises:
        UserError: a text can't be read.
    """
    nodes = read_nodes(files)
    must_tell(list(nodes.values()))
    plan = decide(nodes)
    if as_json:
        shown = {name: node.to_json() for name, node in nodes.items()}
        value = {"schema": SCHEMA, "nodes": shown, "plan": plan.to_json()}
        out.write(json.dumps(value, indent=2, allow_nan=False) + "\n")
        out.flush()
    else:
        print_lines(out, "\n".join(_lines(nodes, plan)))
    return EXIT_PROBLEMS if plan.errors else 0


def read_nodes(files: Sequence[Path]) -> dict[str, NodeNetwork]:
    """The nodes of files by name; texts of one node are put together where they say its name."""
    if not files:
        live = read_network()
        return {live.name: live}
    nodes: dict[str, NodeNetwork] = {}
    for path in files:
        found = from_text(sys.stdin.read(), "standard input") if str(path) == "-" else from_path(path)
        for node in found:
            nodes[node.name] = nodes[node.name].merged(node) if node.name in nodes else node
    return nodes


def _lines(nodes: dict[str, NodeNetwork], plan: FabricPlan) -> Iterator[str]:
    for name, node in nodes.items():
        yield name
        for interface in node.interfaces.values():
            yield f"  {_interface(interface, plan.nodes[name])}"
        for device in node.devices:
            taken = device.name in plan.nodes[name].devices
            reason = "used" if taken else plan.nodes[name].rejected.get(device.name, "not used")
            yield f"  {device.name:<16} {device.kind or 'device'}  {reason}"
        yield from (f"  note: {note}" for note in node.notes)
    yield "\nDecision"
    yield f"  fabric {plan.fabric}: {plan.reason}"
    for name, choice in plan.nodes.items():
        yield f"  {name}: {choice.interface or 'no interface'}: {choice.reason}"
        if choice.advice:
            yield f"    likely: {choice.advice}"
        yield from (f"    {variable}={value}" for variable, value in choice.environment.items())
        yield from (f"    {variable}={value} (set already, kept)" for variable, value in choice.kept.items())
    yield "\nProblems"
    yield from (f"  {line}" for problem in plan.problems for line in problem.lines())
    if not plan.problems:
        yield "  none found"


def _interface(interface: Interface, choice: NodeChoice) -> str:
    state = {True: "up", False: "down", None: ""}[interface.up]
    addresses = " ".join(map(str, interface.addresses)) or "no address"
    if interface.name == choice.interface:
        verdict = "taken"
    elif interface.name in choice.rails:
        verdict = "of the same network"
    else:
        verdict = choice.rejected.get(interface.name, "not taken")
    return f"{interface.name:<16} {state:<4} {addresses}  ({verdict})"
