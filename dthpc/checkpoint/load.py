"""From a verified folder into the live state: match → read → fill."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dthpc.checkpoint import fill, rng
from dthpc.checkpoint.manifest import Manifest, TensorRecord
from dthpc.checkpoint.optimizers import as_json
from dthpc.checkpoint.ranks import Ranks
from dthpc.checkpoint.replicas import own_states, sources
from dthpc.checkpoint.shares import Share, whole
from dthpc.checkpoint.snapshot import extra_key, rng_key
from dthpc.checkpoint.state import TrainingState, model_shares, outer_shares

if TYPE_CHECKING:
    from dthpc.checkpoint.dcp import TensorReader

RECORDS_NAME = "records.json"


def load(
    path: Path, manifest: Manifest, state: TrainingState, expect_meta: Mapping[str, Any], ranks: Ranks
) -> tuple[str, ...]:
    """Fill the state from a verified checkpoint; collective.

    Returns:
        What did not come back as it was, one sentence each; the same on all ranks.

    Raises:
        UserError: it is of another model, optimizer or job; nothing was changed.
        CheckpointError: reading failed.
    """
    from dthpc.checkpoint.dcp import TensorReader, read_tensors

    what = f"loading {path}"
    records = ranks.first(what, lambda: json.loads((path / RECORDS_NAME).read_bytes()))
    expected = [part for _, part in ranks.distinct(ranks.together(what, lambda: fill.expectation(state)))]
    names = sources(manifest.tensors, records.get("replicas", 0), state.replica)
    records["stateful"] = own_states(records["stateful"], records.get("replicas", 0), state.replica)

    def match() -> list[fill.OptimizerTarget]:
        tensors = {key: manifest.tensors[saved] for key, saved in names.items()}
        fill.check_meta(str(path), as_json(dict(expect_meta), "expect_meta"), manifest.meta)
        fill.check_match(str(path), expected, tensors, records)
        fill.check_groups(state, records["optimizer"])
        return fill.optimizer_targets(state, tensors)

    def read() -> None:
        shares = [*model_shares(state), *(target.share for target in targets), *outer_shares(state)]
        found = [share.holding(names[share.name], share.tensor) for share in shares if share.name in names]
        read_tensors([*found, *own], reader, ranks)

    targets = ranks.together(what, match)
    reader = ranks.together(what, lambda: TensorReader(path))
    same_layout = _same_layout(manifest, records, state, ranks)
    own, notes = _extra(reader, expected, records, state, ranks, same_layout)
    stream = rng_key(ranks.rank if same_layout else 0)
    streamed = ranks.together(what, lambda: reader.record(stream)) if state.rng else None
    captured = None if streamed is None else rng.empty(streamed.shape)
    if captured is not None:
        own.append(whole(stream, captured))
    ranks.together(what, read)
    for share in outer_shares(state):
        if share.name not in names:
            share.tensor.detach().zero_()
    fill.fill_optimizer(state, targets, records["optimizer"])
    fill.fill_scalars(state, records)
    # Last, so that nothing of the loading draws from the restored streams.
    if captured is not None:
        rng.apply(captured) if same_layout else rng.reseed(captured, ranks.rank)
    return (*notes, *_replica_notes(records.get("replicas", 0), state))


def _same_layout(manifest: Manifest, records: Mapping[str, Any], state: TrainingState, ranks: Ranks) -> bool:
    saved = records.get("layout", "")
    return manifest.world_size == ranks.size and (saved == state.layout or not (saved and state.layout))


def _extra(
    reader: TensorReader,
    expected: list[dict[str, Any]],
    records: Mapping[str, Any],
    state: TrainingState,
    ranks: Ranks,
    same_layout: bool,
) -> tuple[list[Share], list[str]]:
    """What to read into the tensors that belong to single ranks: all of them on all ranks, or none; collective."""
    wanted = {name for part in expected for name in part["extra"]}
    names = ", ".join(sorted(wanted | set(records.get("extra", []))))
    if not names:
        return [], []
    shares = [whole(extra_key(ranks.rank, name), tensor) for name, tensor in state.extra.items()]

    def fits() -> bool:
        found: dict[str, TensorRecord | None] = {share.name: reader.record(share.name) for share in shares}
        return same_layout and all(found[share.name] == share.record for share in shares)

    if wanted and all(ranks.collect(f"loading {names}", fits)):
        return shares, []
    why = "no rank keeps it now" if not wanted else "it was not saved by ranks of this layout"
    return [], [f"{names} of each rank did not come back: {why} ({records.get('layout') or 'unnamed'})"]


def _replica_notes(saved: int, state: TrainingState) -> list[str]:
    live = 0 if state.replica is None else state.replica.count
    if saved == live:
        return []
    if not saved:
        return [f"{live} replicas begin from one model, each with its optimizer state"]
    now = f"{live} replicas go on" if live else "one model goes on"
    return [
        f"{now} from the last meeting of {saved} replicas, with the optimizer state of the first; "
        "what they had learned since then is lost"
    ]
