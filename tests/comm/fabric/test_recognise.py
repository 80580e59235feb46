"""What is read from each kind of text, and that what a page or a shell did to it does not matter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dthpc.comm.fabric.decide import decide
from dthpc.comm.fabric.model import NodeNetwork
from dthpc.comm.fabric.recognise import from_path, from_text
from dthpc.errors import UserError
from tests.comm.fabric.texts import ETHER, LO, ifconfig, inet, link, old_ifconfig, wired


def one(text: str) -> NodeNetwork:
    (node,) = from_text(text, "n")
    return node


TEXT = LO + link(2, "eth0", ETHER, inet("10.0.0.1/24", "eth0"), "altname enp1s0") + wired(3, "tun0@NONE", "10.8.0.1/32")


def test_flags_addresses_and_relations_of_ip_addr() -> None:
    node = one(
        TEXT + link(4, "eth1", ETHER, flags="<NO-CARRIER,BROADCAST,SLAVE,UP>", more="master bond0 ", state="DOWN")
    )
    eth0, eth1 = node.interfaces["eth0"], node.interfaces["eth1"]
    assert eth0.flags == ("BROADCAST", "MULTICAST", "UP", "LOWER_UP")
    assert [str(address) for address in eth0.addresses] == ["10.0.0.1/24"]
    assert (eth0.up, eth0.link, eth0.mtu, eth0.altnames) == (True, "ether", 1500, ("enp1s0",))
    assert (eth1.up, eth1.master) == (False, "bond0")
    assert node.interfaces["tun0"].parent == "NONE"
    assert node.missing_masters() == {"bond0": ["eth1"]}


@pytest.mark.parametrize("mark", ["    ", "// ", "# ", "> ", " * ", "\t", "`"])
def test_indents_comments_and_quotation_do_not_matter(mark: str) -> None:
    marked = "".join(f"{mark}{line}\n" for line in TEXT.splitlines())
    assert one(marked).interfaces == one(TEXT).interfaces


def test_colours_and_windows_line_ends_do_not_matter() -> None:
    coloured = TEXT.replace("eth0:", "\x1b[36meth0: \x1b[0m").replace("10.0.0.1", "\x1b[35m10.0.0.1\x1b[0m")
    assert one(coloured.replace("\n", "\r\n")).interfaces == one(TEXT).interfaces


@settings(max_examples=60, deadline=None)
@given(st.integers(min_value=len(LO) + 1, max_value=len(TEXT) - 1))
def test_a_cut_anywhere_invents_nothing(length: int) -> None:
    whole, cut = one(TEXT).interfaces, one(TEXT[:length]).interfaces
    for name, interface in cut.items():
        assert name in whole
        assert interface.flags == whole[name].flags
        assert len(interface.addresses) <= len(whole[name].addresses)


def test_a_head_that_is_cut_is_said() -> None:
    node = one(LO + "2: eth9: <NO-CARRIER,BROADCAST,")
    assert list(node.interfaces) == ["lo"]
    assert not node.complete
    assert "the text is cut within eth9" in node.notes


def test_brief_one_line_and_json_forms_tell_the_same() -> None:
    brief = "lo UNKNOWN 127.0.0.1/8\neth0@if7  UP  10.0.0.1/24 fe80::1/64\n"
    line = "2: eth0    inet 10.0.0.1/24 brd 10.0.0.255 scope global eth0\\       valid_lft forever\n"
    entry = {"ifname": "eth0", "link_index": 7, "flags": ["UP", "LOWER_UP"], "operstate": "UP"}
    entry["addr_info"] = [{"family": "inet", "local": "10.0.0.1", "prefixlen": 24, "label": "eth0"}]
    for text in (brief, line, json.dumps([entry])):
        assert str(one(text).interfaces["eth0"].ipv4[0]) == "10.0.0.1/24"
    assert one(brief).interfaces["eth0"].parent == one(json.dumps([entry])).interfaces["eth0"].parent == "if7"


def test_routes_tell_interfaces_and_their_addresses() -> None:
    node = one("default via 10.0.0.1 dev eth0 proto dhcp metric 100\n10.0.0.0/24 dev eth0 scope link src 10.0.0.5\n")
    assert str(node.interfaces["eth0"].ipv4[0]) == "10.0.0.5/24"
    assert [route.destination.prefixlen for route in node.routes] == [0, 24]
    table = "Destination Gateway Genmask Flags Metric Ref Use Iface\n0.0.0.0 10.0.0.1 0.0.0.0 UG 100 0 0 eth0\n"
    assert one(table).routes[0].interface == "eth0"


def test_both_layouts_of_ifconfig_and_their_aliases() -> None:
    new = one(ifconfig("eth0", "10.0.0.1") + ifconfig("eth0:1", "10.0.0.9"))
    old = one(old_ifconfig("eth0", "10.0.0.1") + old_ifconfig("eth0:1", "10.0.0.9"))
    for node, prefix in ((new, 24), (old, 16)):
        assert list(node.interfaces) == ["eth0"]
        first, second = node.interfaces["eth0"].ipv4
        assert (str(first), first.label) == (f"10.0.0.1/{prefix}", None)
        assert second.label == "eth0:1"
        assert node.interfaces["eth0"].flags == ("UP", "BROADCAST", "RUNNING", "MULTICAST")
    assert one(ifconfig("eth0", "10.0.0.1")[:-60]).complete is False
    assert one("...\n" + ifconfig("eth0", "10.0.0.1")).complete is False


LOG = """\
n1:12:34 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth
n1:12:34 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>
n1:12:34 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
n2:12:34 [0] NCCL INFO NET/Socket : Using [0]eth1:10.0.0.2<0> [1]eth2:fe80::1%eth2<0>
"""


def test_a_log_tells_of_several_nodes_and_is_never_complete() -> None:
    nodes = {node.name: node for node in from_text(LOG, "log")}
    assert sorted(nodes) == ["n1", "n2"]
    assert [(d.name, d.kind) for d in nodes["n1"].devices] == [("mlx5_0", "infiniband"), ("mlx5_1", "roce")]
    assert nodes["n1"].settings == {"NCCL_SOCKET_IFNAME": "eth"}
    assert list(nodes["n2"].interfaces) == ["eth1", "eth2"]
    assert not any(node.complete for node in nodes.values())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("export GLOO_SOCKET_IFNAME='eth0'", {"GLOO_SOCKET_IFNAME": "eth0"}),
        ("NCCL_SOCKET_IFNAME==ens1f0", {"NCCL_SOCKET_IFNAME": "=ens1f0"}),
        ("mpirun -x NCCL_IB_HCA=mlx5_0,mlx5_1 ./a", {"NCCL_IB_HCA": "mlx5_0,mlx5_1"}),
        ('- name: NCCL_SOCKET_IFNAME\n  value: "^lo,docker"', {"NCCL_SOCKET_IFNAME": "^lo,docker"}),
        ("os.environ['GLOO_SOCKET_IFNAME'] = 'eth0'", {"GLOO_SOCKET_IFNAME": "eth0"}),
        ("FI_PROVIDER: efa", {"FI_PROVIDER": "efa"}),
    ],
)
def test_settings_are_read_however_they_are_written(text: str, found: dict[str, str]) -> None:
    assert one(text).settings == found


def test_devices_and_interfaces_of_one_text_go_together() -> None:
    text = LO + wired(2, "ens1", "10.0.0.1/24") + "mlx5_0 port 1 ==> ens1 (Up)\nmlx5_1 port 1 ==> ens2 (Down)\n"
    node = one(text)
    assert [(device.name, device.why_not() is None) for device in node.devices] == [("mlx5_0", True), ("mlx5_1", False)]
    assert node.interfaces["ens1"].flags is not None


def test_slingshot_and_efa_tools_are_read() -> None:
    cxi = one("Device: cxi0\n    Link speed: BS_200G\n    Link state: up\n    Network device: hsn0\n")
    efa = one("provider: efa\n    fabric: efa\n    domain: rdmap16s27-rdm\nprovider: tcp\n    domain: eth0\n")
    assert [(d.name, d.kind, d.nic.interfaces, d.why_not()) for d in cxi.devices] == [
        ("cxi0", "slingshot", ("hsn0",), None)
    ]
    assert [(d.name, d.kind) for d in efa.devices] == [("rdmap16s27", "efa")]


def test_json_of_nodes_and_of_what_went_wrong() -> None:
    nodes = from_text(
        json.dumps({"a": {"eth0": {"inet": ["10.0.0.1/24"]}}, "b": {"eth1": {"inet": "10.0.0.2/24"}}}), "n"
    )
    assert [(node.name, list(node.interfaces)) for node in nodes] == [("a", ["eth0"]), ("b", ["eth1"])]
    wrong = one(json.dumps({"picked": "169.254.7.7", "/etc/hosts": ["127.0.0.1 localhost me"]}))
    assert any("picked: 169.254.7.7 is link-local" in note for note in wrong.notes)
    assert any("/etc/hosts gives me the address 127.0.0.1" in note for note in wrong.notes)


def test_prompts_of_two_hosts_make_two_nodes() -> None:
    text = "me@one:~$ ip a\n" + wired(2, "eth0", "10.0.0.1/24") + "me@two:~$ ip a\n" + wired(2, "eth0", "10.0.0.2/24")
    assert [(node.name, str(node.interfaces["eth0"].ipv4[0].ip)) for node in from_text(text, "n")] == [
        ("one", "10.0.0.1"),
        ("two", "10.0.0.2"),
    ]


def test_what_tells_of_no_network_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"file\.txt: the text tells of no network .*ip addr"):
        from_text("once upon a time", "file.txt")
    with pytest.raises(UserError):
        from_path(tmp_path / "absent")
    with (tmp_path / "log").open("wb") as file:
        file.write(b"a")
        file.truncate(65 << 20)
    with pytest.raises(UserError, match="more than 64 MiB tells of no network"):
        from_path(tmp_path / "log")


def test_an_address_that_is_blotted_out_is_an_address_all_the_same() -> None:
    texts = [
        wired(2, "eth0", "10.x.x.4/24"),
        ifconfig("eth0", "*.*.*.*"),
        "eth0 UP 10.0.xxx.xxx/24\n",
        "n:1:2 [0] NCCL INFO Bootstrap : Using eth0:xx.xx.xx.xx<0>\n",
        json.dumps({"eth0": {"addr": "10.0.0.x", "state": "UP"}}),
    ]
    for text in texts:
        node = one(text)
        assert node.interfaces["eth0"].hidden, text
        assert decide({node.name: node}).nodes[node.name].interface == "eth0"
    assert not one(wired(2, "eth0", "10.0.0.4/24")).interfaces["eth0"].hidden


@pytest.mark.parametrize(
    ("word", "mask"), [("inet adr:", "Masque"), ("indirizzo inet:", "Maschera"), ("inet Adresse:", "Maske")]
)
def test_ifconfig_in_other_languages(word: str, mask: str) -> None:
    text = old_ifconfig("eth0", "10.0.0.1").replace("inet addr:", word).replace("Mask", mask)
    assert str(one(text).interfaces["eth0"].ipv4[0]) == "10.0.0.1/16"


def test_what_web_pages_and_editors_did_to_lines() -> None:
    text = LO + wired(2, "eth0", "10.0.0.1/24")
    escaped = text.replace("<", "&lt;").replace(">", "&gt;")
    for damaged in (escaped, text.replace("\n", "  ")):
        assert {n: i.addresses for n, i in one(damaged).interfaces.items()} == {
            n: i.addresses for n, i in one(text).interfaces.items()
        }


def test_headings_tell_whose_the_networks_are() -> None:
    text = "**node-a:**\n" + wired(2, "eth0", "10.0.0.1/24") + "**node-b:**\n" + wired(2, "eth1", "10.0.0.2/24")
    assert [(node.name, list(node.interfaces)) for node in from_text(text, "n")] == [
        ("node-a", ["eth0"]),
        ("node-b", ["eth1"]),
    ]


def test_json_that_is_cut_gives_its_whole_entries() -> None:
    entry = {"ifname": "eth0", "flags": ["UP", "LOWER_UP"], "addr_info": [{"local": "10.0.0.1", "prefixlen": 24}]}
    node = one(json.dumps([entry, {**entry, "ifname": "eth1"}])[:-20])
    assert list(node.interfaces) == ["eth0"]
    assert not node.complete


def test_facts_in_few_words() -> None:
    nodes = from_text(json.dumps({"a": ["eno1", "lo"], "b": {"eth0": "10.0.0.2/24", "eth1": "10.1.0.2/24, down"}}), "n")
    assert [(node.name, list(node.interfaces)) for node in nodes] == [("a", ["eno1", "lo"]), ("b", ["eth0", "eth1"])]
    assert nodes[1].interfaces["eth1"].up is False


def test_links_of_the_rdma_tool() -> None:
    node = one("link rxe0/1 state ACTIVE physical_state LINK_UP netdev eth0\nlink dev_1/1 state DOWN netdev eth1\n")
    assert [(d.name, d.kind, d.why_not() is None) for d in node.devices] == [
        ("rxe0", "software", False),
        ("dev_1", "roce", False),
    ]
    assert (node.interfaces["eth0"].up, node.interfaces["eth1"].up) == (True, False)


def test_a_text_of_windows_shells_is_read_and_a_binary_file_refused_in_words_of_networks(tmp_path: Path) -> None:
    text = "2: eth0: <BROADCAST,UP,LOWER_UP> mtu 1500 state UP\n    inet 10.0.0.5/24 scope global eth0\n"
    (tmp_path / "wide.txt").write_text(text, encoding="utf-16")
    (node,) = from_path(tmp_path / "wide.txt")
    assert list(node.interfaces) == ["eth0"]
    (tmp_path / "binary").write_bytes(bytes(64))
    with pytest.raises(UserError, match=r"neither a text .* give the output of ip addr"):
        from_path(tmp_path / "binary")


def test_data_that_no_tool_prints_is_passed_over() -> None:
    for junk in ("\n" * 100_000, " " * 100_000 + "\n", "ab:" * 100_000 + "\n", "\t" * 100_000 + "\n"):
        assert list(one(junk + TEXT + junk).interfaces) == ["lo", "eth0", "tun0"]
    for nonsense in ("[" * 100_000, '[{"a":' * 50_000, "GPU0 X " * 100_000, "eth0:" * 100_000):
        with pytest.raises(UserError, match="tells of no network"):
            from_text(nonsense, "n")


def test_json_below_the_prompt_that_it_was_asked_at() -> None:
    printed = json.dumps([{"ifname": "ib0", "operstate": "UP", "addr_info": [{"local": "10.4.0.4", "prefixlen": 16}]}])
    for prompt in ("$ ip -j addr", "me@n1:~$ ip -br -j a", "[root@n1 ~]# ip -json address"):
        assert str(one(f"{prompt}\n{printed}\n").interfaces["ib0"].addresses[0]) == "10.4.0.4/16"
    assert list(one("$ ip -br a\nlo UNKNOWN 127.0.0.1/8\neth0 UP 10.0.0.1/24\n").interfaces) == ["lo", "eth0"]


def test_only_an_answer_of_ip_route_get_is_evidence_for_an_interface() -> None:
    both = wired(2, "ens3", "10.0.0.9/24") + wired(3, "hsn0", "10.9.0.9/16")
    table = "default via 10.0.0.1 dev ens3 proto dhcp metric 100\n169.254.169.254 via 10.0.0.2 dev ens3 proto dhcp\n"
    answer = "10.0.0.7 dev ens3 src 10.0.0.9 uid 1000\n    cache\n"
    chosen = [decide({"n": one(LO + both + routes)}).nodes["n"].interface for routes in (table, answer)]
    assert chosen == ["hsn0", "ens3"]


def test_variables_of_a_pods_description() -> None:
    text = "env:\n- name: GLOO_SOCKET_IFNAME\n  value: eth0,eth1\n- name: NCCL_IB_DISABLE\n  value: '1'\n"
    assert one(text).settings == {"GLOO_SOCKET_IFNAME": "eth0,eth1", "NCCL_IB_DISABLE": "1"}


def test_the_link_of_a_slingshot_card_is_that_of_its_interface() -> None:
    text = "".join(
        f"Device: cxi{n}\n    Network device: hsn{n}\n    Link speed: BS_200G\n    Link state: {state}\n"
        for n, state in enumerate(("up", "down"))
    )
    choice = decide({"n": one(text)}).nodes["n"]
    assert (choice.interface, choice.devices) == ("hsn0", ("cxi0",))


def test_thousands_of_addresses_are_read_once_each() -> None:
    many = [f"10.{n >> 8 & 255}.{n & 255}.1" for n in range(4_000)]
    texts = [
        wired(2, "eth0", f"{many[0]}/32") + "".join(f"    {inet(f'{each}/32', 'eth0')}\n" for each in many[1:]),
        "eth0: flags=67<UP,RUNNING>  mtu 1500\n" + "".join(f"\tinet {each} netmask 0xffffffff\n" for each in many),
        "".join(f"NCCL INFO Bootstrap : Using eth0:{each}<0>\n" for each in (*many, *many)),
    ]
    for text in texts:
        assert [str(each.ip) for each in one(text).interfaces["eth0"].addresses] == many
