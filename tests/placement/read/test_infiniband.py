from __future__ import annotations

import pytest

from dthpc.errors import UserError
from dthpc.placement.read.infiniband import read_ibdev2netdev, read_ibstat, read_ibstatus, read_ibv_devinfo

IBSTAT = """CA 'mlx5_0'
	CA type: MT4129
	Number of ports: 1
	Port 1:
		State: {state}
		Physical state: LinkUp
		Rate: 400
		Link layer: InfiniBand
CA 'mlx5_bond_1'
	CA type: MT41692
	Port 1:
		State: Active
		Physical state: LinkUp
		Rate: 200
		Link layer: Ethernet
"""
DEVINFO = """hca_id:	{name}
	transport:			{transport}
	vendor_part_id:			4126
	phys_port_cnt:			2
	Device ports:
		port:	1
			state:			PORT_ACTIVE (4)
			active_width:		4X (2)
			active_speed:		25.0 Gbps (32)
			phys_state:		LINK_UP (5)
			link_layer:		Ethernet

		port:	2
			state:			PORT_DOWN (1)
			link_layer:		Ethernet
"""


@pytest.mark.parametrize(("state", "usable"), [("Active", True), ("Down", False), ("Initializing", False)])
def test_ibstat(state: str, usable: bool) -> None:
    read = read_ibstat(IBSTAT.format(state=state))
    one, two = read.nics or ()
    assert (one.name, one.kind, one.usable, one.model) == ("mlx5_0", "infiniband", usable, "MT4129")
    assert [(port.rate_gbps, port.physical) for port in two.ports or ()] == [(200.0, "linkup")]
    assert (two.name, two.kind) == ("mlx5_bond_1", "roce")
    assert read.complete


@pytest.mark.parametrize("ending", ["CA type: MT41692", "Rate: 200"])
def test_ibstat_that_is_cut_says_within_which_adapter(ending: str) -> None:
    text = IBSTAT.format(state="Active")
    read = read_ibstat(text[: text.rindex(ending)])
    assert not read.complete
    assert "mlx5_bond_1" in read.notes[0]
    assert read.nic("mlx5_0").usable


def test_ibstatus_of_two_ports() -> None:
    block = (
        "Infiniband device 'mlx4_0' port {} status:\n\tstate:\t\t {}\n\tphys state:\t 5: LinkUp\n"
        "\trate:\t\t 40 Gb/sec (4X QDR)\n\tlink_layer:\t InfiniBand\n\n"
    )
    [nic] = read_ibstatus(block.format(1, "1: DOWN") + block.format(2, "4: ACTIVE")).nics or ()
    assert [(port.number, port.state, port.rate_gbps) for port in nic.ports or ()] == [
        (1, "down", 40.0),
        (2, "active", 40.0),
    ]
    assert nic.usable


@pytest.mark.parametrize(
    ("name", "transport", "kind", "usable"),
    [
        ("mlx4_0", "InfiniBand (0)", "roce", True),
        ("mlx5_an0", "InfiniBand (0)", "roce", False),
        ("siw0", "iWARP (1)", "software", False),
        ("rxe0", "InfiniBand (0)", "software", False),
        ("iwp1", "iWARP (1)", "iwarp", False),
        ("rdmap16s27", "unspecified (4)", "efa", True),
    ],
)
def test_ibv_devinfo_tells_real_adapters_from_others(name: str, transport: str, kind: str, usable: bool) -> None:
    [nic] = read_ibv_devinfo(DEVINFO.format(name=name, transport=transport)).nics or ()
    assert (nic.name, nic.kind, nic.usable) == (name, kind, usable)
    first, second = nic.ports or ()
    assert (first.state, first.rate_gbps, first.physical) == ("active", 100.0, "linkup")
    assert (second.state, second.rate_gbps) == ("down", None)


def test_an_infiniband_port_is_not_down_because_its_interface_is() -> None:
    text = "mlx5_0 port 1 ==> ibp26s0 (Down)\nmlx5_1  port  1  ==>  eth1   (Up)  # a comment\n"
    text += "mlx5_2 port 1 ==> eth2 (Down)\n"
    ib, up, down = read_ibdev2netdev(text).nics or ()
    assert (ib.kind, ib.up, ib.interfaces, ib.interfaces_up) == ("infiniband", None, ("ibp26s0",), ())
    assert (up.kind, up.up, up.interfaces_up) == ("roce", True, ("eth1",))
    assert down.up is False


def test_the_verbose_form_has_bus_ids_and_states_of_ports() -> None:
    text = "0000:02:00.1 mlx5_1 (MT4115 - X) CX456A fw 12.23 port 1 (ACTIVE) ==> ib1 (Down)\n"
    text += "0000:02:00.5 mlx5_2 (MT4116 - NA)  fw 12.23 port 1 (DOWN  ) ==> ib2 (Down)\n"
    one, two = read_ibdev2netdev(text).nics or ()
    assert (one.bus_id, one.up) == ("0000:02:00.1", True)
    assert two.up is False


@pytest.mark.parametrize("reader", [read_ibstat, read_ibstatus, read_ibv_devinfo, read_ibdev2netdev])
def test_a_text_without_adapters_is_refused(reader: object) -> None:
    with pytest.raises(UserError, match="save the output"):
        reader("ibpanic: [1] main: stat of IB device failed\n")  # type: ignore[operator]


def test_a_text_that_was_pasted_twice_is_read_once_and_two_different_ones_are_refused() -> None:
    one = "CA 'mlx5_0'\n\tPort 1:\n\t\tState: Active\n\t\tLink layer: InfiniBand\n"
    assert read_ibstat(one + one) == read_ibstat(one)
    with pytest.raises(UserError, match="mlx5_0 stands there twice and differs"):
        read_ibstat(one + one.replace("Active", "Down"))


def test_a_wrapped_line_of_ibdev2netdev_names_no_adapter() -> None:
    with pytest.raises(UserError, match=r"a line does not begin with its adapter .*X-4 QSFP"):
        read_ibdev2netdev("0000:05:00.0 mlx5_0 (MT4115 - X) Connect\nX-4 QSFP port 1 (ACTIVE) ==> ib0 (Up)\n")
