"""Matrices of made-up machines come out as they went in, whatever copying did to them, or are refused."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dthpc.errors import UserError
from dthpc.placement.cpuset import format_cpus
from dthpc.placement.read.nvidia_topo import read_nvidia_topo
from dthpc.placement.topology import Topology

LEVELS = ["PIX", "PXB", "PHB", "NODE", "SYS"]
LEGEND = (
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect (e.g., QPI/UPI)\n"
)


@dataclass(frozen=True)
class Machine:
    gpus: int
    nics: int
    words: dict[frozenset[str], str]
    cpus: list[str]
    numa: list[str]
    memory: list[str]
    named: bool

    @property
    def devices(self) -> list[str]:
        return [f"GPU{n}" for n in range(self.gpus)] + [f"NIC{n}" for n in range(self.nics)]

    def text(self) -> str:
        """As nvidia-smi prints it: tabs, X between blanks, and an empty cell before the last column."""
        lines = ["\t".join(["", *self.devices, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])]
        for name in self.devices:
            cells = [" X " if name == other else self.words[frozenset((name, other))] for other in self.devices]
            number = int(name[3:])
            tail = [self.cpus[number], self.numa[number], "", self.memory[number]] if name[0] == "G" else [""] * 4
            lines.append("\t".join([name, *cells, *tail]))
        legend = "".join(f"  NIC{n}: mlx5_{n}\n" for n in range(self.nics))
        return "\n".join(lines) + "\n" + LEGEND + (f"\nNIC Legend:\n\n{legend}" if self.nics and self.named else "")

    def facts(self) -> dict[str, str]:
        """Everything that a reader may say, by the name of the fact."""
        names = {f"NIC{n}": f"mlx5_{n}" if self.named else f"NIC{n}" for n in range(self.nics)}
        told = {
            " ".join(sorted(names.get(x, x) for x in pair)): self.words[frozenset(pair)]
            for pair in combinations(self.devices, 2)
        }
        for n in range(self.gpus):
            told |= {
                f"cpus {n}": self.cpus[n],
                f"numa {n}": self.numa[n],
                f"memory {n}": self.memory[n].replace("N/A", ""),
            }
        return {name: value for name, value in told.items() if value}


def facts_of(topology: Topology) -> dict[str, str]:
    told = {" ".join(sorted((link.a, link.b))): link.word or "" for link in topology.links or ()}
    for gpu in topology.gpus or ():
        told[f"cpus {gpu.index}"] = format_cpus(gpu.cpus or ())
        told[f"numa {gpu.index}"] = format_cpus(gpu.numa or ())
        told[f"memory {gpu.index}"] = "" if gpu.memory_numa is None else str(gpu.memory_numa)
    return {name: value for name, value in told.items() if value}


@st.composite
def machines(draw: st.DrawFn, blanks: bool = False) -> Machine:
    gpus, nics = draw(st.integers(1, 6)), draw(st.integers(0, 11))
    devices = [f"GPU{n}" for n in range(gpus)] + [f"NIC{n}" for n in range(nics)]
    slow = st.sampled_from(LEVELS)
    fast = st.sampled_from(["NV1", "NV2", "NV12", "NV18", "SYS"])
    words = {frozenset((a, b)): draw(fast if a[0] == b[0] == "G" else slow) for a, b in combinations(devices, 2)}
    lists = ["0-15,32-47", "16-31,48-63", "0-7", "1,3,5,7", "96-127,224-255"] + ([""] if blanks else [])
    nodes = ["0", "1", "3", "0-1"] + ([""] if blanks else [])
    each = lambda options: draw(st.lists(st.sampled_from(options), min_size=gpus, max_size=gpus))  # noqa: E731
    return Machine(gpus, nics, words, each(lists), each(nodes), each(["N/A", "8"]), draw(st.booleans()))


def wrapped(width: int) -> Callable[[str], str]:
    """What a terminal or an editor does with long lines; tabs become blanks."""
    return lambda text: "\n".join(
        piece for line in text.expandtabs(8).split("\n") for piece in textwrap.wrap(line, width, **KEEP) or [""]
    )


KEEP = {"drop_whitespace": False, "break_long_words": False, "break_on_hyphens": False}
HARMLESS = {
    "as it is": lambda text: text,
    "tabs as blanks": lambda text: text.expandtabs(8),
    "indented": lambda text: textwrap.indent(text.expandtabs(8), "    "),
    "coloured": lambda text: f"\x1b[4m{text.replace(chr(10), chr(27) + '[0m' + chr(10), 1)}",
    "from Windows": lambda text: text.replace("\n", "\r\n"),
    "in comments": lambda text: textwrap.indent(text, "# "),
    "quoted": lambda text: textwrap.indent(text, "> "),
    "of srun --label": lambda text: textwrap.indent(text, "0: "),
    "of pdsh": lambda text: textwrap.indent(text, "node07: "),
    "of mpirun": lambda text: textwrap.indent(text, "[1,0]<stdout>:"),
    "spaced out": lambda text: text.replace("\n", "\n\n"),
    "after a prompt": lambda text: f"$ nvidia-smi topo -m\n{text}\n$ exit\n",
    "before a matrix of abilities": lambda text: f"{text}\n \tGPU0\tGPU1\n GPU0\tX\tOK\n GPU1\tOK\tX\n",
}
LOSSY = {
    "one blank": lambda text: re.sub(r"[ \t]+", " ", text),
    "trimmed": lambda text: "\n".join(" ".join(line.split()) for line in text.split("\n")),
    "no tabs": lambda text: text.replace("\t", ""),
    "wrapped at 80": wrapped(80),
    "wrapped at 100": wrapped(100),
    "broken at 80": lambda text: "\n".join(
        line[at : at + 80] for line in text.expandtabs(8).split("\n") for at in range(0, max(len(line), 1), 80)
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
@given(machine=machines(blanks=True))
@settings(max_examples=15, deadline=None)
def test_what_loses_nothing_changes_nothing(name: str, machine: Machine) -> None:
    read = read_nvidia_topo(HARMLESS[name](machine.text()))
    assert facts_of(read) == machine.facts()
    assert read.complete


@pytest.mark.parametrize("name", LOSSY)
@given(machine=machines(blanks=True))
@settings(max_examples=30, deadline=None)
def test_what_loses_tabs_or_lines_is_read_rightly_or_refused(name: str, machine: Machine) -> None:
    try:
        read = read_nvidia_topo(LOSSY[name](machine.text()))
    except UserError:
        return
    assert facts_of(read).items() <= machine.facts().items()
    assert facts_of(read) == machine.facts() or not read.complete


@given(machine=machines(), at=st.integers(0, 10_000))
@settings(max_examples=100, deadline=None)
def test_a_cut_text_tells_nothing_false(machine: Machine, at: int) -> None:
    text = machine.text()
    assume(at < len(text))
    try:
        read = read_nvidia_topo(text[:at])
    except UserError:
        return
    assert nameless(facts_of(read)).items() <= nameless(machine.facts()).items()
    if machine.named and any(nic.name.startswith("NIC") for nic in read.nics or ()):
        assert any("names of" in note for note in read.notes)


def test_a_text_cut_within_the_first_of_several_rows_loses_its_last_value() -> None:
    cut = table(">GPU0>GPU1>CPU Affinity>NUMA Affinity", "GPU0> X >NV1>0")[:-1]  # of 0-15
    assert facts_of(read_nvidia_topo(cut)) == {"GPU0 GPU1": "NV1"}
    assert not read_nvidia_topo(cut).complete


def nameless(facts: dict[str, str]) -> dict[str, str]:
    """The facts with each NIC by its place: a legend may be cut as well."""
    return {" ".join(sorted(name.replace("mlx5_", "NIC").split())): value for name, value in facts.items()}


def table(*rows: str) -> str:
    return "\n".join(row.replace(">", "\t") for row in rows) + "\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (table(">GPU0>GPU1", "GPU0> X >PIX", "GPU1>SYS> X "), "GPU0 to GPU1 is PIX, GPU1 to GPU0 is SYS"),
        (table(">GPU0>GPU1", "GPU0>PIX> X ", "GPU1> X >PIX"), "its X is not in its own column"),
        (table(">GPU0>GPU1", "GPU0>X>FOO", "GPU1>FOO>X"), "'FOO'"),
        (table(">GPU0>GPU1", "GPU0>X>OK", "GPU1>OK>X"), "no distances"),
        (table(">GPU0>GPU1", "GPU0>X>PIX", "GPU0>X>SYS", "GPU1>PIX>X"), "two rows that differ"),
        (table(">GPU0>GPU0", "GPU0>X>PIX", "GPU0>X>PIX"), "twice"),
        ("GPU0 GPU1 GPU2 CPU Affinity\nGPU0 X PIX 0-3\nGPU1 PIX X SYS 0-3\nGPU2 SYS SYS X 4-7\n", "2 cells"),
        ("GPU0 GPU1 CPU Affinity NUMA Affinity GPU NUMA ID\nGPU0 X PIX 1 N/A\nGPU1 PIX X 1 N/A\n", "empty place"),
        (table(">GPU0>NIC0", "GPU0>X>PIX", "NIC0>PIX>X") + "NIC0: a1\nNIC0: b1\n", "names NIC0 twice"),
        (table(">GPU0>CPU Affinity", "GPU0>X>3-0"), "runs|no range"),
        ("GPU0GPU1CPU Affinity\nGPU0 X SYS0-3\nGPU1NV12-3 X 0-3\n", "GPU1"),
        ("GPU utilisation was high\n", "no matrix"),
    ],
)
def test_what_cannot_be_read_without_guessing_is_refused_with_what_was_read(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why) as caught:
        read_nvidia_topo(text, "topo.txt")
    assert caught.value.key == "topo.txt"
    assert caught.value.instead


def test_names_in_the_header_and_the_word_of_old_drivers() -> None:
    text = table(">GPU0>GPU1>mlx4_0>CPU Affinity", "GPU0>X>SOC>SOC>0-5", "GPU1>SOC>X>PHB>6-11", "mlx4_0>SOC>PHB>X")
    read = read_nvidia_topo(text)
    assert read.nearest_nics(read.gpu("GPU0")) == ("SYS", [])
    assert read.nearest_nics(read.gpu(1)) == ("PHB", [read.nic("mlx4_0")])
    link = read.link("GPU1", "GPU0")
    assert link is not None
    assert (link.level, link.word) == ("SYS", "SOC")


def test_a_table_with_rules_may_have_its_columns_in_any_order() -> None:
    text = (
        "| CPU Affinity | | GPU0 | mlx5_0 |\n|---|---|---|---|\n| 8-15 | GPU0 | X | PHB |\n| | mlx5\\_0 | PHB | X |\n"
    )
    read = read_nvidia_topo(text)
    assert read.gpu(0).cpus == frozenset(range(8, 16))
    assert read.nearest_nics(read.gpu(0))[1] == [read.nic("mlx5_0")]


def test_the_second_form_of_the_same_machine_tells_what_nvlink_hides() -> None:
    first = table(">GPU0>GPU1", "GPU0>X>NV12", "GPU1>NV12>X")
    read = read_nvidia_topo(first + "\n" + first.replace("NV12", "PXB"))
    link = read.link("GPU0", "GPU1")
    assert link is not None
    assert (link.level, link.kind, link.lanes) == ("PXB", "nvlink", 12)
    assert read.complete


def test_a_matrix_of_another_machine_is_left_out_and_told() -> None:
    first = table(">GPU0>CPU Affinity", "GPU0>X>0-7")
    second = table(">GPU0>GPU1>CPU Affinity", "GPU0>X>PHB>0-9", "GPU1>PHB>X>0-9")
    read = read_nvidia_topo(first + second)
    assert len(read.gpus or ()) == 1
    assert not read.complete
    assert "several matrices" in read.notes[-1]


def test_a_lost_row_leaves_its_affinity_unknown_and_its_pairs_known() -> None:
    read = read_nvidia_topo(table(">GPU0>GPU1>CPU Affinity", "GPU0>X>PIX>0-3"))
    assert read.gpu(1).cpus is None
    assert read.level(read.gpu(0), read.gpu(1)) == "PIX"
    assert not read.complete


def test_a_text_cut_at_one_width_loses_what_may_be_cut_and_says_so() -> None:
    lines = [
        "\tGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity",
        "GPU0\t X \tSYS\tPIX\tSYS\t0-51,104-155",
        "GPU1\tSYS\t X \tSYS\tPIX\t52-103",
    ]
    lines += [
        "NIC0\tPIX\tSYS\t X \tSYS",
        "NIC1\tSYS\tPIX\tSYS\t X ",
        "",
        "NIC Legend:",
        "",
        "  NIC0: mlx5_0",
        "  NIC1: mlx5_1",
    ]
    read = 0
    for width in range(len(lines[0]) - 12, len(lines[0])):
        try:
            found = read_nvidia_topo("\n".join(line[:width] for line in lines), "x")
        except UserError:
            continue  # cut within a value, of which nobody can tell what it was
        read += 1
        assert not found.complete or not any(gpu.cpus for gpu in found.gpus or ())
        assert found.gpu("GPU0").cpus in (None, frozenset([*range(52), *range(104, 156)]))
        assert [nic.name for nic in found.nearest_nics(found.gpu("GPU1"))[1]] == ["mlx5_1"]
    assert read > 3


def test_devices_that_a_cut_header_lacks_are_known_by_their_own_rows() -> None:
    lines = [
        "\tGPU0\tGPU1\tNIC0  \tNIC1",
        "GPU0\t X \tSYS\tPIX\tSYS",
        "GPU1\tSYS\t X \tSYS\tPIX",
        "NIC0\tPIX\tSYS\t X \tSYS",
    ]
    lines += ["NIC1\tSYS\tPIX\tSYS\t X "]
    found = read_nvidia_topo("\n".join(line[:16] for line in lines), "x")
    assert not found.complete
    assert [nic.name for nic in found.nearest_nics(found.gpu("GPU1"))[1]] == ["NIC1"]
