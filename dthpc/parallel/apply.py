"""From a plain model to one that trains on a mesh: the order of operations, on one screen."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import torch
from torch import nn

from dthpc.models.dropout import DropoutStream, attach
from dthpc.parallel.activations import checkpoint_activations
from dthpc.parallel.alike import check_alike, check_trainable
from dthpc.parallel.check import micro_batches_of
from dthpc.parallel.layout import Layout
from dthpc.parallel.materialize import broadcast_values, fill, is_meta
from dthpc.parallel.mesh import Mesh
from dthpc.parallel.model import CheckedLoss, Loss, ParallelModel
from dthpc.parallel.offload import make_offload
from dthpc.parallel.outer import OuterStep
from dthpc.parallel.pipeline.links import Links
from dthpc.parallel.pipeline.schedule import Kind, Schedule, build
from dthpc.parallel.pipeline.stages import cut, deal
from dthpc.parallel.pipeline.stash import StashingWorker, check_stash
from dthpc.parallel.pipeline.weights import WeightStore, defer_weights
from dthpc.parallel.pipeline.worker import ModuleWorker
from dthpc.parallel.precision import Precision
from dthpc.parallel.scaler import make_scaler
from dthpc.parallel.sharding.shards import ShardOptions, Shards
from dthpc.parallel.tensor.apply import split_tensors
from dthpc.parallel.tensor.loss import split_loss


def parallelize(
    model: nn.Module, loss: Loss, mesh: Mesh, config: Any, device: torch.device, dealt: Sequence[int] | None = None
) -> ParallelModel:
    """Apply a layout to a model; collective.

    Args:
        model: the whole model, equal on all ranks: on the meta device if it fills itself by name, else with its values.
        loss: sum of losses and number of targets.
        mesh: of the layout.
        config: the whole configuration.
        device: where this rank computes.
        dealt: how many of the model's layers each pipeline stage gets; None: as `parallel.stages` says.

    Returns:
        This rank's part of the model, with the values that the whole model would have in one process.

    Raises:
        UserError: the model has nothing to train, has weights that are not fp32, differs between ranks, or does not say
            how it can be cut or split as the layout asks.
    """
    parallel = config.parallel
    check_trainable(model)
    check_alike(model, mesh.world())
    if not is_meta(model):
        broadcast_values(model.to(device), mesh.world())
    elements = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    dealt = deal(model, mesh, parallel.stages) if dealt is None else dealt
    chunks, parts = cut(model, mesh, dealt)  # pipeline: layers to stages
    split_tensors(chunks, parts, mesh, mesh.layout.sequence_parallel)  # tensor, sequence: matrices to ranks
    fill(chunks, parts, config.run.seed, device)  # first values of what this rank holds
    dropout = DropoutStream(config.run.seed)
    for chunk in chunks:
        attach(chunk, dropout)
    checkpoint_activations(chunks, parallel.activations)  # what is computed again
    precision = Precision(config.precision.compute, mesh.device_type, config.precision.parameters)
    precision.check_device(device)
    inner = mesh.island() if parallel.outer.every else mesh
    offload = make_offload(parallel.offload, device)
    shards = Shards(chunks, parts, inner, _shard_options(config, precision), offload)  # data parallel, ZeRO
    passes, micro_batch = passes_of(config, mesh.layout)
    schedule = build(mesh.layout.schedule, mesh.layout.pp, mesh.layout.chunks, passes)
    checked = CheckedLoss(loss, split_loss(loss, chunks, mesh))
    if schedule.stale:
        check_stash(parts.values())
    worker = _worker(chunks, checked, schedule, mesh, shards, precision, dropout)
    return ParallelModel(
        chunks=chunks,
        parts=parts,
        mesh=mesh,
        shards=shards,
        loss=loss,
        checked=checked,
        schedule=schedule,
        worker=worker,
        links=Links(schedule, mesh.group("pp"), device),
        precision=precision,
        scaler=make_scaler(config.precision),
        dropout=dropout,
        elements=elements,
        micro_batch=micro_batch,
        passes_of_largest=passes,
        offload=offload,
        outer=_outer(shards, mesh, parallel.outer),
    )


def passes_of(config: Any, layout: Layout) -> tuple[int, int]:
    """Passes of the rank with the largest share of a global batch, and the samples of a pass, at most."""
    passes = micro_batches_of(config, layout.dp, layout.pp)
    return passes, ceil(ceil(config.train.global_batch / layout.dp) / passes)


def _shard_options(config: Any, precision: Precision) -> ShardOptions:
    gradients = config.parallel.gradients
    return ShardOptions(
        zero=config.parallel.zero,
        bucket_bytes=config.parallel.bucket_mb << 20,
        storage=precision.storage,
        gradient_dtype=torch.bfloat16 if gradients.dtype == "bf16" else None,
        powersgd_rank=gradients.powersgd_rank,
        allow_unused=config.parallel.allow_unused,
        stages_alone=config.parallel.schedule == "pipedream" and config.parallel.pp > 1,
    )


def _outer(shards: Shards, mesh: Mesh, options: Any) -> OuterStep | None:
    if not options.every:
        return None
    return OuterStep(shards.pieces, mesh, options.every, options.lr, options.momentum, options.delay)


def _worker(
    chunks: list[nn.Module],
    loss: Loss,
    schedule: Schedule,
    mesh: Mesh,
    shards: Shards,
    precision: Precision,
    dropout: DropoutStream,
) -> ModuleWorker:
    """What runs the chunks."""
    rank = mesh.index("pp")
    store = WeightStore() if any(action.kind is Kind.W for action in schedule.actions[rank]) else None
    if store is not None:
        defer_weights(chunks, store)
    kind = StashingWorker if schedule.stale else ModuleWorker
    return kind(
        dict(zip(schedule.stages_of(rank), chunks, strict=True)),
        schedule.stages,
        loss,
        gradients=shards,
        autocast=precision.autocast,
        stream=dropout,
        store=store,
        # With parameters sharded, others wait in the collectives of a pass.
        run_empty=mesh.layout.zero == 3,
    )
