"""Errors that a user can cause, each told in one message: key, value, why, what to write instead."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class UserError(Exception):
    """A mistake of the user or of the site that the user can mend.

    The doors print it without a traceback and exit with code 2; a rank that ends with it is never restarted.
    """

    def __init__(self, why: str, *, key: str | None = None, value: object = None, instead: str | None = None) -> None:
        """Describe one mistake.

        Args:
            why: what is wrong, as one sentence without a trailing full stop.
            key: the configuration key, option or path at fault.
            value: the value that was given for it; `None` means that there was none worth showing.
            instead: what to write or do instead.
        """
        self.why = why
        self.key = key
        self.value = value
        self.instead = instead
        super().__init__(self.message())

    def message(self) -> str:
        """The whole message on one line."""
        head = ""
        if self.key is not None:
            head = f"{self.key}: " if self.value is None else f"{self.key}={self.value}: "
        tail = f". Instead: {self.instead}" if self.instead else ""
        return f"{head}{self.why}{tail}"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.why, self.key, self.value, self.instead)


def _rebuild(kind: type[UserError], why: str, key: str | None, value: object, instead: str | None) -> UserError:
    # Kinds with arguments of their own have made `why` and the rest of them.
    error = kind.__new__(kind)
    UserError.__init__(error, why, key=key, value=value, instead=instead)
    return error


class UserErrors(UserError):
    """Several mistakes that were found together and are reported together."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        self.errors = list(errors)
        super().__init__("\n".join(error.message() for error in self.errors))

    def __reduce__(self) -> tuple[object, ...]:
        return UserErrors, (self.errors,)


def raise_together(errors: Iterable[UserError]) -> None:
    """Raise nothing, the one error, or all of them as one `UserErrors`."""
    found = list(errors)
    if len(found) == 1:
        raise found[0]
    if found:
        raise UserErrors(found)


def tell(error: UserError, as_json: bool, head: Mapping[str, Any] | None = None) -> None:
    """Print an error as the doors do: each mistake on a line of stderr, and on stdout one object for programs.

    Args:
        error: what was found.
        as_json: whether a program reads stdout.
        head: what the object says beside the errors.
    """
    errors = error.errors if isinstance(error, UserErrors) else [error]
    if as_json:
        told = [{"key": e.key, "value": str(e.value), "why": e.why, "instead": e.instead} for e in errors]
        print(json.dumps({**(head or {}), "errors": told}, indent=2))
    for each in errors:
        print(f"dthpc: {each.message()}", file=sys.stderr)


def nearest(word: str, valid: Iterable[str], count: int = 3) -> str:
    """The valid words closest to a mistyped one, as text for a message: `did you mean a or b?` or the whole list."""
    options = sorted(set(valid))
    same = [option for option in options if option.lower() == word.lower()]
    close = same or difflib.get_close_matches(word, options, n=count, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(close) + "?"
    shown = ", ".join(options[:20]) + (", …" if len(options) > 20 else "")
    return f"valid ones are: {shown}" if options else "nothing is valid here"
