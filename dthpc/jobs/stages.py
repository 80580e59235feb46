"""Pipeline stages balanced by measured times: measured in a run's first attempt, and kept for all that follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from dthpc.data.batches import micro_batches
from dthpc.data.loader import evaluation_batches
from dthpc.parallel.apply import passes_of
from dthpc.parallel.mesh import Mesh
from dthpc.parallel.model import CheckedLoss, Loss
from dthpc.parallel.pipeline.measure import measure
from dthpc.parallel.pipeline.stages import deal, layers_of
from dthpc.parallel.precision import Precision
from dthpc.rundir import read_json, write_json
from dthpc.train.step import check_result

if TYPE_CHECKING:
    from dthpc.context import RankContext


def dealt_stages(
    model: nn.Module, loss: Loss, data: Any, mesh: Mesh, config: Any, context: RankContext
) -> list[int] | None:
    """How many of the model's layers each pipeline stage gets, where `parallel.stages=measured`; collective.

    Times do not come out the same again, and a run that resumes must: so what was dealt lies in the run's folder, for
    each number of layers and stages.

    Args:
        model: the whole model, perhaps on the meta device.
        loss: of its outputs.
        data: map-style data set of (input, target) pairs; the first rank measures with some of its samples.
        mesh: where this rank stands.
        config: the whole configuration.
        context: this rank.

    Returns:
        Layers of each stage; None where they are not measured.

    Raises:
        UserError: the model does not say where it may be cut; the loss returns something else than it should.
    """
    if mesh.layout.pp == 1 or config.parallel.stages != "measured":
        return None
    path, case = context.run.stages, f"{len(layers_of(model))} layers in {mesh.layout.stages} stages"
    known: list[Any] = [read_json(path) or {} if context.is_first else None]
    dist.broadcast_object_list(known, 0)
    if case in known[0]:
        stored: list[int] = known[0][case]
        return stored
    dealt = deal(model, mesh, "measured", _measurement(model, loss, data, mesh, config, context))
    if context.is_first:
        write_json(path, {**known[0], case: dealt})
    return dealt


def _measurement(
    model: nn.Module, loss: Loss, data: Any, mesh: Mesh, config: Any, context: RankContext
) -> Callable[[], list[float]]:
    """Measures the model's layers with a micro-batch of the data."""

    def run() -> list[float]:
        _, samples = passes_of(config, mesh.layout)
        inputs, targets = next(evaluation_batches(data, samples, samples=samples))
        [(inputs, targets)] = micro_batches(inputs, targets, None, 1, context.device)
        checked = CheckedLoss(loss, loss)
        checked.check = check_result
        autocast = Precision(config.precision.compute, mesh.device_type).autocast
        return measure(model, inputs, targets, checked, context.device, autocast)

    return run
