from __future__ import annotations

from pathlib import Path

import pytest

from dthpc.jobs.collectives.link_rate import interface_rate


def interface(net: Path, name: str, speed: str, hardware: bool = True) -> None:
    (net / name).mkdir()
    (net / name / "speed").write_text(speed)
    if hardware:
        (net / name / "device").mkdir()


@pytest.mark.parametrize(("speed", "rate"), [("200000\n", 200.0), ("1000\n", 1.0), ("-1\n", None), ("", None)])
def test_the_kernel_tells_the_rate_of_hardware_that_is_up(tmp_path: Path, speed: str, rate: float | None) -> None:
    interface(tmp_path, "eth0", speed)
    assert interface_rate("eth0", tmp_path) == rate


def test_devices_without_hardware_make_their_rate_up(tmp_path: Path) -> None:
    interface(tmp_path, "veth0", "10000\n", hardware=False)
    assert interface_rate("veth0", tmp_path) is None
    (tmp_path / "veth0" / "bonding").mkdir()
    assert interface_rate("veth0", tmp_path) == 10.0
    assert interface_rate("absent0", tmp_path) is None
    assert interface_rate(None, tmp_path) is None
    assert interface_rate("lo") is None
