from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import RankFailed, pool
from tests.train import tasks
from tests.train.tasks import Result


def train(size: int, folder: Path, attempt: int = 0, **changes: Any) -> list[Result]:
    return pool().run(size, tasks.train_with, str(folder), attempt, changes)


def stop_after(step: int, rank: int = 0) -> dict[str, Any]:
    return {"stopper": {"_target_": "tests.train.tasks.StopAfter", "step": step, "rank": rank}}


def break_after(step: int, rank: int) -> dict[str, Any]:
    return {"breaker": {"_target_": "tests.train.tasks.BreakAfter", "step": step, "rank": rank}}


def assert_same_bits(first: Result, second: Result) -> None:
    assert first.parameters.keys() == second.parameters.keys()
    different = [name for name, p in first.parameters.items() if not torch.equal(p, second.parameters[name])]
    assert different == []


def assert_close(first: Result, second: Result) -> None:
    for name, parameter in first.parameters.items():
        scale = parameter.abs().max().item()
        torch.testing.assert_close(
            parameter, second.parameters[name], rtol=1e-5, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )
    for one, other in zip(first.records, second.records, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-6)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
        assert (one.targets, one.samples, one.step, one.lr) == (other.targets, other.samples, other.step, other.lr)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The reference: one process, the whole batch at once."""
    return train(1, tmp_path_factory.mktemp("alone"))[0]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_uneven_shares_train_the_same_model_as_one_process(tmp_path: Path, alone: Result, size: int) -> None:
    ranks = train(size, tmp_path)
    assert_close(alone, ranks[0])
    for other in ranks[1:]:
        assert_same_bits(ranks[0], other)


@pytest.mark.parametrize(("size", "micro_batch"), [(1, 1), (1, 2), (2, 2), (2, 1), (3, 1)])
def test_accumulation_changes_nothing(tmp_path: Path, alone: Result, size: int, micro_batch: int) -> None:
    assert_close(alone, train(size, tmp_path, train={"micro_batch": micro_batch})[0])


def test_a_rank_without_samples_takes_part(tmp_path: Path) -> None:
    # The layout refuses this in a plan; a dataset's last, short step can still leave nothing for a rank.
    few = {"train": {"global_batch": 2}}
    reference = train(1, tmp_path / "one", **few)[0]
    assert_close(reference, pool().run(3, tasks.train_short_of_samples, str(tmp_path / "three"), few)[0])


def test_the_same_command_gives_the_same_bits(tmp_path: Path) -> None:
    changes = {"model": {"dropout": 0.2}}
    assert_same_bits(train(2, tmp_path / "a", **changes)[0], train(2, tmp_path / "b", **changes)[0])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("step", [1, 4])
def test_stopped_and_resumed_is_bitwise_the_uninterrupted_run(tmp_path: Path, size: int, step: int) -> None:
    changes: dict[str, Any] = {"model": {"dropout": 0.2}, "parallel": {"bucket_mb": 1}}
    whole = train(size, tmp_path / "whole", **changes)
    first = train(size, tmp_path / "cut", callbacks=stop_after(step), **changes)
    assert [(r.outcome, r.step) for r in first] == [("preempted", first[0].step)] * size
    assert step <= first[0].step < 6
    second = train(size, tmp_path / "cut", 1, **changes)
    assert [r.outcome for r in second] == ["finished"] * size
    for one, other in zip(whole, second, strict=True):
        assert_same_bits(one, other)
    losses = [r.loss for r in first[0].records] + [r.loss for r in second[0].records]
    assert losses == [r.loss for r in whole[0].records]


def test_a_run_resumes_on_another_number_of_ranks(tmp_path: Path, alone: Result) -> None:
    first = train(2, tmp_path, callbacks=stop_after(2))
    second = train(3, tmp_path, 1)
    assert first[0].outcome == "preempted"
    assert_close(alone, Result("", 0, second[0].parameters, first[0].records + second[0].records, [], []))


@pytest.mark.parametrize("rank", [0, 1])
def test_one_flagged_rank_stops_all_at_the_same_boundary(tmp_path: Path, rank: int) -> None:
    ranks = train(2, tmp_path, callbacks=stop_after(2, rank))
    assert [(r.outcome, r.step) for r in ranks] == [("preempted", ranks[0].step)] * 2
    assert ranks[0].step < 6
    assert ranks[0].calls == ranks[1].calls
    assert ranks[0].calls[-2:] == ["stop SIGUSR2", f"checkpoint {ranks[0].step}"]


def test_a_stop_in_the_last_step_still_saves_and_the_next_attempt_only_evaluates(tmp_path: Path) -> None:
    first = train(2, tmp_path, callbacks=stop_after(5))
    assert (first[0].outcome, first[0].step) == ("preempted", 6)
    second = train(2, tmp_path, 1)
    assert second[0].calls == ["start", "eval 6", "end"]
    assert_same_bits(first[0], second[0])


@pytest.mark.parametrize("rank", [0, 1])
def test_not_a_number_is_an_error_on_every_rank_at_the_same_step(tmp_path: Path, rank: int) -> None:
    answers = pool().run(2, tasks.raises, str(tmp_path), {"callbacks": break_after(2, rank)})
    kinds = {(kind, text) for kind, text, _ in answers}
    assert len(kinds) == 1
    ((kind, text),) = kinds
    assert kind == "FloatingPointError"
    assert text.startswith("step 4: the gradient norm is nan")
    assert answers[0][2] == answers[1][2]


def test_callbacks_are_told_everything_in_order(tmp_path: Path) -> None:
    ranks = train(2, tmp_path, train={"eval_every": 2, "eval_samples": 3}, checkpoint={"every": 3})
    assert ranks[0].calls == [
        *("start", "step 1", "step 2", "eval 2", "step 3", "checkpoint 3", "step 4", "eval 4"),
        *("step 5", "step 6", "checkpoint 6", "eval 6", "end"),
    ]
    assert ranks[1].calls == ranks[0].calls
    assert [record.whole for record in ranks[0].evals] == [False, False, True]


def test_evaluation_can_be_left_out(tmp_path: Path) -> None:
    assert not any(call.startswith("eval") for call in train(1, tmp_path, train={"eval_every": -1})[0].calls)


def test_evaluation_does_not_depend_on_the_number_of_ranks(tmp_path: Path, alone: Result) -> None:
    assert alone.evals[0].targets == sum(
        int((t != -100).sum()) for _, t in (tasks.Sequences().valid[i] for i in range(7))
    )
    for size in (2, 3):
        result = train(size, tmp_path / str(size))[0].evals[0]
        assert result.targets == alone.evals[0].targets
        assert result.loss == pytest.approx(alone.evals[0].loss, rel=1e-5)
        assert result.bits_per_byte == pytest.approx(result.loss / 0.6931471805599453 / 2, rel=1e-9)


def test_bf16_trains_with_fp32_weights(tmp_path: Path, alone: Result) -> None:
    result = train(2, tmp_path, precision={"compute": "bf16"})[0]
    assert {p.dtype for p in result.parameters.values()} == {torch.float32}
    losses = [record.loss for record in result.records]
    assert losses == pytest.approx([record.loss for record in alone.records], rel=2e-2)
    assert losses != [record.loss for record in alone.records]


def test_clipping_is_by_the_global_norm(tmp_path: Path) -> None:
    sgd = {"_target_": "torch.optim.SGD", "lr": 1.0, "weight_decay": 0.0, "arguments": {}}
    untied = {"tie_embeddings": False}  # A tied weight has two names and would count twice.
    optim = {**sgd, "schedule": {"name": "constant", "warmup_steps": 0, "min_ratio": 1.0, "decay_fraction": 0.0}}
    start, end = (
        train(2, tmp_path / str(lr), model=untied, train={"steps": 1, "grad_clip": 0.01}, optim={**optim, "lr": lr})[
            0
        ].parameters
        for lr in (1e-30, 1.0)
    )
    moved = sum((start[name] - end[name]).double().square().sum().item() for name in start) ** 0.5
    assert moved == pytest.approx(0.01, rel=1e-4)


def test_a_loss_that_counts_otherwise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RankFailed, match=r"loss\._target_=tests\.train\.tasks\.all_positions: it counted 80 targets where"
    ):
        train(1, tmp_path, loss={"_target_": "tests.train.tasks.all_positions"})


def test_a_loss_that_forgets_its_count_is_one_clear_message_on_every_rank(tmp_path: Path) -> None:
    changes = {"loss": {"_target_": "tests.train.tasks.only_sum"}}
    for kind, text, calls in pool().run(2, tasks.raises, str(tmp_path), changes):
        assert (kind, calls) == ("UserError", ["start"])
        assert text.startswith("loss._target_=tests.train.tasks.only_sum: it returned only one value")


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"pp": 2}),
    (2, {"tp": 2}),
    (2, {"zero": 3}),
    (4, {"pp": 2, "zero": 2, "schedule": "zb_h1"}),
]


@pytest.mark.parametrize(("size", "parallel"), LAYOUTS)
def test_layouts_train_the_same_model_and_a_stop_changes_no_bit(
    tmp_path: Path, alone: Result, size: int, parallel: dict[str, Any]
) -> None:
    changes: dict[str, Any] = {"parallel": parallel, "train": {"micro_batch": 2}}
    whole = train(size, tmp_path / "whole", **changes)
    parameters = tasks.assembled(whole)
    own = {name: value for name, value in alone.parameters.items() if name in parameters}
    assert_close(replace(alone, parameters=own), replace(whole[0], parameters=parameters))
    first = train(size, tmp_path / "cut", callbacks=stop_after(2, size - 1), **changes)
    assert [(r.outcome, r.step) for r in first] == [("preempted", first[0].step)] * size
    second = train(size, tmp_path / "cut", 1, **changes)
    assert_same_bits(Result("", 0, parameters, [], [], []), Result("", 0, tasks.assembled(second), [], [], []))
    losses = [record.loss for result in (first, second) for record in result[0].records]
    assert losses == [record.loss for record in whole[0].records]


@pytest.mark.parametrize(("size", "parallel"), LAYOUTS)
def test_not_a_number_in_the_first_step_is_the_same_error_on_every_rank_of_any_layout(
    tmp_path: Path, size: int, parallel: dict[str, Any]
) -> None:
    changes = {"parallel": parallel, "callbacks": break_after(0, size - 1), "train": {"micro_batch": 2}}
    answers = pool().run(size, tasks.raises, str(tmp_path), changes)
    assert {kind for kind, _, _ in answers} == {"UserError"}
    assert len({text for _, text, _ in answers}) == 1
    assert answers[0][1].startswith("step 1: the gradient norm is nan")


@pytest.mark.parametrize(("size", "parallel"), [(2, {}), (2, {"zero": 2}), (2, {"pp": 2}), (2, {"tp": 2})])
def test_updates_that_overflow_in_fp16_are_left_out_and_counted(
    tmp_path: Path, size: int, parallel: dict[str, Any]
) -> None:
    precision = {"compute": "fp16", "loss_scale": 2.0**24, "loss_scale_growth_every": 3}
    ranks = train(size, tmp_path, precision=precision, parallel=parallel, train={"steps": 16, "eval_every": -1})
    records = ranks[0].records
    left_out = [not math.isfinite(record.grad_norm) for record in records]
    assert ranks[0].outcome == "finished"
    assert left_out[0]
    assert not all(left_out)
    scale, clean = 2.0**24, 0
    for number, (record, skipped) in enumerate(zip(records, left_out, strict=True)):
        assert record.loss_scale == scale
        assert record.skipped_steps == record.overflows == sum(left_out[: number + 1])
        clean = 0 if skipped else clean + 1
        scale = scale / 2 if skipped else scale * (2 if clean == 3 else 1)
        clean %= 3
    for other in ranks[1:]:
        assert repr([replace(r, seconds=0.0) for r in other.records]) == repr(
            [replace(r, seconds=0.0) for r in records]
        )
    assert ranks[0].memory is not None
    assert ranks[0].memory.step == left_out.index(False) + 1


def test_formats_that_need_no_loss_scale_tell_of_none(alone: Result) -> None:
    assert {(r.loss_scale, r.skipped_steps, r.overflows) for r in alone.records} == {(None, None, None)}


@pytest.mark.parametrize("delay", [0, 1])
def test_replicas_that_train_by_themselves_end_as_one(tmp_path: Path, delay: int) -> None:
    changes: dict[str, Any] = {"parallel": {"outer": {"every": 2, "delay": delay}}, "train": {"steps": 5}}
    first, second = train(2, tmp_path, **changes)
    assert_same_bits(first, second)
    # On the way they are apart: each has its own gradients, and nobody adds them up.
    norms = [[record.grad_norm for record in result.records] for result in (first, second)]
    assert norms[0] != norms[1]
    assert [r.loss for r in first.records] == [r.loss for r in second.records]
    assert first.records[-1].loss < first.records[0].loss


def test_an_error_on_one_rank_of_a_pipeline_holds_up_no_other(tmp_path: Path) -> None:
    changes = {"parallel": {"pp": 2}, "loss": {"_target_": "tests.train.tasks.broken_loss"}}
    with pytest.raises(RankFailed) as caught:
        pool().run(2, tasks.train_or_die, str(tmp_path), changes)
    first, last = caught.value.errors
    assert "its process died (exit code 70)" in str(last)
    assert first is not None
    assert "did not end" not in first
