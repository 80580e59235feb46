"""The folder that holds the runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from dthpc.launch.storage import file_system, storage_verdicts
from tests.launch.sites import make_config


def test_a_folder_that_will_be_made(tmp_path: Path) -> None:
    (verdict,) = storage_verdicts(make_config(tmp_path / "a" / "b", kind="local"))
    assert verdict.status == "ok"
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("root", ["/proc/x", "/dev/null/x", "/dev/null"])
def test_a_folder_that_cannot_be_made(root: str) -> None:
    (verdict,) = storage_verdicts(make_config(root))
    assert verdict.error is not None
    assert (verdict.error.key, verdict.error.value) == ("run.root", root)


def test_a_file_system_of_one_machine_is_a_warning_for_slurm_alone() -> None:
    (verdict,) = storage_verdicts(make_config("/dev/shm/runs"))
    assert verdict.status == "warning"
    assert "tmpfs" in verdict.note
    (verdict,) = storage_verdicts(make_config("/dev/shm/runs", kind="local"))
    assert verdict.status == "ok"


def test_the_kind_of_file_system(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "a / ext4 rw\nb /net nfs4 rw\nc /net/my\\040disk lustre rw\nd /net/x tmpfs rw\ne /net/x ceph rw\n"
    )
    kinds = [
        file_system(Path(path), mounts)
        for path in ("/home/me", "/net/runs", "/net/my disk/runs", "/net/x/y", "/network")
    ]
    assert kinds == ["ext4", "nfs4", "lustre", "ceph", "ext4"]
    assert file_system(Path("/"), tmp_path / "absent") == "unknown"
