from __future__ import annotations

import os
from pathlib import Path

import pytest

from dthpc.comm.watchdog.torch_record import TorchRecord, export, nccl_variables
from tests.comm.watchdog import tasks
from tests.ranks import pool


def test_what_cxx_calls_is_known_from_torch() -> None:
    for own, torchs in pool().run(2, tasks.in_cxx):
        gradients = 11 * 13 + 13
        assert not any(call["shape"] == [gradients] and call["operation"] == "allreduce" for call in own)
        last = [call for call in torchs if call["operation"] == "all_reduce"][-1]
        assert (last["shape"], last["state"]) == ([gradients], "finished")


def test_a_time_out_reaches_the_groups_that_nobody_gave_one() -> None:
    for seen in pool().run(2, tasks.timeouts, 1234.0):
        assert seen == [1234.0] * 3
    pool().run(2, tasks.timeouts, 1800.0)


def test_variables_that_the_user_exported_stay_whichever_name_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = nccl_variables(Path("/run/flight/nccl-rank-"), 600, 1000)
    for name in variables:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "7")
    monkeypatch.setenv("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "9")
    new = export(variables)
    try:
        assert os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "9"
        assert "TORCH_FR_BUFFER_SIZE" not in os.environ
        assert new["TORCH_FR_DUMP_TEMP_FILE"] == new["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == "/run/flight/nccl-rank-"
        assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    finally:
        for name in new:
            del os.environ[name]


def test_the_monitor_of_nccl_leaves_time_for_the_time_out() -> None:
    assert int(nccl_variables(Path("x"), 3600, 10)["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) > 3600


def test_a_version_of_torch_without_a_record_has_none() -> None:
    record = TorchRecord()
    record._dump = None
    assert record.read() == []
    assert record.overdue(0.0) is None
