"""What goes wrong in communication, as exceptions that say where."""

from __future__ import annotations


class CommunicationError(RuntimeError):
    """An operation failed; says which, in which group, and on which rank."""


class CommunicationTimeout(CommunicationError):
    """An operation did not end in time; says how long it took and which ranks are missing, where that is known."""


class MismatchError(CommunicationError):
    """Ranks of a group called different operations, or the same with tensors that do not fit; says who called what."""
