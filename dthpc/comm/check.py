"""Mistakes in the `comm` group that the login node can see. Free of torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dthpc.comm.backend import check_choice, wanted_of
from dthpc.comm.fabric.devices import FABRICS, choose_devices
from dthpc.comm.fabric.model import NodeNetwork
from dthpc.comm.fabric.presets import environment_of, needed
from dthpc.comm.fabric.settings import DEVICES, SOCKETS, as_address, check_settings
from dthpc.errors import UserError, nearest
from dthpc.placement.problem import Problem


def check(config: Any, env: Mapping[str, str] = os.environ) -> list[UserError]:
    """Backends, fabric, interface and variables of a configuration.

    Args:
        config: the whole configuration, resolved.
        env: what the user exported, which the ranks inherit.
    """
    comm, cluster = config.comm, config.cluster
    gpus = bool(cluster.gpus_per_node or cluster.gpus_per_task)
    errors = [*check_choice(comm, gpus), *_fabric(config), *_interface(comm), *_environment(comm)]
    return errors or _exported(config, gpus, env)


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


def _interface(comm: Any) -> Iterator[UserError]:
    """A name that no machine gives to an interface (linux/if.h: under 16 characters, neither blanks nor `/`)."""
    name = comm.interface
    if name is None:
        return
    if as_address(name):
        why = "it takes the name of an interface, and this is an address"
    elif not name or len(name) > 15 or set(name) & set("/^=,*:") or name != "".join(name.split()):
        why = "this is the name of no interface"
    else:
        return
    instead = "one name, as `ip -br addr` shows it on the nodes, or comm.interface=null: it is decided"
    yield UserError(why, key="comm.interface", value=name, instead=instead)


def _exported(config: Any, gpus: bool, env: Mapping[str, str]) -> list[UserError]:
    """Exported variables that the ranks will refuse: anywhere, or, of a local run, on this machine.

    There, too, an interface or fabric that is asked for and absent; the nodes of a cluster only their ranks know.
    """
    cluster, comm = config.cluster, config.comm
    if cluster.container.runtime is not None or cluster.setup or cluster.sbatch.get("export") is not None:
        return []  # the ranks' environment is another
    libraries = (wanted_of(comm).libraries() & {"nccl", "mpi"}) | {"gloo"} | ({"nccl"} if gpus else set())
    given = needed({**env, **{str(name): str(value) for name, value in cluster.environment.items()}}, libraries)
    node = NodeNetwork("any")
    problems: list[Problem] = []
    pinned = comm.fabric not in ("auto", "tcp") and config.placement.topology is None
    if cluster.kind == "local" and (pinned or _names_hardware(comm, given)):
        from dthpc.comm.fabric.live import read_network  # costs time, which only those pay who name hardware

        node = read_network(env=given)
        if comm.interface is not None and not getattr(node.interfaces.get(comm.interface), "addresses", None):
            usable = [each.name for each in node.interfaces.values() if each.addresses]
            why = f"{node.name} has no such network interface with an address"
            instead = nearest(comm.interface, usable)
            return [UserError(why, key="comm.interface", value=comm.interface, instead=instead)]
        problems = _lacking(comm.fabric, node) if pinned else []
    problems += [problem for problem in check_settings(given, node) if problem.severity == "error"]
    return [_error(problem, "") for problem in problems]


def _names_hardware(comm: Any, given: Mapping[str, str]) -> bool:
    return comm.interface is not None or any(name in (*SOCKETS, *DEVICES) for name in given)


def _lacking(fabric: str, node: NodeNetwork) -> list[Problem]:
    """What the ranks will say of a fabric that this machine has no device for."""
    from dthpc.comm.fabric.decide import FabricWish, decide

    plan = decide({node.name: node}, FabricWish(fabric=fabric))
    return [problem for problem in plan.errors if problem.setting == "comm.fabric"]


def _recorded(path: Path) -> NodeNetwork | None:
    from dthpc.comm.fabric.recognise import from_path  # its readers of texts are many, and few runs name a text

    try:
        return from_path(path)[0]
    except (UserError, IndexError):
        return None  # what can't be read is told where the placement is planned


def _environment(comm: Any) -> Iterator[UserError]:
    """Values of `comm.environment` that no machine could make sense of."""
    made = environment_of(comm.environment)
    for name, value in comm.environment.items():
        if hasattr(value, "__iter__") and not isinstance(value, str):
            shown = ",".join(map(str, value))
            instead = f"'+comm.environment.{name}=\"{shown}\"'"
            yield UserError("a variable is one text", key=f"comm.environment.{name}", value=value, instead=instead)
    for name in made:
        if not name.replace("_", "").isalnum() or name[:1].isdigit():
            yield UserError("no name of a variable", key=f"comm.environment.{name}", instead="NCCL_DEBUG: INFO")
    for problem in check_settings(made, NodeNetwork("any")):
        if problem.severity == "error":
            yield _error(problem, "comm.environment.")


def _error(problem: Problem, group: str) -> UserError:
    name, _, value = problem.what.partition("=")
    return UserError(problem.why, key=f"{group}{name}", value=value, instead=problem.fix)
