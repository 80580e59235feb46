"""What an attempt does otherwise than the one before it: layout, communication, and what else decides the last bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from dthpc.config.identity import RESULT_KEYS, result_values
from dthpc.parallel.layout import Layout
from dthpc.rundir import RunDir, read_json, write_json

if TYPE_CHECKING:
    from dthpc.context import RankContext

_OTHERS = (*RESULT_KEYS, "train.micro_batch", "parallel", "comm")
"""Parts of the configuration whose values are compared one by one; where ranks run and what they record is none."""

_RESOLVED = (
    *(
        f"parallel.{name}"
        for name in ("dp", "tp", "pp", "cp", "ep", "zero", "replicate", "schedule", "chunks", "order")
    ),
    "parallel.sequence_parallel",
    "comm.backend",
    "comm.axes",
    "comm.tune",
)
"""Keys of which only what came of them counts: the layout and the back ends, which are compared by themselves."""

_PATIENCE = ("comm.timeout_s", "comm.silence_s", "comm.rendezvous_timeout_s", "comm.flight_record")
"""Keys that decide when an attempt ends, and nothing that it computes."""


@dataclass(frozen=True)
class Change:
    """What one part of the set-up does otherwise."""

    what: str
    """`layout`, `communication` or `configuration`."""

    since: int
    """The attempt that it is compared with."""

    changes: tuple[str, ...]
    """One `name old → new` each."""

    def text(self) -> str:
        """One line."""
        return f"{self.what} changed since attempt {self.since}: {', '.join(self.changes)}"


def tell_changes(layout: Layout, config: Any, context: RankContext) -> None:
    """Record what this attempt is set up with, and say what differs from the last one that got so far; rank 0 does.

    `comm` and `parallel` are no part of what makes two runs the same, so a run may go on with others: it comes to the
    same result up to rounding, and whoever compares its last bits must know.
    """
    if context.events is None:
        return
    setup = setup_of(layout, config, context.backend, context.axis_backends)
    number = context.identity.attempt
    write_json(context.attempt.setup, setup)
    for change in find_changes(context.run, number, setup):
        print(f"dthpc: {change.text()}", flush=True)
        context.events.write("changed", what=change.what, since=change.since, changes=list(change.changes))


def setup_of(layout: Layout, config: Any, backend: str, axis_backends: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Names and values of each part of a set-up, as they are recorded."""
    # What comes with a degree says nothing where that is 1.
    chunks = f", {layout.chunks} chunks" if layout.chunks > 1 else ""
    hybrid = f" ({layout.replicate}x{layout.shard})" if min(layout.replicate, layout.shard) > 1 else ""
    degrees = {
        "ranks": layout.world_size,
        "pp": f"{layout.pp} ({layout.schedule}{chunks})" if layout.pp > 1 else "1",
        "dp": f"{layout.dp}{hybrid}",
        "zero": layout.zero,
        "cp": layout.cp,
        "tp": f"{layout.tp}{'+sp' if layout.sequence_parallel else ''}",
        "order": ",".join(layout.order),
    }
    plain: Any = OmegaConf.to_container(config)
    leaves = {
        key: value
        for key, value in result_values(plain, _OTHERS).items()
        if not key.startswith((*_RESOLVED, *_PATIENCE))
    }
    ways = {"backend": backend, **{f"backend of {axis}": spec for axis, spec in axis_backends.items()}}
    ways.update({key: value for key, value in leaves.items() if key.startswith("comm.")})
    rest = {key: value for key, value in leaves.items() if not key.startswith("comm.")}
    return {"layout": degrees, "communication": ways, "configuration": rest}


def find_changes(run: RunDir, attempt: int, setup: Mapping[str, Mapping[str, Any]]) -> Iterator[Change]:
    """What differs from the newest earlier attempt that left a record; nothing where there is none.

    Args:
        run: the run's folder.
        attempt: number of this attempt.
        setup: of this attempt.
    """
    earlier = (number for number in reversed(run.attempt_numbers()) if number < attempt)
    kept = ((number, read_json(run.attempt(number).setup)) for number in earlier)
    since, before = next(((number, found) for number, found in kept if isinstance(found, dict)), (0, {}))
    for what in setup if before else ():
        if changes := tuple(_differences(before.get(what) or {}, setup[what])):
            yield Change(what, since, changes)


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys((*new, *old)):
        if old.get(name) != new.get(name):
            yield f"{name} {_word(old.get(name))} → {_word(new.get(name))}"


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "none" if value is None else str(value)
