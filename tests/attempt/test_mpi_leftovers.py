from __future__ import annotations

import os
from pathlib import Path

from dthpc.attempt.mpi_leftovers import remove_leftovers, step_hash


def test_the_hash_is_that_of_the_names_that_mpich_gives() -> None:
    assert f"mpich_shm_{step_hash('3.0'):x}_0" == "mpich_shm_c141a9dc_0"  # as MPICH 5.0.2 named it for step 3.0


def test_what_is_older_than_the_step_goes_and_nothing_else(tmp_path: Path) -> None:
    old, new, other = (tmp_path / f"mpich_shm_{name}" for name in ("c141a9dc_0", "c141a9dc_1", "c141a9dd_0"))
    for path in (old, new, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (1e9, 1e9))
    assert remove_leftovers({}, tmp_path) == []
    assert remove_leftovers({"PMI_JOBID": "3.0"}, tmp_path) == [old]
    assert sorted(tmp_path.iterdir()) == [new, other]
