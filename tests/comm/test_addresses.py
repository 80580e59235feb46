from __future__ import annotations

import ipaddress
import json
import shutil
import subprocess
import sys

import pytest

from dthpc.comm.addresses import (
    Address,
    candidates,
    host_identity,
    interface_of,
    loopback_interface,
    machine_addresses,
    resolve,
)


def address(interface: str, ip: str, *, running: bool = True, virtual: bool = False) -> Address:
    return Address(interface, ipaddress.ip_address(ip), running, virtual)


def order(addresses: list[Address], *names: str, interface: str | None = None) -> list[str]:
    return [str(found.ip) for found in candidates(addresses, names, interface)]


@pytest.mark.skipif(not shutil.which("ip"), reason="compares with `ip addr`")
def test_the_machines_addresses_are_those_that_ip_shows() -> None:
    told = json.loads(subprocess.run(["ip", "-json", "address"], capture_output=True, check=True).stdout)
    expected = {
        (link["ifname"], entry["local"])
        for link in told
        for entry in link["addr_info"]
        if link["operstate"] != "DOWN" and "linkinfo" not in link
    }
    found = {(one.interface, str(one.ip)) for one in machine_addresses()}
    assert expected
    assert expected <= found


def test_loopback_link_local_and_unspecified_are_never_offered() -> None:
    addresses = [
        address("lo", "127.0.0.1"),
        address("lo", "::1"),
        address("eth0", "fe80::1"),
        address("eth0", "10.0.0.5"),
    ]
    assert order(addresses) == ["10.0.0.5"]
    assert order(addresses[:3]) == []


def test_a_fabric_on_link_local_ipv4_is_taken_where_there_is_nothing_else() -> None:
    fabric = address("hsn0", "169.254.3.1")
    assert order([fabric, address("hsn0", "fe80::1")]) == ["169.254.3.1"]
    assert order([fabric, address("eth0", "10.0.0.5")]) == ["10.0.0.5"]


def test_what_runs_comes_before_what_is_down_real_before_virtual_ipv4_before_ipv6() -> None:
    addresses = [
        address("eth1", "10.1.0.5", running=False),
        address("docker0", "172.17.0.1", virtual=True),
        address("eth0", "fd00::5"),
        address("eth0", "10.0.0.5"),
        address("ib0", "10.2.0.5"),
    ]
    assert order(addresses) == ["10.0.0.5", "10.2.0.5", "fd00::5", "172.17.0.1", "10.1.0.5"]
    assert order(addresses, interface="ib0") == ["10.2.0.5"]


def test_the_address_that_the_schedulers_name_resolves_to_comes_first() -> None:
    # A numeric name resolves to itself, without any name service.
    addresses = [address("eth0", "10.0.0.5"), address("ib0", "10.2.0.5"), address("br0", "10.3.0.5", virtual=True)]
    assert order(addresses, "10.2.0.5") == ["10.2.0.5", "10.0.0.5", "10.3.0.5"]
    assert order(addresses, "10.3.0.5", "10.2.0.5")[:2] == ["10.3.0.5", "10.2.0.5"]
    # One that leads to loopback, elsewhere or nowhere changes nothing.
    assert order(addresses, "localhost", "10.9.9.9", "no-such-host.invalid") == order(addresses)


def test_names_resolve_to_every_address_once() -> None:
    assert resolve(["127.0.0.1", "no-such-host.invalid", "", "127.0.0.1"])[0] == ipaddress.ip_address("127.0.0.1")
    assert len(resolve(["10.0.0.1", "10.0.0.1"])) == 1


def test_the_interface_of_an_address_is_found_through_every_spelling() -> None:
    addresses = [address("lo", "127.0.0.1"), address("eth0", "10.0.0.5"), address("eth1", "fe80::5")]
    assert interface_of("10.0.0.5", addresses) == "eth0"
    assert interface_of("::ffff:10.0.0.5", addresses) == "eth0"
    assert interface_of("fe80::5%eth1", addresses) == "eth1"
    assert interface_of("10.0.0.6", addresses) is None
    assert loopback_interface(addresses) == "lo"


def test_two_processes_of_one_machine_share_its_identity() -> None:
    code = "from dthpc.comm.addresses import host_identity; print(host_identity())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other == host_identity()
