"""Command lines whose options have dashes (`status`, `doctor`, schedules): mistakes in them are `UserError`s."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dthpc.errors import UserError, nearest


class OptionParser(argparse.ArgumentParser):
    """Tells what it does not understand as every other mistake is told, instead of by its usage and an exit."""

    def __init__(self, *, bare: str | None = None, **settings: Any) -> None:
        """Describe a command.

        Args:
            bare: the option that a word without dashes was probably meant for, in a command that takes none.
            settings: argparse's.
        """
        super().__init__(**settings)
        self._bare = bare

    def error(self, message: str) -> NoReturn:
        """Raise argparse's finding.

        Raises:
            UserError: always.
        """
        strange = re.fullmatch(r"unrecognized arguments: (?:-- )?(\S+).*", message, re.DOTALL)
        if strange is not None:
            raise self._unknown(strange[1])
        about = re.fullmatch(r"argument ([^\s:/]+): (.*)", message, re.DOTALL)
        if about is None:
            raise UserError(message, instead=f"see {self.prog} --help")
        option, why = about[1], about[2]
        if why.startswith("expected"):
            action = next((each for each in self._actions if option in each.option_strings), None)
            raise UserError("no value is given", key=option, instead=f"{option} {action.metavar if action else '…'}")
        if why.startswith("ignored explicit argument"):
            raise UserError("takes no value", key=option, instead=f"{option} alone, or leave it out")
        raise UserError(why, key=option, instead=f"see {self.prog} --help")

    def _unknown(self, word: str) -> UserError:
        option, _, value = word.partition("=")
        if not word.startswith("-"):
            instead = f"{self._bare} {word}" if self._bare else f"see {self.prog} --help"
            return UserError("this word has no place here", key=word, instead=instead)
        # The last name of each is the long one. All begin alike, so that a second guess would be a bad one.
        known = [action.option_strings[-1] for action in self._actions if action.option_strings]
        instead = nearest(option, known, count=1)
        return UserError("there is no such option", key=option, value=value or None, instead=instead)


def whole(option: str) -> Callable[[str], int]:
    """A reader of whole numbers; how small or large one may be is told where it is used."""

    def read(text: str) -> int:
        if re.fullmatch(r"\s*[+-]?[0-9]{1,9}\s*", text) is None:
            raise UserError("no whole number (of up to nine digits)", key=option, value=text, instead=f"{option} 4")
        return int(text)

    return read


def choice(option: str, valid: Sequence[str]) -> Callable[[str], str]:
    """A reader of one of some words."""

    def read(text: str) -> str:
        if text not in valid:
            raise UserError("no such choice", key=option, value=text, instead=nearest(text, valid))
        return text

    return read


def filled(option: str, example: str) -> Callable[[str], str]:
    """A reader of anything but nothing: what an unset variable of the shell leaves would be taken for a value."""

    def read(text: str) -> str:
        if not text.strip():
            raise UserError("the value is empty", key=option, instead=f"{option} {example}, or leave {option} out")
        return text

    return read


def file(option: str, example: str) -> Callable[[str], Path]:
    """A reader of paths, of which none is empty."""

    def read(text: str) -> Path:
        return Path(filled(option, example)(text))

    return read
