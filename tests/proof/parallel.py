"""The same training by the real job, in any layout; the parameters come from the checkpoint that it leaves."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, load

from dthpc.checkpoint.manifest import list_checkpoints
from dthpc.config.schema import Config
from dthpc.jobs.train import run
from dthpc.train.callbacks import Callback, EvalRecord, StepRecord
from dthpc.train.loop import Training
from tests.proof.reference import STEPS, Trained, merged
from tests.ranks import RankPool
from tests.train.tasks import make_context


class Recorder(Callback):
    """Keeps what the matrix compares."""

    def __init__(self) -> None:
        self.trained = Trained()

    def on_train_start(self, training: Training) -> None:
        training.context.recorder = self  # type: ignore[attr-defined]

    def on_step(self, training: Training, record: StepRecord) -> None:
        self.trained.losses.append(record.loss)
        self.trained.norms.append(record.grad_norm)

    def on_eval(self, training: Training, record: EvalRecord) -> None:
        self.trained.held_out = record.loss


def train_on_rank(rank: int, folder: str, overrides: Mapping[str, Any]) -> Trained:
    """One rank's part of a whole training job; returns what it recorded."""
    values = merged({**overrides, "callbacks.recorder": {"_target_": "tests.proof.parallel.Recorder"}})
    values.setdefault("parallel", {}).setdefault("offload", {})["folder"] = folder
    values["loss"] = {"_target_": "dthpc.models.losses.next_token"}
    values["monitor"] = {"tensorboard": False}
    config = OmegaConf.merge(OmegaConf.structured(Config), values)
    context = make_context(rank, Path(folder))
    try:
        run(config, context)
    finally:
        if context.events is not None:
            context.events.close()
    trained: Trained = context.recorder.trained  # type: ignore[attr-defined]
    return trained


def train_in_layout(ranks: RankPool, size: int, overrides: Mapping[str, Any]) -> Trained:
    """Train on that many ranks.

    Raises:
        AssertionError: the ranks do not tell the same losses and norms.
    """
    with tempfile.TemporaryDirectory(prefix="dthpc-proof-", dir=_memory()) as folder:
        first, *others = ranks.run(size, train_on_rank, folder, dict(overrides))
        for number, other in enumerate(others, start=1):
            assert (other.losses, other.norms) == (first.losses, first.norms), f"rank {number} tells other numbers"
        [checkpoint] = [each for each in list_checkpoints(Path(folder) / "checkpoints") if each.step == STEPS]
        first.parameters = read_parameters(checkpoint.path)
    return first


def read_parameters(folder: Path) -> dict[str, Tensor]:
    """The whole parameters of a checkpoint, by global name, put together by torch's own reader."""
    known = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in known.items()
        if key.startswith("model.")
    }
    load(tensors, storage_reader=FileSystemReader(folder), no_dist=True)
    return {key.removeprefix("model."): tensor for key, tensor in tensors.items()}


def _memory() -> str | None:
    """A folder in memory, where there is one: nothing here needs a disk."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
