"""`Key=Value` records, whose values may hold anything."""

from __future__ import annotations

import pytest

from dthpc.errors import UserError
from dthpc.slurm.keyvalues import parse_assignments, parse_records

SPREAD = """\
[me@login ~]$ scontrol show job 7
JobId=7 JobName=my net lr=1 big
   UserId=me(1) GroupId=me(1)
   JobState=RUNNING Reason=None Dependency=(null)
   Command=/home/me/go.sh lr=1 steps=2
   Comment=size=big for you
   WorkDir=/home/me/my work
"""


def test_values_with_blanks_and_equals_signs() -> None:
    (record,) = parse_records(SPREAD, "JobId")
    assert record["JobName"] == "my net lr=1 big"
    assert record["UserId"] == "me(1)"
    assert record["Reason"] == "None"
    assert record["Command"] == "/home/me/go.sh lr=1 steps=2"
    assert record["Comment"] == "size=big for you"
    assert record["WorkDir"] == "/home/me/my work"


def test_a_one_liner_says_the_same() -> None:
    line = (
        "JobId=7 JobName=my net UserId=me(1) GroupId=me(1) Priority=1 Nice=0 Account=a QOS=q JobState=PENDING "
        "Reason=Priority Dependency=(null) Requeue=1 Restarts=0 Command=/go.sh lr=1 WorkDir=/w k Comment=a=1 b=2 "
        "StdErr=/w k/7.log StdIn=/dev/null StdOut=/w k/7.log Power= "
    )
    (record,) = parse_records(line, "JobId")
    assert record["JobName"] == "my net"
    assert record["Command"] == "/go.sh lr=1"
    assert record["WorkDir"] == "/w k"
    assert record["Comment"] == "a=1 b=2"
    assert record["StdErr"] == "/w k/7.log"
    assert record["Power"] == ""


def test_several_records_colour_codes_and_carriage_returns() -> None:
    text = "\x1b[1mNodeName=a\x1b[0m CPUTot=2\r\n   Reason=bad, x=1 [me@now]\r\n\r\nNodeName=b CPUTot=4\r\n"
    assert parse_records(text, "NodeName") == [
        {"NodeName": "a", "CPUTot": "2", "Reason": "bad, x=1 [me@now]"},
        {"NodeName": "b", "CPUTot": "4"},
    ]


def test_the_first_of_two_values_counts() -> None:
    (record,) = parse_records("JobId=1 NumNodes=2\n  Nodes=a CPU_IDs=0\n  Nodes=b CPU_IDs=1\n", "JobId")
    assert record["CPU_IDs"] == "0"


@pytest.mark.parametrize("text", ["", "slurm_load_jobs error: Invalid job id specified\n"])
def test_an_answer_without_a_record_is_cited(text: str) -> None:
    with pytest.raises(UserError, match=r"Invalid job id|\(nothing\)"):
        parse_records(text, "JobId")


def test_assignments() -> None:
    text = (
        "Configuration data as of now\nKillWait   = 30 sec\nPrologFlags = (null)\nA = b=c\n\nSlurmctld(primary) is UP\n"
    )
    assert parse_assignments(text) == {"KillWait": "30 sec", "PrologFlags": "(null)", "A": "b=c"}
    with pytest.raises(UserError, match="no `Key = Value` line"):
        parse_assignments("nothing here")
