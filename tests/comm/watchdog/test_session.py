from __future__ import annotations

import os
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from torch.distributed import distributed_c10d

from dthpc.comm.watchdog.session import Settings, prepare
from dthpc.comm.watchdog.torch_record import nccl_variables
from dthpc.config.comm import CommConfig
from dthpc.rundir import RunDir


def test_settings_are_those_of_the_configuration_and_the_defaults_where_it_is_older() -> None:
    whole = OmegaConf.create({"timeout_s": 7, "silence_s": 0, "flight_record": 3})
    assert Settings.of(whole) == Settings(7.0, 0.0, 3)
    defaults = OmegaConf.structured(CommConfig)
    assert Settings.of(OmegaConf.create({"timeout_s": 600})) == Settings.of(defaults) == Settings(600.0)


@pytest.mark.parametrize(("backend", "exported"), [("gloo", False), ("cpu:gloo,cuda:nccl", True)])
def test_before_the_ranks_meet_the_time_out_and_the_record_of_nccl_are_set(
    backend: str, exported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name, None))
    names = nccl_variables(Path("x"), 1, 1)
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    attempt = RunDir(tmp_path).attempt(0)
    attempt.path.mkdir(parents=True)
    prepare(backend, attempt, Settings(77.0, record=5))
    assert distributed_c10d.default_pg_timeout.total_seconds() == 77
    assert all((name in os.environ) == exported for name in names)
    if exported:
        assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(attempt.flight / "nccl-rank-")
        assert attempt.flight.is_dir()
        assert int(os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) > 77
