from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dthpc.models.losses import IGNORE, next_token
from dthpc.parallel.apply import parallelize
from dthpc.parallel.layout import Layout
from dthpc.parallel.mesh import make_mesh
from dthpc.rundir import RunDir
from dthpc.train.callbacks import EvalRecord
from dthpc.train.evaluate import bits_per_byte, evaluate
from dthpc.train.header import Header
from dthpc.train.loop import Training
from dthpc.train.saver import Saver
from dthpc.train.state import TrainState
from tests.ranks import RankFailed, pool
from tests.train import tasks
from tests.train.tasks import Sequences, make_config, make_context


class Net(nn.Module):
    """Logits by a table, that are another thing while training; it notes the sizes of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 32)
        self.drop = nn.Dropout(0.5)
        self.batches: list[int] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.batches.append(len(tokens))
        return self.drop(self.table(tokens))


def build(rank: int, folder: str, data: Any, loss: Any = next_token, **train: Any) -> Training:
    torch.manual_seed(3)
    config = make_config(train=train)
    context = make_context(rank, Path(folder))
    size = dist.get_world_size()
    mesh = make_mesh(Layout.resolve(config, size), "cpu")
    model = parallelize(Net(), loss, mesh, config, context.device)
    return Training(
        config=config,
        context=context,
        data=data,
        model=model,
        optimizer=torch.optim.SGD(model.module.parameters(), lr=0.1),
        header=Header(dist.group.WORLD if size > 1 else None),
        saver=Saver(RunDir(Path(folder)), 0, 0, 0, 0, {}, False),
        state=TrainState(step=4, samples=20),
    )


def evaluated(
    rank: int, folder: str, samples: int | None, valid: int, train: dict[str, Any], stop: str | None = None
) -> tuple[EvalRecord | str, list[int], bool]:
    """The result on this rank, the sizes of the batches that its model saw, and whether it trains again."""
    training = build(rank, folder, Sequences(valid=valid), **train)
    if stop is not None and rank == dist.get_world_size() - 1:
        training.context.stop.request(stop)
    record = evaluate(training, samples)
    assert isinstance(training.model.module, Net)
    return record, training.model.module.batches, training.model.module.training


def run(size: int, folder: Path, samples: int | None = None, valid: int = 7, **train: Any) -> list[Any]:
    return pool().run(size, evaluated, str(folder), samples, valid, train)


def expected(valid: int) -> tuple[float, int]:
    """The mean over the targets that count, and their number, computed all at once."""
    torch.manual_seed(3)
    net = Net().eval()
    data = Sequences(valid=valid).valid
    pairs = [data[index] for index in range(valid)]
    logits = net(torch.stack([inputs for inputs, _ in pairs])).flatten(0, -2)
    targets = torch.stack([labels for _, labels in pairs]).flatten()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE)
    return loss.item(), int((targets != IGNORE).sum())


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("micro_batch", [None, 1, 2])
def test_the_loss_depends_neither_on_ranks_nor_on_batches(tmp_path: Path, size: int, micro_batch: int | None) -> None:
    loss, targets = expected(7)
    answers = run(size, tmp_path, micro_batch=micro_batch)
    record = answers[0][0]
    assert record.loss == pytest.approx(loss, rel=1e-6)
    assert (record.step, record.targets, record.whole) == (4, targets, True)
    assert record.bits_per_byte == pytest.approx(loss / math.log(2) / 2.0)
    for other, _, _ in answers[1:]:
        assert (other.loss, other.targets) == (record.loss, record.targets)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_sample_is_seen_once_over_the_ranks(tmp_path: Path, size: int) -> None:
    seen = [batches for _, batches, _ in run(size, tmp_path, micro_batch=2)]
    assert sum(map(sum, seen)) == 7
    assert max(map(max, seen)) <= 2


def test_a_rank_without_a_sample_takes_part(tmp_path: Path) -> None:
    loss, targets = expected(2)
    answers = run(3, tmp_path, valid=2)
    assert [batches for _, batches, _ in answers] == [[1], [1], []]
    assert [each.targets for each, _, _ in answers] == [targets] * 3
    assert [each.loss for each, _, _ in answers] == [pytest.approx(loss, rel=1e-6)] * 3


@pytest.mark.parametrize(("samples", "whole"), [(3, False), (6, False), (7, True), (99, True)])
def test_some_samples_stand_for_all_and_say_so(tmp_path: Path, samples: int, whole: bool) -> None:
    ((alone, batches, _),) = run(1, tmp_path, samples)
    together = run(2, tmp_path, samples)[0][0]
    assert sum(batches) == min(samples, 7)
    assert alone.whole is together.whole is whole
    assert together.loss == pytest.approx(alone.loss, rel=1e-6)
    assert together.targets == alone.targets


@pytest.mark.parametrize("size", [1, 2])
def test_a_stop_ends_a_long_evaluation_on_all_ranks_in_its_first_rounds(tmp_path: Path, size: int) -> None:
    answers = pool().run(size, evaluated, str(tmp_path), None, 40, {"micro_batch": 1}, "SIGUSR2")
    assert [answer for answer, _, _ in answers] == ["SIGUSR2"] * size
    assert all(len(batches) <= 2 for _, batches, _ in answers)


def test_the_model_trains_again_afterwards_also_after_a_stop(tmp_path: Path) -> None:
    assert [training for _, _, training in run(2, tmp_path)] == [True, True]
    stopped = pool().run(2, evaluated, str(tmp_path), None, 40, {"micro_batch": 1}, "SIGTERM")
    assert [training for _, _, training in stopped] == [True, True]


def broken(rank: int, folder: str) -> bool:
    def fail(outputs: Any, targets: Any) -> Any:
        raise ValueError("no loss today")

    training = build(rank, folder, Sequences(), fail)
    with pytest.raises(ValueError, match="no loss today"):
        evaluate(training, None)
    return training.model.module.training


def test_the_model_trains_again_even_after_an_error(tmp_path: Path) -> None:
    assert pool().run(1, broken, str(tmp_path)) == [True]


def gradients_after(rank: int, folder: str) -> tuple[float, torch.Tensor]:
    training = build(rank, folder, Sequences())
    before = torch.get_rng_state()
    evaluate(training, None)
    (piece,) = training.model.shards.pieces
    norm = 0.0 if piece.tensor.grad is None else piece.tensor.grad.norm().item()
    return norm, torch.get_rng_state() == before


SAME = [
    {"parallel": {"pp": 2}},
    {"parallel": {"pp": 2, "schedule": "zbv"}, "model": {"layers": 4}},
    {"parallel": {"tp": 2}},
    {"parallel": {"zero": 3}},
    {"parallel": {"zero": 3, "pp": 2}},
]


@pytest.mark.parametrize("changes", SAME)
def test_the_loss_does_not_depend_on_the_layout(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Seven samples on two data-parallel ranks of passes of one or two: some are empty."""
    train = {"steps": 1, "micro_batch": 2}
    plain = {"model": changes.get("model", {}), "train": train}
    (alone,) = pool().run(1, tasks.train_with, str(tmp_path / "alone"), 0, plain)
    size = 2 if changes["parallel"] == {"zero": 3} else 4
    for result in pool().run(size, tasks.train_with, str(tmp_path / "ranks"), 0, {**changes, "train": train}):
        (record,) = result.evals
        assert record.targets == alone.evals[0].targets
        assert record.loss == pytest.approx(alone.evals[0].loss, rel=1e-6)


def test_an_evaluation_leaves_no_gradient_and_draws_no_random_number(tmp_path: Path) -> None:
    ((norm, same),) = pool().run(1, gradients_after, str(tmp_path))
    assert norm == 0.0
    assert bool(same.all())


def test_without_held_out_data_there_is_nothing_to_evaluate(tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        run(2, tmp_path, valid=0)
    assert all("UserError: data: the held-out data set has no samples" in str(error) for error in caught.value.errors)


class Bytes:
    def __init__(self, ratio: float | None) -> None:
        self.ratio = ratio

    def bytes_per_target(self, split: str) -> float | None:
        assert split == "valid"
        return self.ratio


def test_a_uniform_guess_among_all_bytes_costs_eight_bits() -> None:
    assert bits_per_byte(math.log(256), Bytes(1.0), "valid") == pytest.approx(8.0)
    assert bits_per_byte(math.log(256), Bytes(4.0), "valid") == pytest.approx(2.0)


@pytest.mark.parametrize("data", [object(), Bytes(None), Bytes(0.0)])
def test_data_without_bytes_has_no_bits_per_byte(data: object) -> None:
    assert bits_per_byte(1.0, data, "valid") is None
