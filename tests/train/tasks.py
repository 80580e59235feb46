"""What ranks do in the tests of the training core: whole trainings of a tiny model, by the real job."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from dthpc.config.comm import CommConfig
from dthpc.config.parallel import ParallelConfig, PrecisionConfig
from dthpc.config.schema import OptimConfig, ResilienceConfig
from dthpc.context import RankContext
from dthpc.jobs.train import run
from dthpc.monitor.events import EventLog
from dthpc.parallel.layout import Layout
from dthpc.parallel.parts import Part
from dthpc.placement.identity import RankIdentity
from dthpc.resilience.stop import Stopped
from dthpc.rundir import RunDir
from dthpc.train.callbacks import Callback, MemoryRecord, StepRecord
from dthpc.train.loop import Training

CONFIG: dict[str, Any] = {
    "run": {"seed": 7, "on_change": "refuse"},
    "train": {
        "steps": 6,
        "seq_len": 16,
        "global_batch": 5,
        "micro_batch": None,
        "eval_every": 0,
        "eval_samples": None,
        "grad_clip": 1.0,
    },
    "model": {"_target_": "dthpc.models.gpt.GPT", "dim": 16, "layers": 2, "heads": 2},
    "loss": {"_target_": "dthpc.models.losses.next_token"},
    "data": {"_target_": "tests.train.tasks.Sequences", "length": 16},
    "optim": {
        "_target_": "torch.optim.AdamW",
        "lr": 1e-2,
        "weight_decay": 0.1,
        # Adam divides by the gradient's size: with a tiny epsilon it blows up the rounding of near-zero gradients.
        "arguments": {"betas": [0.9, 0.95], "eps": 1e-5},
        "schedule": {"name": "cosine", "warmup_steps": 2, "min_ratio": 0.1, "decay_fraction": 0.2},
    },
    "parallel": {"bucket_mb": 1},
    "precision": {},
    "checkpoint": {"every": 0, "keep": 3, "keep_every": 0, "resume": "auto"},
    "monitor": {"log_every": 1, "tensorboard": False},
    "callbacks": {},
    "cluster": {"nodes": 1, "tasks_per_node": 1},
}


class Sequences:
    """Counting sequences modulo 32, with ragged ends: a different number of targets counts in each sample."""

    vocab_size = 32

    def __init__(self, length: int = 16, train: int = 40, valid: int = 7, fingerprint: str = "counting") -> None:
        self.train = _Part(length, 0, train)
        self.valid = _Part(length, 1000, valid)
        self.fingerprint = fingerprint

    def bytes_per_target(self, split: str) -> float:
        return 2.0


class _Part:
    def __init__(self, length: int, offset: int, count: int) -> None:
        self.length, self.offset, self.count = length, offset, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        start, pace = index + self.offset, 1 + index % 3
        tokens = (start + pace * torch.arange(self.length + 1)) % 32
        targets = tokens[1:].clone()
        targets[self.length - index % 7 :] = -100
        return tokens[:-1], targets


@dataclass
class Result:
    """What a rank saw of a training."""

    outcome: str
    step: int

    parameters: dict[str, torch.Tensor]
    """What this rank holds of parameters and buffers, by global name; with ZeRO 3 only buffers."""

    records: list[StepRecord]
    evals: list[Any]
    calls: list[str]

    pieces: list[tuple[Part, int, torch.Tensor]] = field(default_factory=list)
    """What this rank's optimizer updates: of which part, from which element on, and the values."""

    memory: MemoryRecord | None = None


class Spy(Callback):
    """Keeps all that it is told; may ask for a stop, or break the weights, at a step."""

    def __init__(self) -> None:
        self.training: Training | None = None
        self.records: list[StepRecord] = []
        self.evals: list[Any] = []
        self.calls: list[str] = []
        self.memory: MemoryRecord | None = None

    def on_memory(self, training: Training, record: MemoryRecord) -> None:
        assert self.memory is None
        self.memory = record

    def on_train_start(self, training: Training) -> None:
        self.training = training
        training.context.spy = self
        self.calls.append("start")

    def on_step(self, training: Training, record: StepRecord) -> None:
        self.records.append(record)
        self.calls.append(f"step {record.step}")

    def on_eval(self, training: Training, record: Any) -> None:
        self.evals.append(record)
        self.calls.append(f"eval {record.step}")

    def on_checkpoint(self, training: Training, record: Any) -> None:
        self.calls.append(f"checkpoint {record.step}")

    def on_stop(self, training: Training, signal: str) -> None:
        self.calls.append(f"stop {signal}")

    def on_incident(self, training: Training, what: str, why: str) -> None:
        self.calls.append(what)

    def on_train_end(self, training: Training) -> None:
        self.calls.append("end")


class StopAfter(Callback):
    """Asks one rank to stop once a step is known to be done."""

    def __init__(self, step: int, rank: int) -> None:
        self.step, self.rank = step, rank

    def on_step(self, training: Training, record: StepRecord) -> None:
        if record.step == self.step and training.context.identity.rank == self.rank:
            training.context.stop.request("SIGUSR2")


class BreakAfter(Callback):
    """Makes one rank's weights not a number once a step is known to be done; 0: before the first."""

    def __init__(self, step: int, rank: int) -> None:
        self.step, self.rank = step, rank

    def on_train_start(self, training: Training) -> None:
        self._break(training, 0)

    def on_step(self, training: Training, record: StepRecord) -> None:
        self._break(training, record.step)

    def _break(self, training: Training, step: int) -> None:
        if step == self.step and training.context.identity.rank == self.rank:
            with torch.no_grad():
                training.model.shards.pieces[0].tensor.fill_(float("nan"))


def make_config(**changes: Any) -> Any:
    """The tiny configuration with `group={key: value}` changes."""
    values = copy.deepcopy(CONFIG)
    for group, entries in changes.items():
        if (group == "model" and "_target_" in entries) or group == "callbacks":
            values[group] = entries
        else:
            values.setdefault(group, {}).update(entries)
    schemas = {"parallel": ParallelConfig, "precision": PrecisionConfig, "optim": OptimConfig}
    for group, schema in {**schemas, "comm": CommConfig, "resilience": ResilienceConfig}.items():
        values[group] = OmegaConf.to_container(OmegaConf.merge(OmegaConf.structured(schema), values.get(group, {})))
    return OmegaConf.create(values)


@dataclass
class SpiedContext(RankContext):
    """A context on which the spy leaves itself, so that a test finds it."""

    spy: Spy | None = None


def make_context(rank: int, folder: Path, attempt: int = 0) -> SpiedContext:
    """A rank's context as the launcher makes it."""
    size = dist.get_world_size()
    identity = RankIdentity(rank, size, rank, size, 0, 1, "here", attempt)
    run_dir = RunDir(folder)
    events = EventLog(run_dir.events, attempt=attempt) if rank == 0 else None
    return SpiedContext(identity, run_dir, torch.device("cpu"), "gloo", events=events)


def train_tiny(rank: int, folder: str, attempt: int = 0, **changes: Any) -> Result:
    """One whole attempt of the training job on this rank."""
    return train_config(rank, folder, attempt, make_config(**changes))


def train_config(rank: int, folder: str, attempt: int, config: Any) -> Result:
    """One whole attempt of the training job with a configuration, watched by a spy."""
    config.callbacks.spy = {"_target_": "tests.train.tasks.Spy"}
    context = make_context(rank, Path(folder), attempt)
    outcome = "finished"
    try:
        run(config, context)
    except Stopped:
        outcome = "preempted"
    finally:
        if context.events is not None:
            context.events.close()
    spy = context.spy
    assert spy is not None
    assert spy.training is not None
    model = spy.training.model
    values = {name: value for chunk in model.chunks for name, value in chunk.state_dict().items()}
    if model.layout.zero == 3:
        values = {name: value for chunk in model.chunks for name, value in chunk.named_buffers()}
    parameters = {name: value.detach().clone() for name, value in values.items()}
    pieces = [(piece.part, piece.start, piece.tensor.detach().clone()) for piece in model.shards.pieces]
    return Result(outcome, spy.training.state.step, parameters, spy.records, spy.evals, spy.calls, pieces, spy.memory)


def assembled(ranks: Sequence[Result]) -> dict[str, torch.Tensor]:
    """The whole parameters, put together from the pieces of all ranks; equal ones must be equal bit by bit."""
    parts: dict[tuple[str, tuple[int, ...]], tuple[Part, torch.Tensor]] = {}
    for result in ranks:
        for part, start, values in result.pieces:
            _, flat = parts.setdefault(
                (part.name, part.offsets), (part, torch.full((math.prod(part.local_shape),), torch.nan))
            )
            place = flat[start : start + values.numel()]
            assert place.isnan().all() or torch.equal(place, values.flatten()), part.name
            place.copy_(values.flatten())
    whole: dict[str, torch.Tensor] = {}
    for part, flat in parts.values():
        parameter = whole.setdefault(part.name, torch.full(part.shape, torch.nan))
        place = parameter if part.dim is None else parameter.narrow(part.dim, part.start, part.local_shape[part.dim])
        place.copy_(flat.view(part.local_shape))
    assert not any(parameter.isnan().any() for parameter in whole.values())
    return whole


def train_with(rank: int, folder: str, attempt: int, changes: dict[str, Any]) -> Result:
    """`train_tiny` with its changes in one argument, as tasks are called."""
    return train_tiny(rank, folder, attempt, **changes)


def raises(rank: int, folder: str, changes: dict[str, Any]) -> tuple[str, str, list[str]]:
    """Kind and text of the exception that a training ends with, and what the callbacks were told before."""
    config = make_config(**changes)
    config.callbacks.spy = {"_target_": "tests.train.tasks.Spy"}
    context = make_context(rank, Path(folder))
    try:
        run(config, context)
    except Exception as error:
        return type(error).__name__, str(error), context.spy.calls if context.spy else []
    return "", "", []


def all_positions(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss that counts masked positions too."""
    return outputs.float().square().sum(), torch.tensor(targets.numel())


def only_sum(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss that forgets its count."""
    return outputs.float().square().sum()


def train_or_die(rank: int, folder: str, changes: dict[str, Any]) -> Result:
    """A training; a rank on which the loss fails is gone at once, as one that the launcher started."""
    try:
        return train_tiny(rank, folder, **changes)
    except ValueError:
        os._exit(70)


def no_scalar(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A loss that forgets to add up."""
    return outputs.float().square(), int((targets != -100).sum())


def broken_loss(outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss that cannot be computed."""
    raise ValueError("no loss today")


def train_short_of_samples(rank: int, folder: str, changes: dict[str, Any]) -> Result:
    """A training whose global batch has fewer samples than there are ranks, past the check that refuses it."""
    size = dist.get_world_size()
    with _layout_without_check(size):
        return train_tiny(rank, folder, 0, **changes)


@contextmanager
def _layout_without_check(size: int) -> Iterator[None]:
    kept = Layout.resolve
    Layout.resolve = classmethod(lambda cls, config, world_size: cls(replicate=size))  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Layout.resolve = kept  # type: ignore[method-assign]
