"""What stands around a text goes; nothing of the text itself does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dthpc.errors import UserError
from dthpc.placement.read.recognise import read_text
from dthpc.placement.read.wrapping import unwrap

NUMACTL = """\
available: 2 nodes (0-1)
node 0 cpus: 0 1 2 3
node 0 size: 1000 MB
node 1 cpus: 4 5 6 7
node 1 size: 2000 MB
node distances:
node   0   1
  0:  10  21
  1:  21  10
"""
IBSTAT = """\
CA 'mlx5_0'
\tCA type: MT4129
\tNumber of ports: 1
\tPort 1:
\t\tState: Active
\t\tPhysical state: LinkUp
\t\tRate: 400
\t\tLink layer: InfiniBand
"""
ROCM = """\
GPU[0]\t\t: (Topology) Numa Node: 1
GPU[0]\t\t: (Topology) Numa Affinity: 1
GPU[1]\t\t: (Topology) Numa Node: 0
GPU[1]\t\t: (Topology) Numa Affinity: 0
"""
LSCPU = '{"lscpu": [{"field": "CPU(s):", "data": "8"}, {"field": "NUMA node0 CPU(s):", "data": "0-7"}]}\n'
NCCL = (
    '<system version="1">\n <cpu numaid="0" affinity="00ff" arch="x86_64">\n'
    '  <pci busid="0000:3b:00.0" class="0x030200"><gpu dev="0" sm="90"/></pci>\n </cpu>\n</system>\n'
)


def each_line(prefix: str) -> Callable[[str], str]:
    return lambda text: "".join(f"{prefix}{line}\n" for line in text.rstrip("\n").split("\n"))


WRAPS: dict[str, Callable[[str], str]] = {
    "pdsh": each_line("node01: "),
    "srun --label": each_line(" 3: "),
    "srun --label of equal tasks": lambda text: each_line("0: ")(text) + each_line("1: ")(text),
    "mpirun": each_line("[1,0]<stdout>:"),
    "syslog": each_line("May 01 12:00:00 node01 tool[123]: "),
    "time stamps": each_line("2024-05-01T12:00:00.123Z "),
    "time stamps of hosts": each_line("[2024-05-01 12:00:00] node01: "),
    "a mail": each_line("> "),
    "a script": each_line("# "),
    "Windows": lambda text: text.replace("\n", "\r\n"),
    "a page": lambda text: "<pre><code>\n" + text.replace("<", "&lt;").replace(">", "&gt;") + "</code></pre>\n",
}
AROUND: dict[str, Callable[[str], str]] = {
    "a fence": lambda text: f"Here it is:\n```console\n{text}```\nThanks!\n",
    "prompts": lambda text: f"[ada@login ~]$ srun tool\n{text}[ada@login ~]$ exit\n",
    "a warning": lambda text: f"WARNING: something is odd\n{text}",
}
TEXTS = {"numactl": NUMACTL, "ibstat": IBSTAT, "rocm-smi": ROCM}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_labels_and_quotes_change_nothing(text: str, wrap: str) -> None:
    assert read_text(WRAPS[wrap](text), "x") == read_text(text, "x")


@pytest.mark.parametrize("wrap", AROUND)
@pytest.mark.parametrize("text", [LSCPU, NCCL, NUMACTL, IBSTAT], ids=["json", "xml", "numactl", "ibstat"])
def test_lines_around_change_nothing(text: str, wrap: str) -> None:
    assert read_text(AROUND[wrap](text), "x") == read_text(text, "x")


def test_outputs_of_different_nodes_are_not_mixed() -> None:
    other = NUMACTL.replace("2000", "4000")
    with pytest.raises(UserError, match=r"of several nodes or tasks \(n1, n2\), which say different things"):
        read_text(each_line("n1: ")(NUMACTL) + each_line("n2: ")(other), "x")


@pytest.mark.parametrize(
    "text", [NUMACTL, IBSTAT, ROCM, LSCPU, NCCL, "", "CPU(s): 8\nThread(s) per core: 2\n", "a: 1\n"]
)
def test_what_is_not_wrapped_stays_as_it_is(text: str) -> None:
    assert unwrap(text) == text
