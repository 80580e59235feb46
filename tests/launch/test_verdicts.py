from __future__ import annotations

import json

import pytest

from dthpc.errors import UserError
from dthpc.launch.verdicts import Verdict, error, ok, plural, warning


def test_only_an_error_holds_something_to_raise() -> None:
    mistake = UserError("too many", key="cluster.nodes", value=9, instead="cluster.nodes=3")
    verdicts = [ok("nodes", "3 of 3"), warning("nodes", "1 is down"), error("nodes", mistake)]
    assert [each.status for each in verdicts] == ["ok", "warning", "error"]
    assert [each.error for each in verdicts] == [None, None, mistake]


def test_the_note_of_an_error_is_its_whole_message() -> None:
    mistake = UserError("too many", key="cluster.nodes", value=9, instead="cluster.nodes=3")
    assert error("nodes", mistake).note == "cluster.nodes=9: too many. Instead: cluster.nodes=3"


def test_as_json_a_verdict_is_three_words_of_text() -> None:
    found = error("folder", UserError("is a file", key="run.root", value="/etc/passwd"))
    told = json.loads(json.dumps(found.as_dict()))
    assert told == {"check": "folder", "status": "error", "note": "run.root=/etc/passwd: is a file"}
    assert ok("cores", "2 of 2 cores").as_dict() == {"check": "cores", "status": "ok", "note": "2 of 2 cores"}


def test_verdicts_are_equal_by_what_they_say() -> None:
    assert ok("cores", "2 of 2") == Verdict("cores", "ok", "2 of 2")
    assert ok("cores", "2 of 2") != warning("cores", "2 of 2")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 nodes"), (1, "1 node"), ("1", "1 node"), (2, "2 nodes"), ("no", "no nodes"), ("2-4", "2-4 nodes")],
)
def test_one_is_singular_and_all_else_plural(count: int | str, text: str) -> None:
    assert plural(count, "node") == text
