"""One rank of a meeting, as a process of its own: `python -m tests.comm.meeting FOLDER '{"rank": 1, …}'`.

Prints one JSON object: what it found, or the error.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

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


if __name__ == "__main__":
    main()
