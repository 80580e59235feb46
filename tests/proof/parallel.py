"""The same training by the real job, in any layout; the parameters come from the checkpoint that it leaves."""

from __future__ import annotations

import functools
import pickle
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, load

from dthpc.checkpoint.manifest import list_checkpoints
from dthpc.config.schema import Config
from dthpc.jobs.train import run
from dthpc.resilience.stop import Stopped
from dthpc.train.callbacks import Callback, EvalRecord, StepRecord
from dthpc.train.loop import Training
from tests.proof.mistakes import MISTAKES
from tests.proof.reference import BASE, STEPS, Trained
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


def train_on_rank(
    rank: int, folder: str, overrides: Mapping[str, Any], mistake: str | None = None, stop_after: int | None = None
) -> Trained:
    """One rank's part of a whole training job; returns what it recorded.

    Args:
        rank: this one.
        folder: of the run; a second job in it goes on where the first one ended.
        overrides: values of the configuration under their keys.
        mistake: that the ranks make.
        stop_after: updates after which the run is stopped, as by a preemption.
    """
    values = {**overrides, "callbacks.recorder": {"_target_": "tests.proof.parallel.Recorder"}}
    if stop_after is not None:
        # The last step's loss is told during the next one, at whose end the wish to stop is agreed on.
        target = {"_target_": "tests.train.tasks.StopAfter", "step": stop_after - 1, "rank": 0}
        values["callbacks.stop"] = target
    values["parallel.offload.folder"] = folder
    if dist.get_backend() != "gloo":
        # What is to be held against one process is this backend.
        values["comm.shared_memory"] = False
    config = _configuration(values)
    context = make_context(rank, Path(folder))
    try:
        with MISTAKES[mistake].made() if mistake is not None else nullcontext():
            run(config, context)
    except Stopped:
        pass
    finally:
        if context.events is not None:
            context.events.close()
    trained: Trained = context.recorder.trained  # type: ignore[attr-defined]
    return trained


def _configuration(overrides: Mapping[str, Any]) -> Any:
    """The configuration as a rank reads it: a plain tree of values, with some under dotted keys changed."""
    config = pickle.loads(_pickled())
    for key, value in overrides.items():
        OmegaConf.update(config, key, value, merge=False)
    return config


@functools.cache
def _pickled() -> bytes:
    """The configuration that all layouts share; building it anew, or merging it, takes OmegaConf many times as long as
    reading it from this."""
    defaults: Any = OmegaConf.to_container(OmegaConf.structured(Config))
    known = {str(key): value for key, value in defaults.items() if value != "???"}
    return pickle.dumps(OmegaConf.create(_over(known, BASE)))


def _over(defaults: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Values over defaults, group by group."""
    both = dict(defaults)
    for key, value in values.items():
        known = defaults.get(key)
        both[key] = _over(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return both


def train_in_layout(ranks: RankPool, size: int, overrides: Mapping[str, Any], mistake: str | None = None) -> Trained:
    """Train on that many ranks; what the first one recorded, with the parameters of the last checkpoint."""
    with run_folder() as folder:
        first, *others = ranks.run(size, train_on_rank, folder, dict(overrides), mistake)
        first.parameters = read_parameters(folder)
    first.others = others
    return first


def run_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for a run; in memory where there is one, since nothing here needs a disk."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="dthpc-proof-", dir=memory if memory.is_dir() else None)


def read_parameters(folder: str, step: int = STEPS) -> dict[str, Tensor]:
    """The whole parameters of a run's checkpoint, by global name, put together by torch's own reader."""
    return {key.removeprefix("model."): tensor for key, tensor in read_tensors(folder, step, "model.").items()}


def read_tensors(folder: str, step: int = STEPS, prefix: str = "") -> dict[str, Tensor]:
    """All tensors of a run's checkpoint, or those whose names begin so."""
    [checkpoint] = [each for each in list_checkpoints(Path(folder) / "checkpoints") if each.step == step]
    known = FileSystemReader(checkpoint.path).read_metadata().state_dict_metadata
    wanted = {key: entry for key, entry in known.items() if key.startswith(prefix)}
    tensors = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in wanted.items()}
    load(tensors, storage_reader=FileSystemReader(checkpoint.path), no_dist=True)
    return tensors
