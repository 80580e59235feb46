from __future__ import annotations

import pytest
import torch
from torch import nn

from dthpc.parallel.sharding.units import find_blocks
from tests.parallel.sharding import tasks, unit_tasks
from tests.ranks import RankFailed, pool


def test_blocks_are_what_containers_hold() -> None:
    model = tasks.Net()
    assert list(find_blocks(model)) == list(model.blocks)
    nested = nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))]), nn.Linear(2, 2))
    assert list(find_blocks(nested)) == [nested[0][0], nested[0][1][0], nested[1]]  # type: ignore[index]


@pytest.mark.parametrize("how", ["plain", "inside", "outside"])
def test_blocks_are_whole_only_around_their_passes(how: str) -> None:
    for seen, gradients, expected, left in pool().run(2, unit_tasks.gathered, how):
        # Forward: a block and the next one. Backward: a block and the one before.
        assert max(seen) == 2
        assert left == 0
        torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-6)


def test_a_parameter_that_is_not_gathered_reads_as_nan() -> None:
    for inside, outside in pool().run(2, unit_tasks.reads):
        assert not inside
        assert outside


def test_a_backward_pass_outside_is_refused() -> None:
    with pytest.raises(RankFailed, match=r"outside of `Shards\.backward`"):
        pool().run(2, unit_tasks.backward_outside)
