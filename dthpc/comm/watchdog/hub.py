"""Rank 0's end of the watchdogs' lines: who lives, who waits, and the verdict that ends the job.

A process that is gone ends its connection, which the kernel tells at once; one that is stopped, or whose node is gone,
falls silent. When a rank waits for too long, the hub asks all for their accounts and compares them.
"""

from __future__ import annotations

import hmac
import re
import secrets
import selectors
import socket
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from dthpc.comm.rendezvous import ranges
from dthpc.comm.watchdog.account import Account
from dthpc.comm.watchdog.clock import BEAT_S, Clock
from dthpc.comm.watchdog.compare import Verdict, judge
from dthpc.comm.watchdog.wire import Line, Message

ACCOUNTS_S = 3.0
"""How long ranks may take to give their accounts; who is stopped gives none."""

ECHO_S = 1.0
"""After a collective failed in one rank: how long to wait for the sign of what is behind it, such as a dead rank."""

_BUILD_PATH = re.compile(r"\[/\S+\] ")
"""Where in its own sources Gloo has noticed an error."""


@dataclass
class Member:
    """What the hub knows of one rank."""

    line: Line
    """Its connection."""

    host: str = ""
    """Its node."""

    heard: float = 0.0
    """When it was heard last, by the hub's clock."""

    ended: str | None = None
    """Words for how it ended; None while it works."""

    account: Account | None = None
    """What it said of itself when a collective of its failed."""


@dataclass
class _Inquiry:
    """Accounts that are being gathered."""

    until: float
    over: bool
    how: str
    accounts: dict[int, Account]


class Hub:
    """Serves all ranks, from a thread of its own."""

    def __init__(
        self,
        world_size: int,
        silence_s: float,
        *,
        warn: Callable[[Verdict], None],
        end: Callable[[Verdict], None],
    ) -> None:
        """Listen on a free port of every address.

        Args:
            world_size: number of ranks.
            silence_s: seconds without a sign of life after which a rank counts as lost; 0: never.
            warn: told of a collective that takes long, but is not overdue.
            end: told of the verdict before the ranks are.
        """
        self.word = secrets.token_hex(16)
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._socket = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=dual)
        self.port = int(self._socket.getsockname()[1])
        self._world_size, self._silence_s = world_size, silence_s
        self._warn, self._end = warn, end
        self._members: dict[int, Member] = {}
        self._strangers: set[Line] = set()
        self._inquiry: _Inquiry | None = None
        self._echo: tuple[float, int, str] | None = None
        self._verdict: Verdict | None = None
        self._closing = threading.Event()
        self._clock = Clock()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="watchdog hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tell the ranks that nobody watches any more, and stop."""
        self._closing.set()
        self._thread.join(timeout=5)

    # --- the loop ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        beat = 0.0
        try:
            while not self._closing.is_set():
                for key, _ in self._selector.select(BEAT_S / 4):
                    self._on_readable(key.fileobj)
                now = self._clock.now()
                if now - beat >= BEAT_S:
                    beat = now
                    self._broadcast({"kind": "alive"})
                self._on_time(now)
        except Exception:
            # Better a job that nobody watches than one that the watching ends.
            traceback.print_exc()
        for line in [*self._strangers, *(member.line for member in self._members.values())]:
            line.send({"kind": "bye"})
        self._socket.close()

    def _on_readable(self, source: object) -> None:
        if source is self._socket:
            line = Line(self._socket.accept()[0])
            self._strangers.add(line)
            self._selector.register(line, selectors.EVENT_READ)
            return
        assert isinstance(source, Line)
        messages = source.receive()
        for message in messages:
            if source in self._strangers:
                self._introduce(source, message)
            else:
                self._on_message(self._rank_of(source), message)
        if source.closed:
            self._selector.unregister(source)
            if source in self._strangers:
                self._strangers.remove(source)
            else:
                self._on_hang_up(self._rank_of(source))
            source.close()

    def _introduce(self, line: Line, message: Message) -> None:
        if message.get("kind") == "hello" and hmac.compare_digest(str(message.get("word")), self.word):
            self._strangers.remove(line)
            self._members[int(message["rank"])] = Member(line, str(message["host"]), self._clock.now())
            line.send({"kind": "alive"})

    def _rank_of(self, line: Line) -> int:
        return next(rank for rank, member in self._members.items() if member.line is line)

    def _broadcast(self, message: Message) -> None:
        for member in self._members.values():
            if not member.line.closed:
                member.line.send(message)

    # --- what ranks tell --------------------------------------------------------------------------------------------

    def _on_message(self, rank: int, message: Message) -> None:
        member = self._members[rank]
        member.heard = self._clock.now()
        kind = message["kind"]
        if kind == "account" and self._inquiry is not None:
            self._inquiry.accounts[rank] = Account.of_json(message["account"])
        elif kind == "stuck":
            self._inquire(bool(message["over"]), f"does not end after {message['seconds']:.0f} s")
        elif kind == "bye":
            member.ended = "has finished its job"
        elif kind == "failed":
            member.ended = f"on {member.host} failed: {message['error']}"
            if message["echo"]:
                member.account = Account.of_json(message["account"])
                self._echo = self._echo or (self._clock.now() + ECHO_S, rank, str(message["error"]))
            else:
                self._decide(Verdict(f"rank {rank} on {member.host} failed: {message['error']}", [], [rank]))

    def _on_hang_up(self, rank: int) -> None:
        member = self._members[rank]
        if member.ended is not None or self._closing.is_set():
            return
        member.ended = f"on {member.host} is gone"
        self._decide(
            Verdict(
                f"lost the connection to rank {rank} on {member.host}: its process is gone (killed, or out of memory?)",
                [],
                [rank],
            )
        )

    # --- what time tells --------------------------------------------------------------------------------------------

    def _on_time(self, now: float) -> None:
        if self._echo is not None and now > self._echo[0] and self._inquiry is None and self._verdict is None:
            _, rank, error = self._echo
            self._inquire(True, f"failed in rank {rank} ({_BUILD_PATH.sub('', error)})")
        inquiry = self._inquiry
        if inquiry is not None and (now > inquiry.until or set(inquiry.accounts) >= set(self._working())):
            self._inquiry = None
            self._conclude(inquiry)
        silent = self._silent(now)
        if silent and self._verdict is None:
            hosts = ", ".join(sorted({self._members[rank].host for rank in silent}))
            who = ("rank " if len(silent) == 1 else "ranks ") + ranges(silent)
            why = f"no sign of life from {who} on {hosts} for {self._silence_s:.0f} s (stopped, or the node is gone)"
            self._decide(Verdict(why, [], silent))

    def _silent(self, now: float) -> list[int]:
        if self._silence_s <= 0:
            return []
        return sorted(r for r in self._working() if now - self._members[r].heard > self._silence_s)

    def _working(self) -> list[int]:
        return [rank for rank, member in self._members.items() if member.ended is None]

    def _inquire(self, over: bool, how: str) -> None:
        """Ask all ranks for their accounts."""
        if self._verdict is not None or (self._inquiry is not None and (self._inquiry.over or not over)):
            return
        self._inquiry = _Inquiry(self._clock.now() + ACCOUNTS_S, over, how, {})
        self._broadcast({"kind": "tell"})

    def _conclude(self, inquiry: _Inquiry) -> None:
        failed = {rank: member.account for rank, member in self._members.items() if member.account is not None}
        accounts = {**inquiry.accounts, **failed}
        absent = dict.fromkeys(range(self._world_size), "did not connect")
        absent |= {rank: member.ended or self._silence_of(member) for rank, member in self._members.items()}
        absent = {rank: words for rank, words in absent.items() if rank not in accounts}
        verdict = judge(accounts, absent, inquiry.how)
        if inquiry.over:
            self._decide(verdict)
        else:
            self._warn(verdict)

    def _silence_of(self, member: Member) -> str:
        return f"on {member.host} gives no answer; last heard of {self._clock.now() - member.heard:.0f} s ago"

    def _decide(self, verdict: Verdict) -> None:
        if self._verdict is not None:
            return
        self._verdict = verdict
        self._end(verdict)
        self._broadcast({"kind": "end", "why": verdict.headline, "blamed": verdict.blamed})
