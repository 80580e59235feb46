from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dthpc.checkpoint import store
from dthpc.checkpoint.manifest import latest_verified, list_checkpoints, read_manifest
from dthpc.checkpoint.state import TrainingState, model_shares
from dthpc.errors import UserError
from tests.checkpoint.harness import flip_bit, results, run_ranks
from tests.checkpoint.jobs import Job, build, draws, fingerprint, train

META = {"config": "abc"}


def save_after(rank: int, root: Path, kind: str, *steps: int) -> Any:
    """Train a fresh job, saving at some steps; what it then is and draws."""
    job = build(kind)
    at = 0
    for step in steps:
        train(job, at, step, rank)
        store.save(root, step, job.state, attempt=0, meta=META)
        at = step
    return fingerprint(job), draws()


def restored(rank: int, root: Path, kind: str) -> Any:
    """Restore into a job of other weights and other random numbers."""
    job = build(kind, seed=5)
    info = store.restore(root, job.state, expect_meta=META)
    return fingerprint(job), draws(), info


def resumed(rank: int, root: Path, kind: str, last: int) -> Any:
    job = build(kind, seed=5)
    info = store.restore(root, job.state)
    assert info is not None
    train(job, info.step, last, rank)
    return fingerprint(job), draws()


def uninterrupted(rank: int, kind: str, last: int) -> Any:
    job = build(kind)
    train(job, 0, last, rank)
    return fingerprint(job), draws()


@pytest.mark.parametrize(("ranks", "kind"), [(0, "plain"), (1, "ddp"), (2, "ddp"), (2, "zero")])
def test_what_is_restored_is_bitwise_what_was_saved(tmp_path: Path, ranks: int, kind: str) -> None:
    saved = results(run_ranks(ranks, save_after, tmp_path, kind, 3))
    loaded = results(run_ranks(ranks, restored, tmp_path, kind))
    assert [each[:2] for each in loaded] == saved
    infos = [each[2] for each in loaded]
    assert {(info.step, info.path.name, info.rejected, info.world_size) for info in infos} == {
        (3, "step-00000003", (), max(ranks, 1))
    }
    assert infos[0].meta == META


@pytest.mark.parametrize(("ranks", "kind"), [(0, "plain"), (2, "ddp"), (2, "zero")])
def test_going_on_from_a_checkpoint_is_bitwise_not_having_stopped(tmp_path: Path, ranks: int, kind: str) -> None:
    results(run_ranks(ranks, save_after, tmp_path, kind, 2, 4))
    went_on = results(run_ranks(ranks, resumed, tmp_path, kind, 7))
    never_stopped = results(run_ranks(ranks, uninterrupted, kind, 7))
    assert went_on == never_stopped
    if ranks == 2:
        assert went_on[0][1] != went_on[1][1], "each rank has its own stream of random numbers"


def test_saving_leaves_no_mark_on_the_training(tmp_path: Path) -> None:
    saved = results(run_ranks(0, save_after, tmp_path, "plain", 1, 2, 3))
    assert saved == results(run_ranks(0, uninterrupted, "plain", 3))


@pytest.mark.parametrize(
    ("ranks", "kind", "ranks_later", "kind_later"),
    [
        (2, "ddp", 0, "plain"),
        (2, "ddp", 3, "ddp"),
        (2, "zero", 0, "plain"),
        (2, "zero", 1, "zero"),
        (2, "zero", 3, "zero"),
        (2, "ddp", 3, "zero"),
    ],
)
def test_another_layout_gets_the_same_values_and_fresh_random_numbers(
    tmp_path: Path, ranks: int, kind: str, ranks_later: int, kind_later: str
) -> None:
    saved = results(run_ranks(ranks, save_after, tmp_path, kind, 3))
    loaded = results(run_ranks(ranks_later, restored, tmp_path, kind_later))
    again = results(run_ranks(ranks_later, restored, tmp_path, kind_later))
    for values, drawn, info in loaded:
        assert values == saved[0][0]
        assert drawn not in [each[1] for each in saved]
        assert info.world_size == ranks
    assert len({each[1] for each in loaded}) == len(loaded), "each rank draws something else"
    assert [each[1] for each in loaded] == [each[1] for each in again], "and the same whenever it is restored"


def two_checkpoints(root: Path) -> Job:
    job = build()
    for step in (1, 2):
        train(job, step - 1, step)
        store.save(root, step, job.state, attempt=0, meta=META)
    return job


def kinds_of_file(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "step-00000002").iterdir())


def test_a_flipped_bit_in_any_file_sends_the_restore_to_the_older_checkpoint(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    older = build()
    train(older, 0, 1)
    names = kinds_of_file(tmp_path)
    assert names == [".metadata", "__0_0.distcp", "manifest.json", "records.json"]
    for name in names:
        path = tmp_path / "step-00000002" / name
        size = path.stat().st_size
        for position in (0, size // 3, size // 2, size - 1):
            flip_bit(path, position, bit=3)
            job = build(seed=5)
            info = store.restore(tmp_path, job.state)
            assert info is not None
            assert info.step == 1
            assert [each.checkpoint.step for each in info.rejected] == [2]
            assert name in info.rejected[0].why
            assert fingerprint(job) == fingerprint(older)
            flip_bit(path, position, bit=3)
    info = store.restore(tmp_path, build(seed=5).state)
    assert info is not None
    assert (info.step, info.rejected) == (2, ())


def flip_and_restore(rank: int, root: Path) -> Any:
    job = build("ddp", seed=5)
    info = store.restore(root, job.state)
    assert info is not None
    return info.step, [each.why for each in info.rejected], fingerprint(job)


def test_the_ranks_agree_although_each_verifies_a_share(tmp_path: Path) -> None:
    results(run_ranks(2, save_after, tmp_path, "ddp", 1, 2))
    flip_bit(tmp_path / "step-00000002" / "__1_0.distcp", 900)
    first, second = results(run_ranks(2, flip_and_restore, tmp_path))
    assert first == second
    assert first[:2] == (1, ["__1_0.distcp does not match its checksum"])


@pytest.mark.parametrize("damage", ["truncated", "missing file", "missing manifest", "extra file"])
def test_other_damage_sends_the_restore_to_the_older_checkpoint(tmp_path: Path, damage: str) -> None:
    two_checkpoints(tmp_path)
    newest = tmp_path / "step-00000002"
    data = newest / "__0_0.distcp"
    match damage:
        case "truncated":
            data.write_bytes(data.read_bytes()[:-1])
        case "missing file":
            data.unlink()
        case "missing manifest":
            (newest / "manifest.json").unlink()
        case "extra file":
            (newest / "__1_0.distcp").write_bytes(b"of another save")
    info = store.restore(tmp_path, build(seed=5).state)
    assert info is not None
    assert info.step == 1
    assert len(info.rejected) == 1


def test_without_a_checkpoint_there_is_nothing_to_restore(tmp_path: Path) -> None:
    job = build()
    before = fingerprint(job)
    (tmp_path / "step-00000009.partial-0").mkdir()
    assert store.restore(tmp_path, job.state) is None
    assert store.restore(tmp_path / "absent", job.state) is None
    assert list(tmp_path.iterdir()) == []
    assert fingerprint(job) == before


def test_where_no_checkpoint_verifies_the_run_stops_instead_of_starting_over(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    for step in (1, 2):
        flip_bit(tmp_path / f"step-{step:08d}" / "__0_0.distcp", 99)
    with pytest.raises(UserError, match=r"none of the 2 checkpoints.*step-00000002: __0_0.distcp does not match"):
        store.restore(tmp_path, build().state)


def altered(change: str) -> TrainingState:
    """A job that is not the one that was saved."""
    job = build()
    match change:
        case "wider":
            return build(hidden=8).state
        case "another type":
            job.model.double()
        case "another layer":
            job.model.extra = nn.Linear(1, 1)
        case "a layer less":
            job.model.body[3] = nn.Identity()
            job.optimizer.param_groups[0]["params"].pop()
            job.optimizer.param_groups[1]["params"].pop()
        case "another optimizer":
            job.state.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1)
        case "no optimizer":
            job.state.optimizer = ()
        case "another scalar":
            job.state.scalars["epoch"] = 0
        case "no schedule":
            job.state.stateful.clear()
        case "other groups":
            job.state.optimizer = torch.optim.AdamW(job.model.parameters())
    return job.state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("wider", r"model.body.0.weight is torch.float32 \(7, 12\) there and torch.float32 \(8, 12\) here"),
        ("another type", "model.body.0.bias is torch.float32 .* there and torch.float64"),
        ("another layer", "it lacks the tensors model.extra.bias, model.extra.weight"),
        ("a layer less", "it holds the tensors model.body.3.bias, model.body.3.weight, unknown here"),
        ("another optimizer", "the optimizer is AdamW there and SGD here"),
        ("no optimizer", "it holds the optimizer state of body.0.bias, .* unknown here"),
        ("another scalar", "it lacks the scalars epoch"),
        ("no schedule", "it holds the stateful schedule, unknown here"),
        ("other groups", "group 0 mixes parameters saved with different options: body.0.bias, body.3.bias"),
    ],
)
def test_the_checkpoint_of_another_model_is_refused_and_changes_nothing(
    tmp_path: Path, change: str, message: str
) -> None:
    two_checkpoints(tmp_path)
    state = altered(change)
    before = {share.name: share.tensor.clone() for share in model_shares(state)}
    with pytest.raises(UserError, match=message):
        store.restore(tmp_path, state)
    assert all(torch.equal(share.tensor, before[share.name]) for share in model_shares(state))
    assert state.scalars["samples"] == 0


def test_missing_and_unexpected_keys_are_told_in_one_message(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    job = build()
    job.model.tail = job.model.body
    job.model.body = nn.Identity()
    with pytest.raises(UserError, match=r"another model.*it lacks the tensors .*it holds the tensors"):
        store.restore(tmp_path, job.state)


def test_every_difference_of_meta_is_told(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    with pytest.raises(UserError, match=r"(?s)config='xyz'.*written with 'abc'.*vocabulary=256.*written with None"):
        store.restore(tmp_path, build().state, expect_meta={"config": "xyz", "vocabulary": 256})


def test_a_checkpoint_is_never_written_again(tmp_path: Path) -> None:
    job = two_checkpoints(tmp_path)
    before = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")}
    train(job, 2, 3)
    info = store.save(tmp_path, 2, job.state, attempt=1, meta=META)
    assert not info.written
    assert before == {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")}
    with pytest.raises(UserError, match="already holds a checkpoint of this step"):
        store.save(tmp_path, 2, job.state, attempt=1, meta={"config": "xyz"})


def test_meta_is_compared_as_it_comes_back_from_disk(tmp_path: Path) -> None:
    meta = {"betas": (0.9, 0.95)}
    assert store.save(tmp_path, 1, build().state, attempt=0, meta=meta).written
    assert not store.save(tmp_path, 1, build().state, attempt=1, meta=meta).written
    assert store.restore(tmp_path, build().state, expect_meta=meta) is not None


def test_a_checkpoint_that_does_not_verify_is_replaced(tmp_path: Path) -> None:
    job = two_checkpoints(tmp_path)
    flip_bit(tmp_path / "step-00000002" / "records.json", 4)
    info = store.save(tmp_path, 2, job.state, attempt=1, meta=META)
    assert info.written
    latest, rejected = latest_verified(tmp_path, quick=False)
    assert latest is not None
    assert (latest.step, rejected) == (2, [])
    assert read_manifest(latest.path).attempt == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_replicas_share_the_writing(tmp_path: Path) -> None:
    results(run_ranks(2, save_after, tmp_path, "ddp", 1))
    manifest = read_manifest(list_checkpoints(tmp_path)[0].path)
    shares = [manifest.files[f"__{rank}_0.distcp"].size for rank in (0, 1)]
    assert max(shares) < 0.7 * sum(shares)
    assert manifest.world_size == 2
    assert manifest.tensors["optim.body.0.weight.exp_avg"].shape == (7, 12)


def test_fp32_state_of_bf16_parameters_keeps_its_bits(tmp_path: Path) -> None:
    def make() -> TrainingState:
        model = nn.Linear(4, 4, dtype=torch.bfloat16)
        return TrainingState(model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1)))

    saved = make()
    for parameter in saved.model.parameters():
        average = torch.randn(parameter.shape)
        saved.optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": average, "note": 7}
    saved.optimizer.param_groups[0]["lr"].fill_(0.3)
    store.save(tmp_path, 1, saved, attempt=0)
    loaded = make()
    rate = loaded.optimizer.param_groups[0]["lr"]
    store.restore(tmp_path, loaded)
    assert loaded.optimizer.param_groups[0]["lr"] is rate
    assert torch.equal(rate, torch.tensor(0.3))
    for old, new in zip(saved.model.parameters(), loaded.model.parameters(), strict=True):
        kept = loaded.optimizer.state[new]
        assert torch.equal(old, new)
        assert kept["exp_avg"].dtype == torch.float32
        assert torch.equal(kept["exp_avg"], saved.optimizer.state[old]["exp_avg"])
        assert (kept["step"].item(), kept["note"]) == (3.0, 7)


def test_state_from_later_steps_does_not_outlive_a_restore(tmp_path: Path) -> None:
    fresh = build()
    store.save(tmp_path, 0, fresh.state, attempt=0)
    used = build(seed=5)
    train(used, 0, 2)
    store.restore(tmp_path, used.state)
    assert len(used.optimizer.state) == 0
    assert fingerprint(used) == fingerprint(fresh)


def diverging(rank: int, root: Path) -> Any:
    job = build("ddp")
    job.model.module.seen.fill_(10 + rank)
    store.save(root, 1, job.state, attempt=0)
    store.restore(root, job.state)
    return job.model.module.seen.item()


def test_of_buffers_that_differ_between_replicas_the_first_rank_has_its_way(tmp_path: Path) -> None:
    assert results(run_ranks(2, diverging, tmp_path)) == [10, 10]


def disagreeing(rank: int, root: Path, what: str) -> Any:
    job = build("ddp")
    if what == "scalars":
        job.state.scalars["samples"] = rank
    if what == "optimizer":
        job.optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1)
    store.save(root, rank if what == "step" else 1, job.state, attempt=0)


@pytest.mark.parametrize("what", ["scalars", "step", "optimizer"])
def test_ranks_that_disagree_save_nothing(tmp_path: Path, what: str) -> None:
    ended = run_ranks(2, disagreeing, tmp_path, what)
    assert len({str(each.result) for each in ended}) == 1
    for each in ended:
        assert isinstance(each.result, UserError)
        assert what in str(each.result)
    assert list(tmp_path.iterdir()) == []


def stages(rank: int, root: Path) -> Any:
    """Each rank holds another chunk of the model and its own optimizer, as pipeline stages do."""
    torch.manual_seed(rank)
    chunk = nn.ModuleDict({f"layer{rank}": nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(chunk.parameters())
    chunk[f"layer{rank}"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    store.save(root, 1, TrainingState(chunk, optimizer), attempt=0)
    return {name: value.tolist() for name, value in chunk.named_parameters()}


def test_chunks_on_several_ranks_make_one_model(tmp_path: Path) -> None:
    first, second = results(run_ranks(2, stages, tmp_path))
    whole = nn.ModuleDict({"layer0": nn.Linear(2, 2), "layer1": nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(whole.parameters())
    store.restore(tmp_path, TrainingState(whole, optimizer))
    for name, value in {**first, **second}.items():
        assert whole.get_parameter(name).tolist() == value
    assert all(entry["step"] == 1 for entry in optimizer.state.values())
    assert len(optimizer.state) == 4


@pytest.mark.parametrize("calls_before_refusal", [0, 1])
def test_an_attempt_that_may_write_no_more_leaves_everything_as_it_was(
    tmp_path: Path, calls_before_refusal: int
) -> None:
    """Refused at the start, or after writing and right before the commit."""
    job = build("plain")
    store.save(tmp_path, 1, job.state, attempt=0)
    before = sorted(path.name for path in tmp_path.iterdir())
    calls = []

    def guard() -> None:
        calls.append(None)
        if len(calls) > calls_before_refusal:
            raise UserError("a later attempt has begun")

    with pytest.raises(UserError, match="a later attempt"):
        store.save(tmp_path, 2, job.state, attempt=0, guard=guard)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
