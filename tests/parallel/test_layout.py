from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from dthpc.errors import UserError
from dthpc.parallel.layout import Layout, check
from tests.parallel import tasks
from tests.ranks import pool


def config(nodes: Any = 1, tasks_per_node: int = 4, batch: int = 8, micro: int | None = None, **parallel: Any) -> Any:
    return OmegaConf.create(
        {
            "parallel": {"dp": None, "tp": 1, "pp": 1, "zero": 0, **parallel},
            "train": {"global_batch": batch, "micro_batch": micro},
            "cluster": {"nodes": nodes, "tasks_per_node": tasks_per_node},
        }
    )


def test_data_parallel_fills_the_ranks() -> None:
    layout = Layout.resolve(config(), 4)
    assert (layout.dp, layout.describe()) == (4, "dp=4")
    assert [layout.dp_rank(rank) for rank in range(4)] == [0, 1, 2, 3]


def test_a_degree_that_is_not_the_number_of_ranks_is_refused_with_the_numbers() -> None:
    with pytest.raises(UserError) as caught:
        Layout.resolve(config(dp=3), 4)
    assert "multiply to 3 (dp=3), but there are 4 ranks" in str(caught.value)
    assert "parallel.dp=4" in str(caught.value)


@pytest.mark.parametrize(
    ("degree", "words"),
    [
        ({"tp": 2}, "parallel.tp=2: tensor parallelism is not available"),
        ({"pp": 4}, "parallel.pp=4: pipeline parallelism is not available"),
        ({"zero": 1}, "parallel.zero=1: sharding"),
        ({"cp": 2}, "parallel.cp=2: context"),
    ],
)
def test_degrees_of_axes_to_come_are_refused(degree: dict[str, int], words: str) -> None:
    errors = check(config(**degree))
    assert [words in error.message() for error in errors] == [True]


def test_several_unavailable_axes_are_told_together() -> None:
    assert len(check(config(tp=2, pp=2, zero=3))) == 3


def test_every_rank_needs_work() -> None:
    assert check(config(batch=4)) == []
    (error,) = check(config(batch=3))
    assert "3 samples leaves 1 of the 4" in error.message()


def test_a_range_of_nodes_is_checked_at_both_ends() -> None:
    assert check(config(nodes="1-2", batch=8)) == []
    (error,) = check(config(nodes="1-4", batch=8))
    assert "8 of the 16" in error.message()
    (error,) = check(config(nodes="1-2", dp=4))
    assert "there are 8 ranks" in error.message()


def test_a_micro_batch_must_fit_a_ranks_share() -> None:
    assert check(config(batch=9, micro=3)) == []
    (error,) = check(config(batch=9, micro=4))
    assert "share is 3 samples" in error.message()


def test_the_mesh_has_the_named_axis() -> None:
    facts = pool().run(3, tasks.mesh_facts, 3)
    assert facts == [(("dp",), 3, rank) for rank in range(3)]
