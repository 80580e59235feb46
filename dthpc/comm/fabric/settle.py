"""The decision among running ranks: facts of each node over the store, one decision by rank 0, proof, export.

One rank of each node tells its facts and tries the address that was decided on; so the work of rank 0 grows with the
number of nodes, and the bytes that a rank reads do not grow at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dthpc.comm.fabric.classify import stem, why_not
from dthpc.comm.fabric.decide import NOTHING_IN_COMMON, FabricPlan, FabricWish, NodeChoice, decide
from dthpc.comm.fabric.model import NodeNetwork, Route
from dthpc.comm.fabric.presets import needed, preset, unpinned
from dthpc.comm.fabric.settings import SOCKETS
from dthpc.comm.fabric.wire import pack, unpack
from dthpc.errors import UserError, raise_together
from dthpc.placement.problem import Problem

_FACTS = "dthpc/network"
_PLAN = "dthpc/fabric"
_PLACED_DEVICES = ("NCCL_IB_HCA", "UCX_NET_DEVICES")
_SHOWN = 8


class Store(Protocol):
    """The part of torch's key-value store that is needed."""

    def set(self, key: str, value: str) -> None:
        """Write."""

    def get(self, key: str) -> bytes:
        """Read; waits for the key."""

    def add(self, key: str, amount: int) -> int:
        """Count up; the sum."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read several at once; waits for all keys."""


@dataclass(frozen=True)
class Request:
    """What this rank brings along."""

    wish: FabricWish = field(default_factory=FabricWish)
    libraries: frozenset[str] = frozenset({"gloo"})
    """Libraries that will be in use; only their variables are set."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """`comm.environment`."""

    placed: Mapping[str, str] = field(default_factory=dict)
    """Variables that the placement has set for this rank: they are no user's word."""

    near: tuple[str, ...] = ()
    """Interfaces of the adapters that are nearest to this rank."""


@dataclass(frozen=True)
class Settled:
    """What the ranks of one node use."""

    fabric: str
    reason: str
    interface: str | None
    """`None`: over whatever rank 0 was reached."""

    address: str | None = None
    """Address of rank 0 in that network, to be tried."""

    rails: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """Warnings, for the log."""

    kept: Mapping[str, str] = field(default_factory=dict)
    """What the user exported and therefore stays."""

    def to_json(self) -> dict[str, Any]:
        """For the store and the run's records."""
        # Not asdict, which copies everything deeply, for each of thousands of nodes.
        return {**vars(self), "rails": list(self.rails), "notes": list(self.notes)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Settled:
        return cls(**{**value, "rails": tuple(value["rails"]), "notes": tuple(value["notes"])})


def tell(store: Store, node: str, network: NodeNetwork, asked: str | None = None) -> bool:
    """Tell a node's facts, if no other rank of it did.

    Args:
        store: of all ranks.
        node: identity of the node.
        network: its facts.
        asked: `comm.interface`.

    Returns:
        Whether this rank was the one.
    """
    if store.add(f"{_FACTS}/{node}/ranks", 1) != 1:
        return False
    store.set(f"{_FACTS}/{node}", pack(slim(network, asked)))
    return True


def collect(store: Store, nodes: Mapping[str, str]) -> dict[str, NodeNetwork]:
    """The facts of nodes.

    Args:
        nodes: names of the hosts by the node's identity; the facts are given by identity too, each with its name.
    """
    if not nodes:
        return {}
    # One request: a round trip of each of thousands of nodes would cost more than all that is done with the answers.
    texts = store.multi_get([f"{_FACTS}/{node}" for node in nodes])
    found = unpack(text.decode() for text in texts)
    return {node: _named(network, host) for (node, host), network in zip(nodes.items(), found, strict=True)}


def _named(network: NodeNetwork, name: str) -> NodeNetwork:
    return network if network.name == name else replace(network, name=name)


def slim(network: NodeNetwork, asked: str | None = None) -> NodeNetwork:
    """A node with what the decision needs: what may carry ranks, what that stands on, and what settings speak of.

    So rank 0 reads little of each of thousands of nodes. Where nothing may carry ranks, or settings leave interfaces
    out by name, all stay but those that container engines make by the hundred: the reasons are to be told.
    """
    spoken = " ".join(network.settings.values())
    masters = {interface.master for interface in network.interfaces.values()}
    reasons = {name: why_not(interface, network) for name, interface in network.interfaces.items()}
    usable = [name for name, reason in reasons.items() if reason is None]
    few = bool(usable) and not any(name in SOCKETS for name in network.settings)
    families = tuple({stem(name) for name in usable})

    def stays(name: str, reason: str | None) -> bool:
        if reason is None or name in spoken or name in masters or name == asked:
            return True
        # A prefix for NCCL must be known to take nothing else; ports tell what a bridge is.
        related = name.startswith(families) or network.interfaces[name].master is not None
        return "container" not in reason and (related or not few)

    kept = {name: interface for name, interface in network.interfaces.items() if stays(name, reasons[name])}
    return replace(network, interfaces=kept, routes=_evidence(network.routes, kept))


def _evidence(routes: Sequence[Route], kept: Container[str]) -> tuple[Route, ...]:
    """Routes that the decision looks at, without what differs from node to node and rack to rack."""
    told = [replace(route, gateway=None, metric=0) for route in routes if route.interface in kept]
    return tuple(dict.fromkeys(route for route in told if route.asked or route.destination.prefixlen == 0))


def decide_for(networks: Mapping[str, NodeNetwork], first: str, request: Request) -> dict[str, Settled]:
    """Decide for all nodes of the run.

    Args:
        networks: facts by identity of the node, each with the name of its host.
        first: identity of rank 0's node.
        request: of rank 0.

    Returns:
        By identity.

    Raises:
        UserError: what was asked for, or exported, can't work; or nodes lack the fabric that the others have.
    """
    names = _distinct({node: network.name for node, network in networks.items()})
    plan = decide({names[node]: _named(network, names[node]) for node, network in networks.items()}, request.wish)
    fatal, remarks = _sorted_out(plan, request, several=len(networks) > 1)
    raise_together(fatal)
    pinned, remark = _pins(plan, request)
    notes = (*remarks, *([remark] if remark else []))
    address = plan.nodes[names[first]].address
    together = all(choice.interface is not None for choice in plan.nodes.values())
    together = together and all(problem.what != NOTHING_IN_COMMON for problem in plan.problems)
    made: dict[tuple[Any, ...], Settled] = {}
    found = {}
    for node in networks:
        choice = plan.nodes[names[node]]
        # Made once, and written once, for all nodes that make the same choice.
        key = (choice.interface, choice.rails, choice.reason, id(choice.environment), id(choice.kept))
        if key not in made:
            made[key] = _settled(plan, choice, together, pinned, request, address, notes)
        found[node] = made[key]
    return found


def _settled(
    plan: FabricPlan,
    choice: NodeChoice,
    together: bool,
    pinned: Mapping[str, str],
    request: Request,
    address: str | None,
    notes: Sequence[str],
) -> Settled:
    environment = {**pinned, **needed(choice.environment, set(request.libraries))}
    if not together:
        environment = {name: value for name, value in environment.items() if choice.interface not in value.split("=")}
    environment = {name: value for name, value in environment.items() if name not in choice.kept}
    touched = {name: value for name, value in choice.kept.items() if name in pinned or name.endswith("_IFNAME")}
    return Settled(
        plan.fabric,
        f"{plan.reason}; {choice.reason if len(plan.nodes) > 1 else 'all ranks are on one machine'}",
        choice.interface if together else None,
        address,
        choice.rails if together else (),
        environment,
        tuple(notes),
        touched,
    )


def _pins(plan: FabricPlan, request: Request) -> tuple[dict[str, str], str | None]:
    """The variables of the preset: of `comm.environment`, over those of the fabric that was found."""
    found: dict[str, str] = {}
    remark = None
    if request.wish.fabric == "auto" and plan.fabric != "tcp" and {"nccl", "mpi"} & request.libraries:
        found, remark = unpinned(preset(plan.fabric))
    libraries = set(request.libraries)
    # What the configuration sets by name is set, whatever it is for.
    own = dict(request.environment) if request.wish.fabric == "auto" else needed(request.environment, libraries)
    return {**needed(found, libraries), **own}, remark if "nccl" in libraries else None


def _sorted_out(plan: FabricPlan, request: Request, several: bool) -> tuple[list[UserError], list[str]]:
    """Problems that end the run, and those that are said."""
    fatal: list[UserError] = []
    remarks: list[str] = []
    over_rdma = bool({"nccl", "mpi"} & request.libraries)
    for problem in plan.problems:
        setting = problem.setting
        if (
            setting is not None
            and not setting.startswith("comm.")
            and not needed({setting: ""}, set(request.libraries))
        ):
            continue
        lacks = " has no usable " in problem.what and over_rdma
        if problem.severity == "error" and (setting is not None or lacks):
            fatal.append(_error(problem))
        elif several or setting is not None:
            remarks.append(str(problem))
    more = [f"and {len(remarks) - _SHOWN} more of this kind"] if len(remarks) > _SHOWN else []
    return fatal[:_SHOWN], [*remarks[:_SHOWN], *more]


def _error(problem: Problem) -> UserError:
    key, _, value = problem.what.partition("=")
    place = f" on {problem.node}" if problem.node and problem.node not in problem.why else ""
    if not value:
        return UserError(f"{problem.what}: {problem.why}", key="comm.fabric", value="auto", instead=problem.fix)
    return UserError(f"{problem.why}{place}", key=key, value=value, instead=problem.fix)


def publish(store: Store, settled: Mapping[str, Settled]) -> None:
    """Tell every node what its ranks use."""
    distinct = {id(each): each for each in settled.values()}  # most nodes have the same
    texts = {key: json.dumps(each.to_json()) for key, each in distinct.items()}
    _write(store, {node: texts[id(each)] for node, each in settled.items()})


def _write(store: Store, plans: Mapping[str, str]) -> None:
    many: Any = store  # torch's stubs leave `multi_set` out
    many.multi_set([f"{_PLAN}/{node}" for node in plans], list(plans.values()))


def publish_error(store: Store, nodes: Sequence[str], error: UserError) -> None:
    """Tell every node that there is no way."""
    errors = getattr(error, "errors", [error])
    told = json.dumps({"errors": [[e.why, e.key, str(e.value), e.instead] for e in errors]})
    _write(store, dict.fromkeys(nodes, told))


def receive(store: Store, node: str) -> Settled:
    """What a node's ranks use.

    Raises:
        UserError: rank 0 found that there is no way.
    """
    value = json.loads(store.get(f"{_PLAN}/{node}"))
    raise_together([UserError(w, key=k, value=v, instead=i) for w, k, v, i in value.get("errors", ())])
    return Settled.from_json(value)


def fall_back(settled: Settled, why: str) -> Settled:
    """The same without the interface, which did not lead to rank 0."""
    gone = {settled.interface, f"={settled.interface}", *settled.rails}
    left = {name: value for name, value in settled.environment.items() if value not in gone}
    return replace(settled, interface=None, rails=(), environment=left, notes=(*settled.notes, why))


def export(
    settled: Settled, request: Request, environ: MutableMapping[str, str] = os.environ, several: bool = True
) -> dict[str, str]:
    """Set this rank's variables; what the user exported stays.

    Args:
        settled: of its node.
        request: what this rank brought.
        environ: the environment.
        several: whether there are other nodes; else nothing that names interfaces is set.

    Returns:
        What was set.
    """
    made = dict(settled.environment)
    if not several:
        made = {name: value for name, value in made.items() if not _names_interface(name, settled)}
    elif rail := next((name for name in request.near if name in settled.rails), None):
        # Of several rails of one network, each rank takes the one at its own cores.
        made.update({name: rail for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME") if name in made})
    placed = set(request.placed)
    for name in _PLACED_DEVICES:
        if name in placed and settled.fabric in ("infiniband", "roce"):
            made.pop(name, None)  # a share of the same devices, the nearest to this rank
        elif name in placed:
            environ.pop(name, None)
    made = {name: value for name, value in made.items() if name in placed or not environ.get(name)}
    environ.update(made)
    return made


def _names_interface(name: str, settled: Settled) -> bool:
    value = settled.environment[name]
    return settled.interface is not None and value.lstrip("=").split(",")[0] in (settled.interface, *settled.rails)


def _distinct(names: Mapping[str, str]) -> dict[str, str]:
    """Names of the nodes, numbered where hosts are called alike."""
    seen: dict[str, int] = {}
    found = {}
    for node, name in names.items():
        seen[name] = seen.get(name, 0) + 1
        found[node] = name if seen[name] == 1 else f"{name}#{seen[name]}"
    return found
