"""Cutting a model into pipeline stages: which layers this rank holds, under their global names.

A model says where it may be cut by `pipeline_layers()`, a list of objects with `names`, the global names of the modules
(or parameters) of one layer, and `cost`; see `dthpc.models.pipeline`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn

from dthpc.errors import UserError, nearest
from dthpc.parallel.layout import Layout
from dthpc.parallel.mesh import Mesh
from dthpc.parallel.parts import Part, Parts, whole_parts
from dthpc.parallel.pipeline import balance
from dthpc.parallel.pipeline.schedule import Placement

HOW = ("auto", "measured", "uniform")

DECLARE = (
    "parallel.pp=1, or give the model a method that lists its layers in order, such as `def pipeline_layers(self): "
    "return [PipelineLayer(('embed', 'blocks.0'), cost), PipelineLayer(('blocks.1', 'head'), cost)]` "
    "(dthpc.models.pipeline), and let its forward skip children that are None or absent"
)


class Layer(Protocol):
    """What always stays on one stage."""

    @property
    def names(self) -> tuple[str, ...]:
        """Global names of its modules or parameters."""

    @property
    def cost(self) -> float:
        """Work of its forward pass, in any unit."""


def placement_of(layout: Layout) -> Placement:
    """Which pipeline rank holds which stage."""
    return Placement(layout.pp, layout.chunks, v_shaped=layout.schedule == "zbv")


def deal(model: nn.Module, mesh: Mesh, how: Any, measure: Callable[[], Sequence[float]] | None = None) -> list[int]:
    """How many of the model's layers each stage gets.

    Args:
        model: the whole model, perhaps on the meta device.
        mesh: where this rank stands. With `measured` this is collective over all ranks.
        how: `parallel.stages`: `auto`, `measured`, `uniform`, or a number of layers for each stage. A run that
            resumes passes what this returned the first time: times do not come out the same again.
        measure: for `measured`, gives the time of each layer; called on the first rank alone.

    Raises:
        UserError: the model declares no layers, or wrong ones, or they cannot be dealt so.
    """
    layout = mesh.layout
    if layout.pp == 1:
        return []
    layers = layers_of(model)
    if not isinstance(how, str):
        return balance.by_hand(list(how), len(layers), layout.stages)
    if how == "uniform":
        return balance.uniform(len(layers), layout.stages)
    if how == "auto":
        return balance.deal([layer.cost for layer in layers], layout.stages)
    if how == "measured":
        if measure is None:
            raise UserError(
                "there is nothing to measure layers with here",
                key="parallel.stages",
                value=how,
                instead="pass what an earlier measurement dealt, or parallel.stages=auto",
            )
        return balance.deal(_agree(mesh, measure), layout.stages)
    raise UserError("unknown way to deal layers to stages", key="parallel.stages", value=how, instead=nearest(how, HOW))


def cut(model: nn.Module, mesh: Mesh, dealt: Sequence[int]) -> tuple[list[nn.Module], Parts]:
    """This rank's chunks of a model, and what its parameters are in the whole.

    A chunk is the model without the modules of other stages: children that are None, or absent from their container.
    Parameters are not copied, so a weight that two chunks of a rank use is one.

    Args:
        model: the whole model, perhaps on the meta device.
        mesh: where this rank stands.
        dealt: what `deal` gave.

    Raises:
        UserError: a weight is tied between more than two pipeline ranks.
    """
    layout = mesh.layout
    if layout.pp == 1:
        return [model], whole_parts([model])
    layers, placement, rank = layers_of(model), placement_of(layout), mesh.index("pp")
    stage_of = [stage for stage, count in enumerate(dealt) for _ in range(count)]
    rank_of = [placement.rank_of(stage) for stage in stage_of]
    chunks = [
        keep(model, layers, [number for number, at in enumerate(stage_of) if at == stage])
        for stage in placement.stages_of(rank)
    ]
    holders = _holders(model, layers, rank_of)
    parts = {parameter: holders[parameter](rank) for chunk in chunks for parameter in chunk.parameters()}
    return chunks, parts


def layers_of(model: nn.Module) -> list[Layer]:
    """The layers that a model declares.

    Raises:
        UserError: it declares none, or they do not hold each of its parameters exactly once.
    """
    declare = getattr(model, "pipeline_layers", None)
    if declare is None:
        raise _refused("the model does not say where it may be cut into pipeline stages", model, DECLARE)
    layers: list[Layer] = list(declare())
    owner: dict[str, int] = {}
    for number, layer in enumerate(layers):
        if not hasattr(layer, "names") or not hasattr(layer, "cost"):
            raise _refused(
                f"pipeline layer {number} is a {type(layer).__name__} without names and cost", model, DECLARE
            )
        for name in layer.names:
            if not _exists(model, name):
                raise _refused(f"pipeline layer {number} names {name}, which the model does not have", model)
            if name in owner:
                raise _refused(f"{name} is in two pipeline layers", model)
            owner[name] = number
    for name, _ in model.named_parameters(remove_duplicate=False):
        owners = _owners(name, owner)
        if len(owners) != 1:
            why = f"in pipeline layers {' and '.join(map(str, owners))}" if owners else "in no pipeline layer"
            raise _refused(f"parameter {name} is {why}", model)
    return layers


def keep(model: nn.Module, layers: Sequence[Layer], kept: Sequence[int]) -> nn.Module:
    """A copy of a model's structure with its own parameters and buffers, and of its layers only some.

    Raises:
        UserError: the model holds something that cannot be copied.
    """
    tensors = [*model.parameters(), *model.buffers()]
    try:
        chunk: nn.Module = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    except (TypeError, RuntimeError) as error:
        why = f"the model cannot be copied, as each stage keeps its own part of it: {error}"
        raise _refused(why, model, "parallel.pp=1, or give it no attributes such as locks, files or graphs") from error
    for number, layer in enumerate(layers):
        if number not in kept:
            for name in layer.names:
                _remove(chunk, name)
    return chunk


def _holders(
    model: nn.Module, layers: Sequence[Layer], rank_of: Sequence[int]
) -> dict[nn.Parameter, Callable[[int], Part]]:
    """For each parameter, what it is on a pipeline rank that holds it."""
    owner = {name: number for number, layer in enumerate(layers) for name in layer.names}
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return {p: _part_on(p, mine, [rank_of[_owners(name, owner)[0]] for name in mine]) for p, mine in names.items()}


def _part_on(parameter: nn.Parameter, names: list[str], ranks: list[int]) -> Callable[[int], Part]:
    whole = Part(names[0], tuple(parameter.shape))
    distinct = sorted(set(ranks))
    if len(distinct) > 2:
        raise UserError(
            f"{' and '.join(names)} are one weight, on pipeline ranks {', '.join(map(str, distinct))}; it can be tied "
            "between two",
            key="parallel.pp",
            instead="untie some of them, or cut the model so that two ranks hold them (parallel.stages)",
        )
    if len(distinct) == 1:
        return lambda rank: whole
    first = ranks[0]
    return lambda rank: whole.but(counts=rank == first, tied_stage_rank=sum(distinct) - rank)


def _owners(parameter: str, owner: dict[str, int]) -> list[int]:
    """Numbers of the layers that hold a parameter of that name; `owner` tells which layer names what."""
    steps = parameter.split(".")
    prefixes = (".".join(steps[:count]) for count in range(1, len(steps) + 1))
    return [owner[prefix] for prefix in prefixes if prefix in owner]


def _exists(model: nn.Module, name: str) -> bool:
    parent, last = _parent(model, name)
    return parent is not None and (last in parent._modules or last in parent._parameters or hasattr(parent, last))


def _parent(model: nn.Module, name: str) -> tuple[nn.Module | None, str]:
    *path, last = name.split(".")
    here: Any = model
    for step in path:
        here = here._modules.get(step) if here is not None else None
    return here, last


def _remove(chunk: nn.Module, name: str) -> None:
    parent, last = _parent(chunk, name)
    if parent is None:
        return
    if isinstance(parent, (nn.ModuleDict, nn.ModuleList, nn.Sequential)):
        # What stays keeps its key, and so its global name.
        del parent._modules[last]
    else:
        setattr(parent, last, None)


def _agree(mesh: Mesh, measure: Callable[[], Sequence[float]]) -> list[float]:
    """The first rank's measurement, on all ranks."""
    world = mesh.world()
    told: list[Any] = [list(measure()) if mesh.rank == 0 else None]
    if world is not None:
        dist.broadcast_object_list(told, dist.get_global_rank(world, 0), group=world)
    costs: list[float] = told[0]
    return costs


def _refused(why: str, model: nn.Module, instead: str | None = None) -> UserError:
    return UserError(why, key="model._target_", value=type(model).__name__, instead=instead or "mend pipeline_layers()")
