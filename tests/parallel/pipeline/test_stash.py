from __future__ import annotations

import pytest
import torch

from dthpc.errors import UserError
from dthpc.parallel.parts import Part
from dthpc.parallel.pipeline.stash import check_stash
from tests.parallel.pipeline import tasks
from tests.parallel.pipeline.tasks import Case
from tests.ranks import pool


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_micro_batch_meets_the_weights_that_pipedream_says(ranks: int, recompute: bool) -> None:
    case = Case("pipedream", rows=(2, 1, 2, 2, 2, 2), recompute=recompute)
    (expected,) = pool().run(1, tasks.plain_stale, case, ranks, 2)
    outcomes = pool().run(ranks, tasks.piped_with_stash, case, ranks, 2)
    found = {name: value for parameters, _ in outcomes for name, value in parameters.items()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-7)
    # When a rank updates, the micro-batches under way need their old weights still.
    assert [versions for _, versions in outcomes] == [ranks - 1 - rank for rank in range(ranks)]


def test_staleness_changes_the_result() -> None:
    case = Case("pipedream", rows=(2,) * 4)
    (stale,) = pool().run(1, tasks.plain_stale, case, 4, 1)
    (fresh,) = pool().run(1, tasks.plain_stale, case, 1, 1)
    assert (stale["embed.weight"] - fresh["embed.weight"]).abs().max() > 1e-4


def test_a_weight_tied_between_ranks_is_refused() -> None:
    check_stash([Part("a", (2,))])
    with pytest.raises(UserError, match=r"parallel\.schedule=pipedream: embed is one weight on two pipeline ranks"):
        check_stash([Part("embed", (2,), tied_stage_rank=1)])
