"""Replicas that train by themselves: whose tensors are whose, and what they begin from on another number of them.

The same number of replicas goes on exactly, each with its own parameters, buffers and optimizer state. Otherwise,
within tolerance: parameters are those of the last meeting (`outer.anchor`), so the steps since then are lost; buffers
and optimizer state are those of replica 0; `outer.momentum` and whatever else the replicas share is as it was.
Replicas become one synchronous model by the same rules; one model becomes replicas exactly, its parameters being the
anchor, and the rest of `outer` zeros.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dthpc.checkpoint.optimizers import optimizer_shares
from dthpc.checkpoint.shares import Share
from dthpc.checkpoint.state import Replica, TrainingState, model_shares, outer_shares, own_key

_ANCHOR = "outer.anchor."


def state_shares(state: TrainingState) -> list[Share]:
    """This rank's shares of all tensors of the state, under the keys that a checkpoint uses."""
    own = [*model_shares(state), *optimizer_shares(state)]
    if state.replica is not None:
        own = [share.holding(own_key(share.name, state.replica), share.tensor) for share in own]
    return own + outer_shares(state)


def sources(saved: Collection[str], count: int, replica: Replica | None) -> dict[str, str]:
    """Where a rank finds its tensors in a checkpoint.

    Args:
        saved: the keys of the checkpoint.
        count: replicas that wrote it; 0 where there was one model.
        replica: the replica of this rank, if there are any now.

    Returns:
        For each key without `replica.<k>`, as the state has it, the key in the checkpoint.
    """
    if count == 0:
        found = {key: key for key in saved}
        if replica is not None:
            found.update({_ANCHOR + key.removeprefix("model."): key for key in saved if key.startswith("model.")})
        return found
    same = replica is not None and replica.count == count
    prefix = f"replica.{replica.index if replica is not None and same else 0}."
    found = {key.removeprefix(prefix): key for key in saved if key.startswith(prefix)}
    shared = [key for key in saved if key.startswith("outer.")]
    if not same:
        found.update({"model." + key.removeprefix(_ANCHOR): key for key in shared if key.startswith(_ANCHOR)})
    if replica is not None:
        found.update({key: key for key in shared})
    return found


def own_states(saved: Mapping[str, Any], count: int, replica: Replica | None) -> dict[str, Any]:
    """The saved states of objects that are for a rank: those of all replicas, and of its own where they differ."""
    shared = {name: value for name, value in saved.items() if not name.startswith("replica.")}
    found = sources([name for name in saved if name not in shared], count, replica) if count else {}
    return {**shared, **{name: saved[key] for name, key in found.items()}}
