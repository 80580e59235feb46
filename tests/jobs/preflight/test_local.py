"""What one rank measures by itself."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch

from dthpc.jobs.preflight.local import compute, file_system, triad

CPU = torch.device("cpu")


def test_work_that_is_not_counted_shows_as_slowness() -> None:
    torch.set_num_threads(1)
    plain, slowed = (compute(CPU, 0.3, work) for work in (1, 40))
    assert 1e8 < slowed < plain / 4


def test_the_triad_has_the_rate_of_some_memory() -> None:
    assert 1e8 < triad(CPU, 0.1, 4) < 1e13


def test_a_file_system_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    found = file_system(tmp_path, 8, 4)
    assert set(found) == {"free_gb", "write_mb_s", "read_mb_s", "metadata_ms"}
    assert all(value > 0 for value in found.values())
    assert list(tmp_path.iterdir()) == []


def test_a_full_file_system_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    reader = os.fork()
    if reader == 0:  # the limit of a file's size can't be lifted again
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            file_system(tmp_path, 8, 0)
        except OSError:
            os._exit(0 if list(tmp_path.iterdir()) == [] else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1]) == 0


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        file_system(tmp_path / "absent", 1, 1)
