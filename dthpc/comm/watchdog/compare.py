"""Who is to blame when collectives hang: the ranks' accounts, held against each other. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dthpc.comm.rendezvous import ranges
from dthpc.comm.watchdog.account import Account, Call

POINT_TO_POINT = ("send", "recv", "recv_anysource")

_NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "allgather_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "recv_anysource": "recv",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
}
"""Names of methods by which a process group is called, as users know them."""

_SAME_SHAPE = ("all_reduce", "broadcast", "reduce", "reduce_scatter", "all_gather")
"""Operations whose tensors have one form on all ranks; the others may differ by rank."""


@dataclass(frozen=True)
class Verdict:
    """What was found."""

    headline: str
    """The cause in one line."""

    details: list[str] = field(default_factory=list)
    """What each rank does, a line each."""

    blamed: list[int] = field(default_factory=list)
    """Ranks that did not come, or called something else."""

    def text(self) -> str:
        """All of it, for people."""
        return "\n".join([self.headline, *(f"  {line}" for line in self.details)])


def describe(call: Call) -> str:
    """`all_reduce [4096] float32 (train/step.py:88)`."""
    operation = str(call["operation"])
    words = [_NAMES.get(operation, operation)]
    if operation in POINT_TO_POINT:
        other = {"send": "to", "recv": "from"}.get(operation)
        words.append("from any rank" if other is None or call["peer"] is None else f"{other} rank {call['peer']}")
    if call["shape"] is not None:
        words.append(str(call["shape"]))
    if call["dtype"]:
        words.append(str(call["dtype"]))
    if call["place"]:
        words.append(f"({_short(call['place'])})")
    return " ".join(words)


def judge(accounts: Mapping[int, Account], absent: Mapping[int, str], how: str) -> Verdict:
    """Say why some ranks wait.

    Args:
        accounts: of the ranks that answered.
        absent: the other ranks, each with what is known of it, such as `has finished its job`.
        how: words for what happened to the call, such as `does not end after 57 s`.
    """
    stuck = _the_cause(accounts, absent)
    if stuck is None:
        lines = [_activity(account) for account in accounts.values()] + [f"rank {r} {w}" for r, w in absent.items()]
        return Verdict(f"a collective {how}, and no rank waits in one that is known", lines)
    if stuck.call["operation"] in POINT_TO_POINT:
        return _judge_message(stuck, accounts, absent, how)
    return _judge_collective(stuck, accounts, absent, how)


@dataclass(frozen=True)
class _Stuck:
    """A call that some rank waits for."""

    rank: int
    call: Call
    members: list[int]
    group: str
    missing: list[int]
    torch_numbers: bool

    @property
    def seconds(self) -> float:
        """How long it has been under way."""
        return float(self.call["waited_s"] if "waited_s" in self.call else self.call["age_s"])


def _the_cause(accounts: Mapping[int, Account], absent: Mapping[int, str]) -> _Stuck | None:
    """Of all calls that are waited for, the one whose missing rank itself waits for nobody, else the oldest."""
    found = [
        stuck for account in accounts.values() for call in account.waiting if (stuck := _stuck(account, call, accounts))
    ]
    found = found or [
        _Stuck(account.rank, call, members, words, missing, True)
        for account in accounts.values()
        for call in account.torch_calls
        if call["state"] != "finished"
        for members, words in [_group_of(call, accounts)]
        for missing in [[r for r in members if r in absent or not _has(accounts[r].torch_calls, call)]]
    ]
    if not found:
        return None

    def weight(stuck: _Stuck) -> tuple[bool, bool, float]:
        free = [rank in absent or not _in_flight(accounts[rank]) for rank in stuck.missing]
        return bool(free) and all(free), any(free), stuck.seconds

    return max(found, key=weight)


def _in_flight(account: Account) -> bool:
    """Whether a rank waits for others itself."""
    return bool(account.waiting) or any(call["state"] != "finished" for call in account.torch_calls)


def _stuck(account: Account, call: Call, accounts: Mapping[int, Account]) -> _Stuck:
    members, words = _group_of(call, accounts)
    if call["operation"] in POINT_TO_POINT:
        others = [call["peer"]] if call["peer"] is not None else [rank for rank in members if rank != account.rank]
        return _Stuck(account.rank, call, members, words, others, False)
    missing = [rank for rank in members if rank not in accounts or not _has(accounts[rank].calls, call)]
    return _Stuck(account.rank, call, members, words, missing, False)


def _group_of(call: Call, accounts: Mapping[int, Account]) -> tuple[list[int], str]:
    for account in accounts.values():
        known = account.groups.get(str(call["group"]))
        if known and known["ranks"]:
            members = [int(rank) for rank in known["ranks"]]
            words = str(known["description"]) or f"of ranks {ranges(sorted(members))}"
            return members, words
    return sorted(accounts), str(call["group"])


def _has(calls: Iterable[Call], wanted: Call) -> Call | None:
    """The call of the same number in the same group."""
    for call in calls:
        if (
            call["group"] == wanted["group"]
            and call["sequence"] == wanted["sequence"]
            and call["operation"] not in POINT_TO_POINT
        ):
            return call
    return None


def _judge_collective(stuck: _Stuck, accounts: Mapping[int, Account], absent: Mapping[int, str], how: str) -> Verdict:
    forms: dict[str, list[int]] = {}
    shown: dict[str, Call] = {}
    for rank in stuck.members:
        account = accounts.get(rank)
        calls = [] if account is None else account.torch_calls if stuck.torch_numbers else account.calls
        call = _has(calls, stuck.call)
        if call is not None:
            forms.setdefault(_form(call), []).append(rank)
            shown.setdefault(_form(call), call)
    head = f"collective {stuck.call['sequence']} of group {stuck.group} {how}"
    parts = [
        f"{_ranks(ranks)} in {describe(shown[form])}"
        for form, ranks in sorted(forms.items(), key=lambda item: -len(item[1]))
    ]
    missing = [rank for rank in stuck.members if not any(rank in ranks for ranks in forms.values())]
    details = [_absence(rank, accounts, absent, stuck) for rank in missing]
    if len(forms) > 1:
        most = max(map(len, forms.values()))
        others = [rank for ranks in forms.values() if len(ranks) < most for rank in ranks]
        # Where as many call one thing as another, nobody can say who is wrong.
        details += [_activity(accounts[rank]) for rank in others or stuck.members if rank in accounts]
        blamed = sorted({*others, *missing})
        return Verdict(f"{head}: the ranks call different things: {', '.join(parts)}", details, blamed)
    if missing:
        return Verdict(f"{head}: {', '.join(parts)}; {_one_or('never came', missing, details)}", details, missing)
    details = [_activity(account) for account in accounts.values()]
    return Verdict(f"{head}, though all its ranks came: {', '.join(parts)}", details)


def _judge_message(stuck: _Stuck, accounts: Mapping[int, Account], absent: Mapping[int, str], how: str) -> Verdict:
    peers = stuck.missing
    head = f"rank {stuck.rank}'s {describe(stuck.call)} in group {stuck.group} {how}"
    details = [_absence(rank, accounts, absent, stuck) for rank in peers]
    return Verdict(f"{head}: {_one_or('did not answer', peers, details)}", details, peers)


def _one_or(verb: str, ranks: list[int], details: list[str]) -> str:
    """What is known of one rank, which needs no line of its own then, or words for several."""
    return details.pop() if len(ranks) == 1 else f"{_ranks(ranks)} {verb}"


def _absence(rank: int, accounts: Mapping[int, Account], absent: Mapping[int, str], stuck: _Stuck) -> str:
    """What is known of a rank that should be in a call and is not."""
    account = accounts.get(rank)
    if account is None:
        return f"rank {rank} {absent.get(rank, 'did not answer')}"
    verb = "does not answer" if stuck.call["operation"] in POINT_TO_POINT else "never came"
    return f"rank {rank} on {account.host} {verb}: {_doing(account)}"


def _activity(account: Account) -> str:
    return f"rank {account.rank} on {account.host}: {_doing(account)}"


def _doing(account: Account) -> str:
    parts = []
    # torch's record holds the calls of C++ too, but no messages.
    last = min((calls[-1] for calls in (account.calls, account.torch_calls) if calls), key=_age, default=None)
    if account.waiting:
        call = account.waiting[0]
        parts.append(f"it waits for {describe(call)}, for {call['waited_s']:.0f} s")
    elif last is not None:
        parts.append(f"its last call was {describe(last)}, {last['age_s']:.0f} s ago")
    else:
        parts.append("it has called nothing yet")
    if account.main:
        place, _, function = account.main.partition(" in ")
        parts.append(f"its main thread is at {_short(place)} in {function}")
    return "; ".join(parts)


def _age(call: Call) -> float:
    return float(call["age_s"])


def _form(call: Call) -> str:
    operation = _NAMES.get(str(call["operation"]), str(call["operation"]))
    return f"{operation} {call['shape']} {call['dtype']}" if operation in _SAME_SHAPE else operation


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranges(sorted(ranks))}"


def _short(place: str) -> str:
    """The last parts of a path, enough to find the file."""
    return "/".join(place.split("/")[-3:])
