"""The checked mode: before each collective, ranks compare what they call.

Without it, tensors that do not fit end in an error of MPI, in a time-out, or in wrong numbers. It costs one more small
message a collective, and collectives of a group then run one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch

from dthpc.comm.mpi.call import Call
from dthpc.comm.mpi.collectives import Collectives
from dthpc.comm.mpi.errors import MismatchError
from dthpc.comm.mpi.operation import Steps
from dthpc.comm.rendezvous import ranges

_TEXT = 240
_DIGEST = 16


def agreed(call: Call, steps: Steps, collectives: Collectives, members: Sequence[int]) -> Steps:
    """The steps of a collective, taken once all ranks are seen to call the same.

    Args:
        call: what this rank calls.
        steps: what it then does.
        collectives: the group's.
        members: the default group's ranks, in the group's order.

    Raises:
        MismatchError: on all ranks, naming what each called; the group stays usable.
    """
    text = call.common.encode()
    mine = torch.frombuffer(bytearray(_fixed(text)), dtype=torch.uint8)
    everything = torch.empty((len(members), mine.numel()), dtype=torch.uint8)
    yield from collectives.all_gather(everything, mine)
    said = [bytes(row.tolist()) for row in everything]
    if len(set(said)) > 1:
        steps.close()
        raise MismatchError(f"ranks of one group called different operations: {_who(said, members)}")
    result: Any = yield from steps
    return result


def _fixed(text: bytes) -> bytes:
    """A fingerprint of one length: the beginning of the text, and a digest of all of it."""
    return text[:_TEXT].ljust(_TEXT, b"\0") + blake2b(text, digest_size=_DIGEST).digest()


def _who(said: Sequence[bytes], members: Sequence[int]) -> str:
    parts = []
    for what in dict.fromkeys(said):
        ranks = [rank for rank, told in zip(members, said, strict=True) if told == what]
        named = what[:_TEXT].rstrip(b"\0").decode(errors="replace")
        parts.append(f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)} {named}")
    return "; ".join(parts)
