from __future__ import annotations

from typing import Any

import pytest
import torch

from dthpc.errors import UserError
from dthpc.parallel.parts import whole_parts
from dthpc.parallel.sharding import ShardOptions, Shards
from tests.parallel.sharding import powersgd_tasks, tasks
from tests.ranks import pool


def test_powersgd_approximates_and_repeats_itself_after_a_break() -> None:
    (one, errors), (other, _) = pool().run(2, powersgd_tasks.powersgd, 2, 6, None)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert max(errors[:2]) < 1e-6
    assert min(errors[2:]) > 1e-4
    for resume_at in (1, 4):
        (again, _), _ = pool().run(2, powersgd_tasks.powersgd, 2, 6, resume_at)
        assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    (_, closer), _ = pool().run(2, powersgd_tasks.powersgd, 6, 6, None)
    assert sum(closer[2:]) < sum(errors[2:])


def test_powersgd_refuses_zero() -> None:
    model: Any = tasks.Branches()
    with pytest.raises(UserError, match=r"parallel\.gradients\.powersgd_rank=2: "):
        Shards([model], whole_parts([model]), tasks.mesh_of(), ShardOptions(zero=1, powersgd_rank=2))
