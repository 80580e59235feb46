"""How a group's ranks make its communicator."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import Any

from dthpc.comm.mpi.errors import CommunicationTimeout
from dthpc.comm.mpi.runtime import Runtime
from dthpc.comm.rendezvous import ranges


def join(runtime: Runtime, store: Any, name: str, members: Sequence[int], own: int, timeout_s: float) -> Any:
    """Make a communicator of some ranks, which all call this.

    MPI would wait for ever for one that does not come, so they meet at the store before.

    Args:
        runtime: this process's MPI.
        store: the group's part of the key-value store.
        name: of the group; groups that are made at the same time have different ones.
        members: the default group's ranks, in the new group's order.
        own: this rank's position among them.
        timeout_s: seconds to wait for the others.

    Raises:
        CommunicationTimeout: not all came in time; says who is missing.
    """
    _meet(store, name, members, own, timeout_s)
    world = runtime.mpi.COMM_WORLD
    most = int(world.Get_attr(runtime.mpi.TAG_UB) or 32767)
    group = world.Get_group().Incl([runtime.ranks[member] for member in members])
    try:
        comm = world.Create_group(group, zlib.crc32(name.encode()) % most)
    finally:
        group.Free()
    comm.Set_errhandler(runtime.mpi.ERRORS_RETURN)
    return comm


def _meet(store: Any, name: str, members: Sequence[int], own: int, timeout_s: float) -> None:
    size = len(members)
    if size == 1:
        return
    began = time.monotonic()
    # A group of the same name may have been made before with the same store: rounds are counted.
    here = store.add(f"came/{own}", 1)
    if store.add("came", 1) == here * size:
        store.set(f"complete/{here}", "1")
        return
    pause_s = 0.0005
    while not store.check([f"complete/{here}"]):
        if time.monotonic() - began > timeout_s:
            missing = [member for at, member in enumerate(members) if store.add(f"came/{at}", 0) < here]
            raise CommunicationTimeout(
                f"rank {members[own]} waited {timeout_s:.1f} s to make group {name} (ranks {ranges(members)}); "
                f"did not come: rank {ranges(missing)}"
            )
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.05)
