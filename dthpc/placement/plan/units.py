"""Which GPUs, or pieces of them, the ranks of a node may be given."""

from __future__ import annotations

from collections.abc import Sequence

from dthpc.errors import UserError
from dthpc.placement.plan.places import Unit
from dthpc.placement.topology import Gpu, Topology

VENDORS = ("nvidia", "amd", "intel")

_KEY = "CUDA_VISIBLE_DEVICES"


def compute_gpus(topology: Topology) -> list[Gpu]:
    """The GPUs that compute: those that a compute driver showed where it showed any, never display adapters."""
    gpus = list(topology.gpus or ())
    shown = [gpu for gpu in gpus if gpu.compute]
    return shown or [gpu for gpu in gpus if gpu.compute is None and gpu.vendor in (None, *VENDORS)]


def units_of(topology: Topology, wanted: int, visible: Sequence[str] | None = None) -> list[Unit]:
    """What ranks can be given, in the order of the vendor's tools.

    A GPU that is cut into MIG instances can be used only through these; tiles are given out singly only where more
    units are wanted than there are GPUs.

    Args:
        topology: of the node.
        wanted: number of units that are to be given out.
        visible: names as in `CUDA_VISIBLE_DEVICES` (indices, UUIDs or their beginnings); `None`: no restriction.

    Raises:
        UserError: a visible device does not exist.
    """
    gpus = compute_gpus(topology)
    tiles = wanted > len(gpus)
    units: list[Unit] = []
    for gpu in gpus:
        parts = [part for part in gpu.parts or () if part.kind == "mig" or (part.kind == "tile" and tiles)]
        units += [Unit(gpu, part) for part in parts] or [Unit(gpu)]
    units.sort(key=lambda unit: unit.place)
    return units if visible is None else _only(units, visible)


def _only(units: list[Unit], visible: Sequence[str]) -> list[Unit]:
    kept: list[Unit] = []
    numbers = {unit.gpu.key: unit.gpu.index for unit in units}
    if set(numbers.values()) == {None}:
        # Nobody told the drivers' numbers; units stand in the order of the bus, as the drivers number them.
        numbers = {key: number for number, key in enumerate(numbers)}
    for word in (word.strip() for word in visible):
        # The drivers themselves stop at the first entry like this.
        if word in ("", "-1", "none", "NoDevFiles", "void"):
            break
        found = [unit for unit in units if _is_called(unit, word, numbers[unit.gpu.key])]
        if not found:
            raise UserError(
                f"{word!r} is none of the {len(units)} GPUs read ({', '.join(unit.name for unit in units) or 'none'})",
                key=_KEY,
                value=",".join(visible),
                instead="unset it, or name GPUs that nvidia-smi lists",
            )
        kept += [unit for unit in found if unit not in kept]
    return kept


def _is_called(unit: Unit, word: str, number: int | None) -> bool:
    gpu, part = unit.gpu, unit.part
    if word.isdigit():
        return number == int(word)
    if "." in word and word.replace(".", "").isdigit():
        return part is not None and part.kind == "tile" and word == f"{number}.{part.index}"
    return any(uuid is not None and uuid.startswith(word) for uuid in (gpu.uuid, part.uuid if part else None))


def share_out(ranks: int, asked: int | None, units: Sequence[Unit]) -> tuple[int, str | None]:
    """How many units are used, and what that leaves or costs.

    Raises:
        UserError: more are asked than there are, or the ranks can't have equal shares.
    """
    if asked is None:
        count = min(ranks, len(units))
        return count, _remark(ranks, count, len(units))
    if asked > len(units):
        raise UserError(
            f"{_gpus(len(units))} {'is' if len(units) == 1 else 'are'} visible here",
            key="cluster.gpus_per_node",
            value=asked,
            instead=f"cluster.gpus_per_node={len(units)}, or more GPUs in the allocation",
        )
    if asked and ranks % asked and asked % ranks:
        fitting = [n for n in range(1, asked + 1) if asked % n == 0]
        raise UserError(
            f"{ranks} ranks can't have equal shares of {asked} GPUs",
            key="cluster.tasks_per_node",
            value=ranks,
            instead=f"a number of ranks among {', '.join(map(str, fitting))}, or cluster.gpus_per_node={ranks}",
        )
    return asked, _remark(ranks, asked, len(units))


def _remark(ranks: int, used: int, there: int) -> str | None:
    if used and used < ranks:
        most = -(-ranks // used)
        return f"{ranks} ranks share {_gpus(used)}: up to {most} on one, each with 1/{most} of its time and memory"
    if used < there:
        return f"{there - used} of {_gpus(there)} {'is' if there - used == 1 else 'are'} not used"
    return None


def _gpus(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"
