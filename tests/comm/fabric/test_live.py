"""This machine as the kernel tells it, and a recorded sysfs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dthpc.comm.fabric.classify import why_not
from dthpc.comm.fabric.live import read_network
from tests.comm.machines import Machine
from tests.comm.machines import why_not as why_no_machines

namespaces = pytest.mark.skipif(why_no_machines() is not None, reason=str(why_no_machines()))


def test_this_machine_has_loopback_with_its_prefix_and_what_the_user_exported() -> None:
    env = {"NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "=mlx5_0", "HOME": "/"}
    node = read_network("me", env, placed={"NCCL_IB_HCA"})
    assert "127.0.0.1/8" in [str(address) for address in node.interfaces["lo"].ipv4]
    assert why_not(node.interfaces["lo"], node) == "loopback"
    assert node.settings == {"NCCL_DEBUG": "INFO"}
    assert node.live


SHOW = """
from dthpc.comm.fabric.live import read_network
node = read_network("n", {})
for each in node.interfaces.values():
    print(each.name, each.up, each.master, each.parent in node.interfaces, each.kind, *map(str, each.ipv4))
print([(str(route.destination), route.interface) for route in node.routes])
"""


@namespaces
def test_masters_kinds_carriers_and_routes_are_read(tmp_path: Path) -> None:
    with Machine("alpha", tmp_path) as alpha:
        alpha.add("eth0", "10.0.0.1/24")
        alpha.add_bridge("br0", "10.5.0.1/16")
        alpha.ip("link", "set", "eth0-end", "master", "br0")
        alpha.add("eth1", "10.1.0.1/24")
        alpha.ip("link", "set", "eth1", "down")
        process = alpha.popen(sys.executable, "-c", SHOW)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    *lines, routes = output.splitlines()
    shown = {line.split()[0]: line.split()[1:] for line in lines}
    assert shown["eth0"] == ["True", "None", "True", "None", "10.0.0.1/24"]
    assert shown["eth0-end"][:2] == ["True", "br0"]
    assert shown["br0"] == ["True", "None", "False", "bridge", "10.5.0.1/16"]
    assert shown["eth1"][0] == "False"
    assert "('10.0.0.0/24', 'eth0')" in routes


def write(root: Path, **files: str) -> None:
    for path, text in files.items():
        file = root / path.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_rdma_devices_in_software_are_seen_and_left(tmp_path: Path) -> None:
    base = "sys__class__infiniband__rxe0__ports__1__"
    write(tmp_path, **{f"{base}state": "4: ACTIVE\n", f"{base}link_layer": "Ethernet\n", f"{base}rate": "10 Gb/sec\n"})
    (device,) = read_network("n", {}, root=str(tmp_path)).devices
    assert (device.name, device.kind) == ("rxe0", "software")
    assert device.why_not() == "RDMA in software (Soft-RoCE or Soft-iWARP)"


def test_reading_a_network_loads_no_torch() -> None:
    code = "import sys, dthpc.comm.fabric.report, dthpc.comm.check; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
