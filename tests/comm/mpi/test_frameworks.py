"""What torch builds on a process group works on this one, and gives what Gloo gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import mpi_ranks, ranks
from tests.comm.mpi import framework_tasks as tasks


@pytest.mark.parametrize("kind", [tasks.data_parallel, tasks.fully_sharded, tasks.tensor_parallel])
@pytest.mark.parametrize("size", [2, 4])
def test_training_gives_what_one_process_gives(kind: Callable[[int], Any], size: int) -> None:
    expected = tasks.alone(size)
    on_mpi, on_gloo = mpi_ranks.pool().run(size, kind), ranks.pool().run(size, kind)
    for found in (*on_mpi, *on_gloo):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    for other in on_mpi[1:]:
        assert all(torch.equal(other[name], on_mpi[0][name]) for name in expected), "ranks differ"


def test_a_pipeline_gives_what_it_gives_on_gloo() -> None:
    on_mpi, on_gloo = mpi_ranks.pool().run(3, tasks.pipeline), ranks.pool().run(3, tasks.pipeline)
    assert len(on_mpi[2][1]) == 4
    for (mine, losses), (theirs, other_losses) in zip(on_mpi, on_gloo, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert losses == other_losses


def test_a_checkpoint_is_saved_and_loaded(tmp_path: Path) -> None:
    assert mpi_ranks.pool().run(4, tasks.checkpoint, str(tmp_path / "saved")) == [[True, False]] * 4
