"""The cluster's network as `scontrol show topology` prints it: a tree of switches, or blocks of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dthpc.errors import UserError
from dthpc.slurm.hostlist import expand
from dthpc.slurm.keyvalues import clean_lines
from dthpc.slurm.units import is_absent

_NAMES = ("SwitchName", "BlockName", "AggregatedBlock")


@dataclass(frozen=True)
class Switch:
    """One switch of a tree (`topology/tree`), or one block of nodes (`topology/block`)."""

    name: str

    level: int = 0
    """0: a leaf, or a smallest block; switches above it have higher numbers."""

    nodes: list[str] = field(default_factory=list)
    """All nodes below it."""

    children: list[str] = field(default_factory=list)
    """Names of the switches directly below it."""


def parse_topology(text: str) -> list[Switch]:
    """The switches or blocks of a cluster, the leaves first; none where Slurm knows of no topology.

    Blocks of blocks have no level of their own in Slurm's words: they are ordered by their size.

    Raises:
        UserError: a list of nodes or of switches is malformed.
    """
    found = [switch for line in clean_lines(text) if (switch := _switch(line.strip())) is not None]
    by_name = {switch.name: switch for switch in found}
    whole = [_with_nodes(switch, by_name) for switch in found]
    return sorted(whole, key=lambda switch: (switch.level, len(switch.nodes)))


def paths_of(switches: Sequence[Switch]) -> dict[str, tuple[str, ...]]:
    """For each node the switches above it, from the top of the tree to its leaf."""
    above: dict[str, list[str]] = {}
    for switch in reversed(switches):
        for node in switch.nodes:
            above.setdefault(node, []).append(switch.name)
    return {node: tuple(names) for node, names in above.items()}


def leaves_of(switches: Sequence[Switch]) -> list[Switch]:
    """The switches that nodes are plugged into, or the smallest blocks."""
    inner = {name for switch in switches for name in switch.children}
    aggregated = [switch for switch in switches if switch.children and not inner.isdisjoint(switch.children)]
    return [switch for switch in switches if switch not in aggregated and switch.nodes]


def _switch(line: str) -> Switch | None:
    words = dict(word.split("=", 1) for word in line.split() if "=" in word)
    key = next((name for name in _NAMES if name in words), None)
    if key is None or not line.startswith(f"{key}="):
        return None
    level = words.get("Level", "1" if key == "AggregatedBlock" else "0")
    # An aggregated block is named by the blocks that it is made of.
    children = words[key] if key == "AggregatedBlock" else words.get("Switches", "")
    return Switch(
        name=words[key],
        level=int(level) if level.isdigit() else 0,
        nodes=_names(words.get("Nodes", "")),
        children=_names(children),
    )


def _names(text: str) -> list[str]:
    if is_absent(text):
        return []
    try:
        return expand(text)
    except UserError as error:
        raise UserError(error.why, key="scontrol show topology", value=text, instead=error.instead) from error


def _with_nodes(switch: Switch, by_name: dict[str, Switch], depth: int = 0) -> Switch:
    """The switch with the nodes of those below it, where Slurm does not list them itself."""
    if switch.nodes or depth > len(by_name):
        return switch
    below = [_with_nodes(by_name[name], by_name, depth + 1) for name in switch.children if name in by_name]
    nodes = list(dict.fromkeys(node for child in below for node in child.nodes))
    return Switch(switch.name, switch.level, nodes, switch.children)
