from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from dthpc.errors import UserError
from dthpc.parallel.check import check, degrees_of, micro_batches_of


def config(nodes: Any = 1, tasks_per_node: int = 4, batch: int = 8, micro: int | None = None, **parallel: Any) -> Any:
    return OmegaConf.create(
        {
            "parallel": parallel,
            "train": {"global_batch": batch, "micro_batch": micro},
            "cluster": {"nodes": nodes, "tasks_per_node": tasks_per_node},
        }
    )


def messages(**settings: Any) -> list[str]:
    return [error.message() for error in check(config(**settings))]


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"dp": 4},
        {"zero": 1, "tp": 4},
        {"zero": 3, "replicate": 2},
        {"zero": 3, "replicate": "nodes"},
        {"replicate": 4},
        {"tp": 2, "sequence_parallel": True, "pp": 2},
        {"pp": 2, "schedule": "interleaved", "chunks": 3},
        {"pp": 2, "schedule": "zbv", "stages": [1, 2, 3, 4]},
        {"chunks": 5, "schedule": "pipedream"},
        {"order": ["tp", "cp", "shard", "replicate", "pp"]},
        {"outer": {"every": 4, "delay": 3}},
    ],
)
def test_what_works_is_let_pass(parallel: dict[str, Any]) -> None:
    assert messages(**parallel) == []


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({"dp": 3}, "multiply to 3 (dp=3), but there are 4 ranks. Instead: parallel.dp=null or parallel.dp=4, or"),
        ({"dp": 4, "tp": 2}, "multiply to 8 (dp=4 · tp=2), but there are 4 ranks. Instead: parallel.dp=null or"),
        ({"tp": 3}, "parallel.tp=3: the degrees multiply to 3 (tp=3), which does not divide the 4 ranks (remainder 1)"),
        ({"pp": 2, "tp": 4}, "multiply to 8 (pp=2 · tp=4), which does not divide the 4 ranks (remainder 4). Instead: "),
        ({"pp": 8}, "Instead: parallel.pp=4, or a multiple of 8 ranks"),
        ({"zero": 4}, "parallel.zero=4: there is no such ZeRO stage"),
        ({"zero": -1}, "parallel.zero=-1: too small"),
        ({"tp": 0}, "parallel.tp=0: too small. Instead: give at least 1"),
        ({"bucket_mb": 0}, "parallel.bucket_mb=0"),
        ({"activations": {"every": 0}}, "parallel.activations.every=0"),
        ({"outer": {"delay": -1}}, "parallel.outer.delay=-1"),
        ({"gradients": {"powersgd_rank": -1}}, "parallel.gradients.powersgd_rank=-1"),
        ({"replicate": 2}, "without ZeRO every one of the 4 data-parallel ranks is a replica"),
        ({"replicate": "nodes"}, "without ZeRO every one"),
        ({"zero": 1, "replicate": 3}, "4 data-parallel ranks do not divide into 3 replicas (remainder 1). Instead: "),
        ({"zero": 1, "replicate": "2-4"}, "parallel.replicate=2-4: neither a number nor a word"),
        ({"cp": 2}, "parallel.cp=2: context parallelism is not available"),
        ({"ep": 2}, "parallel.ep=2: expert parallelism is not available"),
        ({"order": ["pp", "shard", "cp", "tp"]}, "parallel.order=[pp,shard,cp,tp]: names each of the 5 axes once"),
        ({"order": ["pp", "replicate", "shard", "cp", "tp", "tp"]}, "(tp unknown or twice)"),
        ({"order": ["pp", "dp", "cp", "tp"]}, "(replicate, shard left out; dp unknown or twice)"),
        ({"schedule": "1f1"}, "parallel.schedule=1f1: no such choice. Instead: did you mean 1f1b?"),
        ({"gradients": {"dtype": "fp16"}}, "parallel.gradients.dtype=fp16"),
        ({"activations": {"mode": "selectiv"}}, "did you mean selective?"),
        ({"offload": {"optimizer": "disk"}}, "parallel.offload.optimizer=disk"),
        ({"stages": "even"}, "parallel.stages=even"),
        ({"pp": 2, "stages": [1, 2, 3]}, "has 3 numbers, but the pipeline has 2 stages (pp=2, chunks=1)"),
        ({"pp": 2, "stages": [4, 0]}, "parallel.stages=[4,0]: stage 1 has 0 layers"),
        ({"pp": 2, "stages": ["a", 2]}, "stage 0 has a layers"),
        ({"pp": 2, "chunks": 2}, "parallel.chunks=2: 1f1b has 1 chunk"),
        ({"pp": 2, "schedule": "zbv", "chunks": 3}, "parallel.chunks=3: zbv has 2 chunks"),
        ({"pp": 2, "schedule": "interleaved", "chunks": 1}, "parallel.chunks=1: interleaved needs at least 2"),
        ({"tp": 4, "outer": {"every": 2}}, "only one (parallel.zero=0, dp=1)"),
        ({"zero": 1, "outer": {"every": 2}}, "only one (parallel.zero=1, dp=4). Instead: parallel.outer.every=0, or "),
    ],
)
def test_each_mistake_is_told_with_its_numbers(parallel: dict[str, Any], expected: str) -> None:
    found = messages(**parallel)
    assert len(found) == 1, found
    assert expected in found[0]


def test_independent_mistakes_are_told_together() -> None:
    assert len(messages(zero=7, cp=2, ep=2, schedule="x", stages="y", activations={"mode": "z"})) == 6
    assert len(messages(dp=3, pp=2, chunks=2, outer={"every": 2, "delay": 2})) == 3


def test_every_rank_needs_work() -> None:
    assert messages(batch=4) == []
    (found,) = messages(batch=3)
    assert "3 samples leaves 1 of the 4 data-parallel ranks" in found
    assert messages(batch=2, tp=2) == []


def test_a_micro_batch_must_fit_a_ranks_share() -> None:
    assert messages(batch=9, micro=3) == []
    (found,) = messages(batch=9, micro=4)
    assert "share is 3 samples" in found


def test_a_range_of_nodes_is_checked_at_every_number_in_it() -> None:
    assert messages(nodes="1-2", batch=8) == []
    (found,) = messages(nodes="1-4", batch=8)
    assert "4 of the 12" in found  # 3 nodes are the first that do not fit
    (found,) = messages(nodes="1-2", dp=4)
    assert "there are 8 ranks" in found
    (found,) = messages(nodes="2-4", tp=8, batch=64)
    assert "12 ranks (remainder 4)" in found


def test_the_ends_of_a_very_long_range_are_checked() -> None:
    (found,) = messages(nodes="1-1000000", tasks_per_node=1, batch=999_999)
    assert "1 of the 1000000" in found


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"batch": 8, "micro": 4, "pp": 4}, "2 micro-batches of up to 4 in a step, and 1f1b needs at least pp=4"),
        ({"batch": 8, "micro": 4, "pp": 4}, "Instead: train.micro_batch=2 or less"),
        ({"batch": 3, "pp": 4}, "train.global_batch=3: too few micro-batches: a rank's share of 3 samples makes 3"),
        ({"batch": 3, "pp": 4}, "Instead: train.global_batch=4 or more, or a smaller parallel.pp, or"),
        ({"batch": 8, "micro": 4, "pp": 4, "schedule": "gpipe"}, "gpipe needs at least pp=4"),
        ({"batch": 12, "micro": 4, "pp": 2, "schedule": "interleaved"}, "rounds of pp=2 (remainder 1)"),
        ({"batch": 12, "micro": 4, "pp": 2, "schedule": "interleaved"}, "Instead: train.micro_batch=3, or"),
    ],
)
def test_too_few_micro_batches_are_told(settings: dict[str, Any], expected: str) -> None:
    found = messages(tasks_per_node=settings["pp"], **settings)
    assert len(found) == 1, found
    assert expected in found[0]


def test_too_few_micro_batches_are_told_with_the_batch_that_was_given() -> None:
    [found] = messages(tasks_per_node=8, pp=4, batch=5)  # shares of 3 and 2 samples
    assert found.startswith("train.global_batch=5: too few micro-batches: a rank's share of 3 samples makes 3")


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({"zero_stage": 2}, "parallel.zero_stage=2: there is no such key. Instead: did you mean"),
        (
            {"gradients": {"type": "bf16"}},
            "parallel.gradients.type=bf16: there is no such key. Instead: did you mean dtype?",
        ),
    ],
)
def test_keys_that_a_plus_forced_in_are_told(parallel: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=re.escape(expected)):
        messages(**parallel)


def test_one_micro_batch_through_gpipe_is_layer_wise_model_parallelism() -> None:
    assert messages(pp=4, batch=8, micro=8, schedule="gpipe") == []


def test_a_pipeline_cuts_a_share_into_four_times_its_degree() -> None:
    assert micro_batches_of(config(batch=64), dp=2, pp=4) == 16
    assert micro_batches_of(config(batch=8), dp=2, pp=4) == 4
    assert micro_batches_of(config(batch=18), dp=2, pp=2) == 5  # 9 samples: 2, 2, 2, 2, 1
    assert micro_batches_of(config(batch=18, schedule="interleaved"), dp=2, pp=2) == 6
    assert micro_batches_of(config(batch=64, micro=3), dp=2, pp=4) == 11
    assert micro_batches_of(config(batch=64), dp=2, pp=1) == 1
    assert micro_batches_of(config(batch=9, micro=2), dp=2, pp=1) == 3


@given(st.integers(1, 300), st.integers(1, 8), st.integers(2, 8), st.sampled_from(["1f1b", "interleaved"]))
def test_micro_batches_hold_the_share_and_fill_the_pipeline_where_they_can(
    batch: int, dp: int, pp: int, schedule: str
) -> None:
    count = micro_batches_of(config(batch=batch, schedule=schedule), dp, pp)
    share = -(-batch // dp)
    assert 1 <= count <= 4 * pp
    assert count >= min(share, pp)
    size = -(-share // count)
    assert (count - (pp if schedule == "interleaved" and share >= pp else 1)) * size < share <= count * size
    if schedule == "interleaved" and share >= pp:
        assert count % pp == 0


def test_degrees_multiply_to_the_ranks() -> None:
    degrees = degrees_of(config(zero=3, replicate=2, tp=2, pp=2), 16)
    assert degrees == {"pp": 2, "cp": 1, "tp": 2, "replicate": 2, "shard": 2}
