"""How the ranks of an attempt find each other.

Rank 0 binds its ports first and publishes them afterwards, with every address of its machine and a random word, in the
attempt's folder. The others try the addresses until a machine says that word. So no port is guessed, no address is
taken from the launcher, and the address that is used is one that was seen to work.
"""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from dthpc.comm.addresses import (
    Address,
    candidates,
    host_identity,
    interface_of,
    loopback_interface,
    machine_addresses,
)
from dthpc.comm.fabric.decide import FabricWish
from dthpc.comm.fabric.live import read_network
from dthpc.comm.fabric.settle import (
    Request,
    Settled,
    collect,
    decide_for,
    export,
    fall_back,
    publish,
    publish_error,
    receive,
    tell,
)
from dthpc.comm.hello import Answer, HelloServer, dial
from dthpc.errors import UserError, nearest
from dthpc.rundir import AttemptDir, read_json, write_json

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_ARRIVED = "dthpc/arrived"
_SETTLED = "dthpc/settled"
_TRIED = "dthpc/tried"
_ENDED = "dthpc/ended"
_DIAL_TIMEOUTS_S = (0.5, 1.0, 2.0, 5.0)


class Identity(Protocol):
    """The part of a rank's identity that a rendezvous needs."""

    @property
    def rank(self) -> int:
        """Number among all ranks."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def host(self) -> str:
        """Name of this node."""


class RendezvousError(Exception):
    """The ranks did not find each other; says which, where, and what was tried."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks met."""

    store: TCPStore
    """The key-value store on rank 0."""

    address: str
    """Address of rank 0 that this rank uses."""

    interface: str | None
    """Network interface of this rank's traffic; `None`: what the user exported."""

    hosts: tuple[str, ...]
    """Names of the hosts, by first rank; on rank 0 only, empty on the others."""

    fabric: Settled
    """What the ranks of this node use, and why."""

    single_host: bool = False
    """Whether all ranks are on one machine."""


def connect(
    identity: Identity,
    attempt: AttemptDir,
    backend: str,
    *,
    rendezvous_timeout_s: float = 300.0,
    collective_timeout_s: float = 600.0,
    interface: str | None = None,
) -> Rendezvous:
    """Meet the other ranks and initialise `torch.distributed`.

    Args:
        identity: which rank this is.
        attempt: the attempt's folder, shared by all ranks.
        backend: name for `init_process_group`.
        rendezvous_timeout_s: seconds that ranks wait for each other.
        collective_timeout_s: seconds after which a collective is an error.
        interface: network interface to use; `None`: decide.

    Raises:
        RendezvousError: not all ranks came in time, or rank 0 can't be reached.
        UserError: this machine has no such interface, or what the user exported can't work.
    """
    libraries = frozenset({"gloo", *(["nccl"] if "nccl" in backend else [])})
    request = Request(FabricWish(interface), libraries)
    meeting = meet(identity, attempt, rendezvous_timeout_s=rendezvous_timeout_s, request=request)
    export_fabric(meeting, request)
    begin(meeting, identity, backend, collective_timeout_s)
    return meeting


def begin(meeting: Rendezvous, identity: Identity, backend: str, timeout_s: float) -> None:
    """Initialise `torch.distributed` among ranks that have met.

    Args:
        meeting: where they met.
        identity: which rank this is.
        backend: name for `init_process_group`.
        timeout_s: seconds after which a collective is an error.
    """
    import torch.distributed as dist

    dist.init_process_group(
        backend,
        store=meeting.store,
        rank=identity.rank,
        world_size=identity.world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def meet(
    identity: Identity, attempt: AttemptDir, *, rendezvous_timeout_s: float, request: Request | None = None
) -> Rendezvous:
    """Find rank 0 and decide with all ranks what they use of the network, without starting a process group.

    Args:
        identity: which rank this is.
        attempt: the attempt's folder.
        rendezvous_timeout_s: seconds that ranks wait for each other.
        request: what is wanted of the network.

    Raises:
        RendezvousError: not all ranks came in time, or rank 0 can't be reached.
        UserError: what is wanted, or was exported, can't work.
    """
    request = request or Request()
    addresses = machine_addresses()
    _check_interface(request.wish.interface, addresses)
    deadline = time.monotonic() + rendezvous_timeout_s
    if identity.rank == 0:
        return _host(identity, attempt, addresses, deadline, request)
    return _join(identity, attempt, addresses, deadline, request)


def export_fabric(meeting: Rendezvous, request: Request) -> dict[str, str]:
    """Set this rank's variables for what was decided; libraries read them at each new group.

    Returns:
        What was set; nothing that the user exported.
    """
    made = export(meeting.fabric, request, several=not meeting.single_host)
    if meeting.interface is None:
        return made
    over = {"GLOO_SOCKET_IFNAME": meeting.interface}  # Gloo takes one whole name
    if "nccl" in request.libraries and not meeting.interface.startswith("lo"):
        over["NCCL_SOCKET_IFNAME"] = f"={meeting.interface}"  # NCCL would read a bare name as a prefix
    asked = request.wish.interface is not None
    left = {name: value for name, value in over.items() if asked or not os.environ.get(name)}
    os.environ.update(left)
    return {**made, **left}


def leave(meeting: Rendezvous, identity: Identity, timeout_s: float = 10.0) -> None:
    """Wait until every rank has come here, so that no rank's exit ends another that is still writing its record.

    `srun --kill-on-bad-exit` kills the remaining ranks as soon as one ends with a code other than 0, as all do after a
    stop. Gives up quietly after `timeout_s`, or when rank 0, which holds the store, has gone.
    """
    deadline = time.monotonic() + timeout_s
    try:
        meeting.store.add(_ENDED, 1)
        for _ in _pauses(deadline):
            if meeting.store.add(_ENDED, 0) >= identity.world_size:
                break
        if identity.rank == 0:
            # The others still have to read the counter before the store goes away with this process.
            time.sleep(0.02)
    except Exception:
        # Whatever the store says, its peer has gone, and so there is nobody left to wait for.
        return


# --- rank 0 ---------------------------------------------------------------------------------------------------------


def _host(
    identity: Identity, attempt: AttemptDir, addresses: list[Address], deadline: float, request: Request
) -> Rendezvous:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(
        _loopback(addresses),
        0,
        world_size=identity.world_size,
        is_master=True,
        wait_for_workers=False,
        timeout=_left(deadline),
    )
    hello = HelloServer()
    try:
        offered = candidates(addresses, _names(identity), request.wish.interface)
        _publish(attempt, identity, store.port, hello, offered)
        arrivals = _await_arrivals(identity, attempt, store, deadline)
        mine = host_identity()
        nodes = {mine: identity.host, **{a["host_identity"]: a["host"] for a in arrivals}}
        fabric, failed = _decide(attempt, store, nodes, request, deadline)
    finally:
        hello.close()
    remote = [a for a in arrivals if a["host_identity"] != mine]
    # Ranks on this host bind the interface over which the ranks elsewhere were seen to come in.
    dialled = remote[0]["dialled"] if remote else None
    outward = interface_of(dialled, addresses) if dialled else None
    store.set(_SETTLED, json.dumps({"interface": outward, "single_host": not remote, "failed": failed}))
    hosts = tuple(dict.fromkeys([identity.host, *(a["host"] for a in arrivals)]))
    fabric = fall_back(fabric, failed) if failed else fabric
    chosen = _chosen(request, fabric, not remote, outward, addresses)
    return Rendezvous(store, dialled or _loopback(addresses), chosen, hosts, fabric, not remote)


def _decide(
    attempt: AttemptDir, store: TCPStore, nodes: dict[str, str], request: Request, deadline: float
) -> tuple[Settled, str | None]:
    """Decide for all nodes from their facts, and have one rank of each try it.

    Returns:
        What this node uses, and why it does not lead to all others after all, if so.
    """
    mine = host_identity()
    others = {node: host for node, host in nodes.items() if node != mine}
    try:
        networks = {mine: read_network(nodes[mine], placed=request.placed), **collect(store, others)}
        settled = decide_for(networks, mine, request)
    except UserError as error:
        publish_error(store, list(nodes), error)
        raise
    publish(store, settled)
    for _ in _pauses(deadline):
        if store.add(_TRIED, 0) >= len(others):
            break
        _raise_if_ended(attempt, [0])
    else:
        raise RendezvousError(f"not all of {', '.join(others.values())} tried {settled[mine].address} in time")
    failed = store.get(f"{_TRIED}/why").decode() if store.check([f"{_TRIED}/why"]) else None
    return settled[mine], failed


def _publish(attempt: AttemptDir, identity: Identity, port: int, hello: HelloServer, offered: list[Address]) -> None:
    write_json(
        attempt.rendezvous,
        {
            "word": hello.word,
            "hello_port": hello.port,
            "store_port": port,
            "host": identity.host,
            "host_identity": host_identity(),
            "candidates": [{"address": str(a.ip), "interface": a.interface} for a in offered],
        },
    )


def _await_arrivals(identity: Identity, attempt: AttemptDir, store: TCPStore, deadline: float) -> list[dict[str, Any]]:
    others = range(1, identity.world_size)
    for _ in _pauses(deadline):
        if store.add(_ARRIVED, 0) >= len(others):
            return [json.loads(store.get(f"{_ARRIVED}/{rank}")) for rank in others]
        _raise_if_ended(attempt, others)
    present = [rank for rank in others if store.check([f"{_ARRIVED}/{rank}"])]
    came = [json.loads(store.get(f"{_ARRIVED}/{rank}")) for rank in present]
    missing = [rank for rank in others if rank not in present]
    hosts = ", ".join(dict.fromkeys([identity.host, *(a["host"] for a in came)]))
    raise RendezvousError(
        f"ranks {ranges(missing)} of {identity.world_size} did not arrive in time; those that did are on: {hosts}. "
        f"Their logs tell what they tried: {attempt.rank_log(missing[0])}"
    )


# --- the other ranks ------------------------------------------------------------------------------------------------


def _join(
    identity: Identity, attempt: AttemptDir, addresses: list[Address], deadline: float, request: Request
) -> Rendezvous:
    published = _await_published(attempt, deadline)
    mine = host_identity()
    if published["host_identity"] == mine:
        reached = Answer(_loopback(addresses), _loopback(addresses), "reached")
    else:
        reached = _reach(identity, attempt, published, deadline)
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(
        reached.address, published["store_port"], identity.world_size, is_master=False, timeout=_left(deadline)
    )
    speaks = published["host_identity"] != mine and tell(
        store, mine, read_network(identity.host, placed=request.placed), request.wish.interface
    )
    arrival = {"host": identity.host, "host_identity": mine, "dialled": reached.address}
    store.set(f"{_ARRIVED}/{identity.rank}", json.dumps(arrival))
    store.add(_ARRIVED, 1)
    try:
        fabric = receive(store, mine)
        if speaks:
            _try(identity, store, fabric, published, addresses)
        store.wait([_SETTLED], _left(deadline))
    except RuntimeError as error:
        _raise_if_ended(attempt, range(identity.world_size))
        raise RendezvousError(
            f"rank 0 on {published['host']} was reached at {reached.address}, but not all ranks came in time"
        ) from error
    settled = json.loads(store.get(_SETTLED))
    fabric = fall_back(fabric, settled["failed"]) if settled["failed"] else fabric
    here = published["host_identity"] == mine
    over = settled["interface"] if here else interface_of(str(reached.local), addresses)
    chosen = _chosen(request, fabric, settled["single_host"], over, addresses)
    return Rendezvous(store, reached.address, chosen, (), fabric, settled["single_host"])


def _try(
    identity: Identity, store: TCPStore, fabric: Settled, published: dict[str, Any], addresses: list[Address]
) -> None:
    """See whether the interface that was decided on leads to rank 0, and tell it."""
    if fabric.interface is not None and fabric.address is not None:
        for timeout_s in _DIAL_TIMEOUTS_S[1:3]:
            answer = dial(fabric.address, published["hello_port"], published["word"], timeout_s)
            if answer.local is not None:
                break
        through = None if answer.local is None else interface_of(answer.local, addresses)
        if through not in (fabric.interface, *fabric.rails):
            how = f"is reached over {through}" if through else answer.why
            store.set(
                f"{_TRIED}/why",
                f"{fabric.address} on {published['host']} was to be reached from {identity.host} over "
                f"{fabric.interface}, and {how}; the interface over which rank 0 was first reached is used instead",
            )
    store.add(_TRIED, 1)


def _await_published(attempt: AttemptDir, deadline: float) -> dict[str, Any]:
    for _ in _pauses(deadline):
        # NFS clients remember that a file was absent; listing its folder makes them look again.
        list(attempt.path.iterdir())
        published = read_json(attempt.rendezvous)
        if isinstance(published, dict):
            return published
        _raise_if_ended(attempt, [0])
    raise RendezvousError(f"rank 0 published no address in time ({attempt.rendezvous}); its log: {attempt.rank_log(0)}")


def _reach(identity: Identity, attempt: AttemptDir, published: dict[str, Any], deadline: float) -> Answer:
    """Dial rank 0's addresses, best first, with time-outs that grow, until the right machine answers at one."""
    tried: dict[str, str] = {}
    offered = published["candidates"]
    for number, _ in enumerate(_pauses(deadline)):
        for candidate in offered:
            timeout_s = _DIAL_TIMEOUTS_S[min(number, len(_DIAL_TIMEOUTS_S) - 1)]
            answer = dial(candidate["address"], published["hello_port"], published["word"], timeout_s)
            if answer.local is not None:
                return answer
            tried[f"{candidate['address']} ({candidate['interface']})"] = answer.why
        _raise_if_ended(attempt, [0])
    what = "; ".join(f"{where}: {why}" for where, why in tried.items()) or "it has no address but loopback"
    raise RendezvousError(
        f"rank {identity.rank} on {identity.host} could not reach rank 0 on {published['host']}. Tried {what}"
    )


# --- shared ---------------------------------------------------------------------------------------------------------


def _raise_if_ended(attempt: AttemptDir, ranks: range | list[int]) -> None:
    """Stop waiting for a rank that has already left its exit record."""
    present = {path.name for path in attempt.path.iterdir()}
    for rank in ranks:
        path = attempt.rank_exit(rank)
        if path.name in present:
            record = read_json(path) or {}
            raise RendezvousError(f"rank {rank} ended before all had met: {record.get('error') or 'no reason given'}")


def _check_interface(interface: str | None, addresses: list[Address]) -> None:
    valid = [address.interface for address in addresses]
    if interface is not None and interface not in valid:
        raise UserError(
            f"{socket.gethostname()} has no such network interface with an address",
            key="comm.interface",
            value=interface,
            instead=nearest(interface, valid),
        )


def _chosen(
    request: Request, fabric: Settled, single_host: bool, reached: str | None, addresses: list[Address]
) -> str | None:
    """The interface for Gloo; `None` where the user exported one."""
    if request.wish.interface is not None:
        return request.wish.interface
    if os.environ.get("GLOO_SOCKET_IFNAME") and "GLOO_SOCKET_IFNAME" not in request.placed:
        return None
    if single_host:
        return loopback_interface(addresses)
    near = next((name for name in request.near if name in fabric.rails), None)
    return near or fabric.interface or reached or loopback_interface(addresses)


def _names(identity: Identity) -> list[str]:
    return list(dict.fromkeys([identity.host, socket.gethostname()]))


def _loopback(addresses: list[Address]) -> str:
    loopbacks = sorted((a.ip.version, str(a.ip)) for a in addresses if a.ip.is_loopback)
    return loopbacks[0][1] if loopbacks else "127.0.0.1"


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(0.1, deadline - time.monotonic()))


def _pauses(deadline: float) -> Iterator[None]:
    """Yield again and again until the deadline, at once first and then less and less often."""
    pause = 0.002
    yield
    while time.monotonic() < deadline:
        # Thousands of ranks look at the same file: spread them.
        time.sleep(pause * random.uniform(0.7, 1.3))
        pause = min(pause * 1.5, 0.25)
        yield


def ranges(ranks: Sequence[int]) -> str:
    """`[1, 2, 3, 7]` as `1-3, 7`."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
