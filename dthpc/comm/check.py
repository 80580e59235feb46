"""Mistakes in the `comm` group that the login node can see. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dthpc.comm.backend import check_choice
from dthpc.comm.fabric.devices import FABRICS, choose_devices
from dthpc.comm.fabric.model import NodeNetwork
from dthpc.comm.fabric.presets import environment_of
from dthpc.comm.fabric.recognise import from_path
from dthpc.comm.fabric.settings import Problem, check_settings
from dthpc.errors import UserError, nearest


def check(config: Any) -> list[UserError]:
    """Backends, fabric and variables of a configuration."""
    comm, cluster = config.comm, config.cluster
    gpus = bool(cluster.gpus_per_node or cluster.gpus_per_task)
    return [*check_choice(comm, gpus), *_fabric(config), *_environment(comm)]


def _fabric(config: Any) -> Iterator[UserError]:
    fabric = config.comm.fabric
    words = ("auto", *FABRICS)
    if fabric not in words:
        yield UserError("there is no such fabric", key="comm.fabric", value=fabric, instead=nearest(str(fabric), words))
        return
    recorded = config.placement.topology
    if fabric in ("auto", "tcp") or recorded is None:
        return
    node = _recorded(Path(recorded))
    if node is None or not (node.devices and node.complete):
        return  # a text that knows no adapters, or not all of them, does not speak against any
    choice = choose_devices(node)
    if choice.fabric != fabric:
        seen = ", ".join(choice.names()) or "; ".join(f"{name}: {why}" for name, why in choice.rejected.items())
        why = f"{recorded}, the topology of the nodes, shows no usable {fabric} device (it shows {seen})"
        yield UserError(why, key="comm.fabric", value=fabric, instead=f"comm={choice.fabric}, or comm=auto")


def _recorded(path: Path) -> NodeNetwork | None:
    try:
        return from_path(path)[0]
    except (UserError, IndexError):
        return None  # what can't be read is told where the placement is planned


def _environment(comm: Any) -> Iterator[UserError]:
    """Values of `comm.environment` that no machine could make sense of."""
    made = environment_of(comm.environment)
    for name in made:
        if not name.replace("_", "").isalnum() or name[:1].isdigit():
            yield UserError("no name of a variable", key=f"comm.environment.{name}", instead="NCCL_DEBUG: INFO")
    for problem in check_settings(made, NodeNetwork("any")):
        if problem.severity == "error":
            yield _error(problem)


def _error(problem: Problem) -> UserError:
    name, _, value = problem.what.partition("=")
    return UserError(problem.why, key=f"comm.environment.{name}", value=value, instead=problem.fix)
