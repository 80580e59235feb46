"""Where ranks that wait for long tell each other in what, so that a time-out can name those who did not come."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dthpc.comm.rendezvous import ranges


class Board:
    """One group's part of the key-value store. Nothing is written as long as nobody waits for long."""

    def __init__(self, store: Any, name: str, ranks: Sequence[int], own: int) -> None:
        """Take a store.

        Args:
            store: a `torch.distributed.Store` of this group.
            name: of the group.
            ranks: the default group's ranks of the members, in this group's order.
            own: this rank's position among them.
        """
        self._store, self._name, self._ranks, self._own = store, name, tuple(ranks), own

    @property
    def group(self) -> str:
        """The group in words."""
        return f"group {self._name} (ranks {ranges(self._ranks)})"

    @property
    def rank(self) -> int:
        """This rank, in the default group."""
        return self._ranks[self._own]

    def rank_of(self, position: int) -> int:
        """The default group's rank of a member."""
        return self._ranks[position]

    def tell(self, number: int, what: str) -> None:
        """Say that this rank waits in an operation; `number` counts the group's collectives, and is 0 for a message."""
        try:
            self._store.set(f"waits/{self._own}", json.dumps([number, what]))
        except Exception:
            # The store may have gone with its host; then the time-out can name nobody, and that is all.
            return

    def missing(self, number: int, what: str) -> str:
        """Who has not come to an operation, as far as the others have told, as a sentence."""
        if number == 0:
            return "Its peer did not take part."
        try:
            told = self._read()
        except Exception:
            return "Which ranks are missing is not known: the store does not answer."
        here = [rank for rank, (at, doing) in told.items() if at == number and doing == what]
        other = {rank: doing for rank, (at, doing) in told.items() if at == number and doing != what}
        ahead = {rank: doing for rank, (at, doing) in told.items() if at > number}
        absent = [r for r in self._ranks if r not in {*here, *other, *ahead, self.rank}]
        parts = []
        if absent:
            parts.append(f"Did not call it: {_named(absent)}.")
        parts += [f"Rank {rank} called {doing} instead." for rank, doing in other.items()]
        parts += [f"Rank {rank} is past it, in {doing}." for rank, doing in ahead.items()]
        parts.append(f"Waited in it: {_named(sorted({*here, self.rank}))}.")
        return " ".join(parts)

    def _read(self) -> dict[int, tuple[int, str]]:
        told: dict[int, tuple[int, str]] = {}
        for position, rank in enumerate(self._ranks):
            key = f"waits/{position}"
            if position != self._own and self._store.check([key]):
                number, what = json.loads(self._store.get(key))
                told[rank] = (int(number), str(what))
        return told


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"
