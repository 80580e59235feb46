"""Host lists and per-node counts against the answers that Slurm gives."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from dthpc.errors import UserError
from dthpc.slurm.hostlist import compress, expand, expand_tasks_per_node

EXPANSIONS = [
    ("c[1-3]", ["c1", "c2", "c3"]),
    ("c[08-10]", ["c08", "c09", "c10"]),
    ("c[08-010]", ["c08", "c09", "c10"]),
    ("r[1,3]s[2,1]", ["r1s2", "r1s1", "r3s2", "r3s1"]),
    ("c[1-2][5-6]", ["c15", "c16", "c25", "c26"]),
    ("c[7,2],login,c2", ["c7", "c2", "login", "c2"]),
    ("t[0,0,1]", ["t0", "t0", "t1"]),
    ("a[1-2]-ib", ["a1-ib", "a2-ib"]),
    ("a1, b2\tc3\nd4,,e5,", ["a1", "b2", "c3", "d4", "e5"]),
    ("n1.site.example,n2.site.example", ["n1.site.example", "n2.site.example"]),
    ("[0-1]", ["0", "1"]),
    ("fe80::1%eth0", ["fe80::1%eth0"]),
    ("", []),
]

REFUSALS = [
    ("c[", "never closed, at character 2"),
    ("c1]", "without an opening one, at character 3"),
    ("c[1-[2]]", "inside a bracket, at character 5"),
    ("c[]", "empty place"),
    ("c[1,]", "empty place"),
    ("c[1-]", "has no end"),
    ("c[-1]", "has no start"),
    ("c[3-1]", "backwards"),
    ("c[1, 2]", "blank inside a bracket"),
    ("c[a-b]", "neither a number"),
    ("c[1-4/2]", "neither a number"),
    ("c[1-2]!c1", "'!' cannot be part"),
    ("(null)", "'(' cannot be part"),
    ("c[0-99999999999]", "more than 262,144"),
    ("c[0-9999]d[0-9999]", "100,000,000 hosts"),
    ("c[" + "9" * 40 + "]", "neither a number"),
]


@pytest.mark.parametrize(("text", "names"), EXPANSIONS)
def test_expand(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(("text", "why"), REFUSALS)
def test_expand_says_what_is_wrong_and_where(text: str, why: str) -> None:
    with pytest.raises(UserError) as caught:
        expand(text)
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["n9", "n10", "n11"], "n[9-11]"),
        (["n09", "n10"], "n[09-10]"),
        (["n1", "n02"], "n[1,02]"),
        (["n5", "n4", "n4"], "n[5,4,4]"),
        (["n1", "login", "n2"], "n1,login,n2"),
        (["a1-ib", "a2-ib"], "a1-ib,a2-ib"),
        (["n99", "n100", "n0101"], "n[99-100,0101]"),
        (["1", "2"], "[1-2]"),
        ([], ""),
    ],
)
def test_compress_is_undone_by_expand(names: list[str], text: str) -> None:
    assert compress(names) == text
    assert expand(text) == names


def test_compress_refuses_what_no_host_is_called() -> None:
    with pytest.raises(UserError, match="is no host name"):
        compress(["n1", "n[2]"])


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1(x2)", [1, 1]), ("40,8", [40, 8]), (" 2, 1 ", [2, 1])],
)
def test_tasks_per_node(text: str, counts: list[int]) -> None:
    assert expand_tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "x", "4(2x)", "4(x2)3", "4(x0)", "0", "-1", "2,", "4(x999999999)", "1.5"])
def test_tasks_per_node_refuses(text: str) -> None:
    with pytest.raises(UserError, match="is not a count of tasks"):
        expand_tasks_per_node(text)


@pytest.mark.slurm
@pytest.mark.skipif(shutil.which("scontrol") is None, reason="Slurm's commands are not installed")
def test_expand_and_compress_agree_with_scontrol(tmp_path: Path) -> None:
    """Slurm's own answers; only spellings that every Slurm version takes."""
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=localhost\nPartitionName=p Nodes=localhost\n")

    def scontrol(verb: str, text: str) -> list[str]:
        command = ["scontrol", "show", verb, text]
        answer = subprocess.run(
            command,
            env={"SLURM_CONF": str(conf), "PATH": "/usr/bin:/bin"},
            text=True,
            capture_output=True,
            check=True,
            timeout=30,
        )
        return answer.stdout.split()

    for text, names in EXPANSIONS[:7]:
        assert scontrol("hostnames", text) == names
        assert [compress(names)] == scontrol("hostlist", ",".join(names))
