from __future__ import annotations

import os
from pathlib import Path

import pytest

from dthpc.placement.read.live import read_live
from dthpc.placement.read.nvml import read_nvml

CSV = "index, pci.bus_id, uuid, name, memory.total [MiB]\n0, 00000000:01:00.0, GPU-a, X, 10 MiB\n"


def test_this_machine_as_this_process_may_use_it() -> None:
    node = read_live()
    assert node.allowed == frozenset(os.sched_getaffinity(0))
    assert node.usable_cpus() == node.allowed
    assert node.host
    assert node.sources[0].kind == "sysfs"


def test_fewer_cpus_are_allowed_to_a_bound_process() -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert read_live(tools=False).allowed == {min(before)}
    finally:
        os.sched_setaffinity(0, before)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root whose /sys has one CPU and a GPU, and a directory of tools."""
    (tmp_path / "sys/devices/system/cpu/cpu0").mkdir(parents=True)
    (tmp_path / "sys/devices/system/cpu/online").write_text("0")
    device = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "class").write_text("0x030200")
    (device / "vendor").write_text("0x10de")
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return tmp_path


def test_a_tool_adds_what_it_knows_and_a_failing_one_a_note(machine: Path) -> None:
    tool = machine / "bin/nvidia-smi"
    tool.write_text(
        f'#!/bin/sh\n[ "$1" = topo ] && exit 9\n[ "$1" = -L ] && echo nothing && exit\ncat <<\'END\'\n{CSV}END\n'
    )
    tool.chmod(0o755)
    node = read_live(root=machine)
    assert [(gpu.key, gpu.uuid, gpu.visible) for gpu in node.gpus or ()] == [("GPU0", "GPU-a", True)]
    assert any("topo -m failed" in note for note in node.notes)
    assert any("lists no GPU" in note for note in node.notes)


def test_a_missing_tool_is_told(machine: Path) -> None:
    node = read_live(root=machine)
    assert [gpu.key for gpu in node.gpus or ()] == ["0000:01:00.0"]
    assert any("nvidia-smi is not installed" in note for note in node.notes)


def test_nvml_answers_only_where_there_is_a_gpu() -> None:
    node = read_nvml()
    assert node is None or node.gpus
