"""What ranks do in the tests of a step's arithmetic."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dthpc.data.loader import StepLoader
from dthpc.models.gpt import GPT
from dthpc.models.losses import next_token
from dthpc.parallel.apply import parallelize
from dthpc.parallel.check import degrees_of
from dthpc.parallel.layout import Layout
from dthpc.parallel.mesh import make_mesh
from dthpc.parallel.model import ParallelModel
from dthpc.train.header import Header
from dthpc.train.step import expected_count, forward_backward
from tests.train.tasks import Sequences, make_config

CPU = torch.device("cpu")


def build(changes: dict[str, Any], checked: bool = True) -> ParallelModel:
    """A small decoder in a layout; past the check of the layout, it may have more ranks than samples."""
    config = make_config(**changes)
    size = dist.get_world_size()
    parallel = config.parallel
    layout = (
        Layout.resolve(config, size)
        if checked
        else Layout(**degrees_of(config, size), zero=parallel.zero, schedule=parallel.schedule)
    )
    with torch.device("meta"):
        model = GPT(vocab_size=32, dim=16, layers=2, heads=2, max_seq_len=16)
    return parallelize(model, next_token, make_mesh(layout, "cpu"), config, CPU)


def make_step(model: ParallelModel, global_batch: int, stop: str | None = None) -> str | None:
    """One step on the first samples; returns what the ranks agreed to stop for."""
    rank, layout = dist.get_rank(), model.layout
    header = Header(dist.group.WORLD)
    with StepLoader(
        Sequences().train,
        seed=1,
        global_batch=global_batch,
        dp_rank=layout.dp_rank(rank),
        dp_size=layout.dp,
        start_sample=0,
        total_samples=global_batch,
    ) as loader:
        batch = next(loader)
    counts = layout.counts_data(rank)
    header.send(targets=expected_count(next_token, batch.targets) if counts else 0, stop=stop if rank == 0 else None)
    agreed, _ = forward_backward(model, batch, header, CPU, step=0)
    return agreed.stop


def gradients(model: ParallelModel) -> list[torch.Tensor]:
    """Those of this rank's pieces."""
    return [piece.tensor.grad.clone() for piece in model.shards.pieces if piece.tensor.grad is not None]


def after_a_stop(
    rank: int, changes: dict[str, Any], few: bool = False
) -> tuple[list[torch.Tensor], str | None, list[torch.Tensor]]:
    """Gradients of a step after one that was given up, the signal of that one, and gradients of the same step alone."""
    found = []
    batch = changes.get("train", {}).get("global_batch", 5)
    stopped = None
    for stop in ("SIGTERM", None):
        model = build(changes, checked=not few)
        if stop is not None:
            stopped = make_step(model, batch, stop)
        assert make_step(model, batch) is None
        found.append(gradients(model))
    return found[0], stopped, found[1]


def passes_made(rank: int, zero: int, pp: int) -> int:
    """Forward passes of a step in which this rank has three samples or two, and two samples are a pass."""
    model = build({"parallel": {"zero": zero, "pp": pp}, "train": {"micro_batch": 2}})
    made: list[int] = []
    forward = model.worker.forward

    def counted(stage: int, micro_batch: int, x: Any) -> Any:
        made.append(micro_batch)
        return forward(stage, micro_batch, x)

    model.worker.forward = counted  # type: ignore[method-assign]
    make_step(model, 5)
    return len(made)
