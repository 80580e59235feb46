from __future__ import annotations

from pathlib import Path

import pytest

from dthpc.errors import UserError
from dthpc.options import OptionParser, choice, file, filled, whole


def parser() -> OptionParser:
    made = OptionParser(prog="look", bare="--from")
    made.add_argument("--from", nargs="+", type=file("--from", "a.txt"), metavar="FILE")
    made.add_argument("--ranks", type=whole("--ranks"), metavar="N")
    made.add_argument("--order", type=choice("--order", ("near", "far")), metavar="WORD")
    made.add_argument("--cpus", type=filled("--cpus", "0-3"), metavar="CPUS")
    made.add_argument("--json", action="store_true")
    made.add_argument("--jobs", action="store_true")
    return made


def test_values_are_read() -> None:
    found = parser().parse_args(["--from", "a", "b", "--ranks", "-1", "--order", "far", "--cpus", "0,2", "--json"])
    assert (vars(found)["from"], found.ranks) == ([Path("a"), Path("b")], -1)
    assert (found.order, found.cpus, found.json, found.jobs) == ("far", "0,2", True, False)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--rank5=4"], "--rank5=4: there is no such option. Instead: did you mean --ranks?"),
        (["here.txt"], "here.txt: this word has no place here. Instead: --from here.txt"),
        (["--ranks"], "--ranks: no value is given. Instead: --ranks N"),
        (["--ranks", "two"], "--ranks=two: no whole number (of up to nine digits). Instead: --ranks 4"),
        (["--ranks", "12345678901"], "no whole number (of up to nine digits)"),
        (["--order", "nea"], "--order=nea: no such choice. Instead: did you mean near?"),
        (["--cpus", " "], "--cpus: the value is empty. Instead: --cpus 0-3, or leave --cpus out"),
        (["--from", ""], "--from: the value is empty. Instead: --from a.txt, or leave --from out"),
        (["--json=yes"], "--json: takes no value. Instead: --json alone, or leave it out"),
        (["--j"], "--json, --jobs. Instead: see look --help"),
    ],
)
def test_mistakes_are_told_as_all_others_are(words: list[str], told: str) -> None:
    with pytest.raises(UserError) as caught:
        parser().parse_args(words)
    assert told in caught.value.message()
