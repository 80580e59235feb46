from __future__ import annotations

import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dthpc.placement import diagnose_node as module
from dthpc.placement.diagnose_node import (
    clock_skew,
    diagnose_node,
    disk_space,
    governor,
    gpu_health,
    gpu_problems,
    gpudirect,
    memlock,
    numa_balancing,
    shared_memory,
)
from tests.placement import nodes


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_this_machine_can_be_asked(tmp_path: Path) -> None:
    for problem in diagnose_node(nodes.node(2, 1), tmp_path):
        assert problem.what
        assert problem.fix


def test_numa_balancing_matters_where_there_are_memory_nodes(tmp_path: Path) -> None:
    write(tmp_path, "proc/sys/kernel/numa_balancing", "1\n")
    assert "numa_balancing=0" in next(numa_balancing(nodes.node(4, 2), tmp_path)).fix
    assert list(numa_balancing(nodes.node(4, 1), tmp_path)) == []
    write(tmp_path, "proc/sys/kernel/numa_balancing", "0\n")
    assert list(numa_balancing(nodes.node(4, 2), tmp_path)) == []


def test_locked_memory_matters_where_there_is_rdma() -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    low = 1 << 16
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (low, hard))
    try:
        assert [problem.severity for problem in memlock(nodes.juwels_booster())] == ["error"]
        assert list(memlock(nodes.node(2, 1))) == []
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


def test_the_module_for_gpudirect(tmp_path: Path) -> None:
    (tmp_path / "sys/module/nvidia").mkdir(parents=True)
    assert [problem.fix for problem in gpudirect(nodes.juwels_booster(), tmp_path)] == [
        "as root: modprobe nvidia-peermem"
    ]
    (tmp_path / "sys/module/nvidia_peermem").mkdir()
    assert list(gpudirect(nodes.juwels_booster(), tmp_path)) == []
    alone = replace(nodes.juwels_booster(), nics=())
    assert list(gpudirect(alone, tmp_path)) == []


def test_processors_kept_slow(tmp_path: Path) -> None:
    write(tmp_path, "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n")
    assert len(list(governor(tmp_path))) == 1
    # Of Intel's own driver that policy is the usual one, and dynamic.
    write(tmp_path, "sys/devices/system/cpu/intel_pstate/status", "active\n")
    assert list(governor(tmp_path)) == []


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [problem.severity for problem in shared_memory(tmp_path / "absent")] == ["error"]
    size = shutil.disk_usage(tmp_path).free
    monkeypatch.setattr(module, "SHM_BYTES", size * 4)
    assert "MiB free" in next(shared_memory(tmp_path)).what
    monkeypatch.setattr(module, "SHM_BYTES", 1)
    assert list(shared_memory(tmp_path)) == []


def test_disk_space_of_a_folder_that_is_not_made_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DISK_BYTES", 1 << 62)
    assert "checkpoints may not fit" in next(disk_space(tmp_path / "not/yet")).why


def test_a_clock_that_differs_from_the_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(clock_skew(tmp_path)) == []
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    assert "3600 s" in next(clock_skew(tmp_path)).what


TABLE = """\
0, 0, 0x0000000000000001, 16, 16, 45
1, 2, 0x0000000000000048, 16, 16, 91
2, [N/A], 0x0000000000000004, 8, 16, 50
"""


def test_what_nvidia_smi_tells_of_gpus() -> None:
    found = [f"{problem.severity}: {problem.what}" for problem in gpu_problems(TABLE)]
    assert found == [
        "error: GPU1 counts 2 memory errors",
        "warning: GPU1 is slowed (hardware slowdown, too hot, 91 °C)",
        "warning: GPU2 has 8 of 16 PCIe lanes",
    ]


def test_a_tool_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert "version mismatch" in next(gpu_health()).what
