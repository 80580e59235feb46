"""One rank of a meeting, as a process of its own: `python -m tests.comm.meeting FOLDER '{"rank": 1, …}'`.

Prints one JSON object: what it found, or the error.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dthpc.comm.rendezvous import RendezvousError, connect, leave
from dthpc.errors import UserError
from dthpc.rundir import RunDir


@dataclass(frozen=True)
class Peer:
    """The part of an identity that a rendezvous needs."""

    rank: int
    world_size: int
    host: str


def main() -> None:
    request = json.loads(sys.argv[2])
    if "comm" in request:
        begin(request)
        return
    peer = Peer(request["rank"], request["world_size"], request["host"])
    attempt = RunDir(Path(sys.argv[1])).attempt(0)
    try:
        meeting = connect(
            peer,
            attempt,
            "gloo",
            rendezvous_timeout_s=request.get("timeout_s", 60.0),
            collective_timeout_s=30.0,
            interface=request.get("interface"),
        )
    except (RendezvousError, UserError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(peer.rank + 1)])
    dist.all_reduce(total)
    found = {
        "address": meeting.address,
        "interface": meeting.interface,
        "hosts": meeting.hosts,
        "sum": total.item(),
        "exported": os.environ.get("GLOO_SOCKET_IFNAME"),
    }
    leave(meeting, peer)
    dist.destroy_process_group()
    print(json.dumps(found), flush=True)


def begin(request: dict[str, Any]) -> None:
    """Start as a rank of a run does, by its `comm` group."""
    from omegaconf import OmegaConf

    from dthpc.comm.start import Choice, start
    from dthpc.config.comm import CommConfig

    peer = Peer(request["rank"], request["world_size"], request["host"])
    attempt = RunDir(Path(sys.argv[1])).attempt(0)
    try:
        comm = OmegaConf.merge(OmegaConf.structured(CommConfig), request["comm"])
        choice = Choice.of(comm, "cpu", peer.world_size, request.get("nodes", 1))
        started = start(choice, peer, attempt, placed=request.get("placed"), near=request.get("near", ()))
    except (RendezvousError, UserError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(peer.rank + 1)])
    dist.all_reduce(total)
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "UCX_TLS", "NCCL_NET")
    found = {
        **started.record(),
        "sum": total.item(),
        "lines": started.lines(),
        "env": {name: os.environ[name] for name in names if name in os.environ},
    }
    leave(started.meeting, peer)
    dist.destroy_process_group()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
