"""What can be wrong with a schedule, found without running it; free of torch.

The runtime's model: a rank does its actions in order; what it sends is buffered, so sending never blocks, and taking
what has not been sent yet does. So a schedule ends on every machine or on none, and one replay decides which.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dthpc.parallel.pipeline.schedule import Action, Kind, Schedule


@dataclass(frozen=True)
class Verdict:
    """What a schedule without faults needs."""

    actions: int
    """Actions of all ranks."""

    peak_activations: tuple[int, ...]
    """For each rank the most forward passes whose activations it holds at once, each of one micro-batch through one
    chunk of layers; a forward pass is held until its weight gradients are made."""


def verify(schedule: Schedule) -> Verdict:
    """Check a schedule: every pass is there once and in an order that can be carried out.

    Takes time and memory in proportion to the number of actions.

    Raises:
        ValueError: names the first fault.
    """
    if len(schedule.actions) != schedule.ranks:
        raise ValueError(f"{schedule.ranks} ranks, but lists of actions for {len(schedule.actions)}")
    actions = [tuple(schedule.actions[rank]) for rank in range(schedule.ranks)]
    for rank, mine in enumerate(actions):
        _check_complete(schedule, rank, mine)
    _check_order_of_messages(schedule, actions)
    count = sum(1 for _ in replay(schedule, actions))
    return Verdict(count, tuple(peak_activations(mine) for mine in actions))


def peak_activations(actions: Sequence[Action]) -> int:
    """The most activations that one rank holds at once; see `Verdict.peak_activations`."""
    held = peak = 0
    for action in actions:
        if action.kind is Kind.F:
            held += 1
            peak = max(peak, held)
        elif action.kind is not Kind.I:
            held -= 1
    return peak


def needs(schedule: Schedule, action: Action) -> Action | None:
    """The action on the stage before or after it, and perhaps on another rank, whose result an action takes.

    Returns:
        None for the first stage's forward pass, the last stage's backward pass, and weight gradients. A gradient is
        asked for as `B`, also where `I` makes it.
    """
    kind, stage, micro_batch = action
    if kind is Kind.F:
        return Action(Kind.F, stage - 1, micro_batch) if stage > 0 else None
    if kind is Kind.W or stage == schedule.stages - 1:
        return None
    return Action(Kind.B, stage + 1, micro_batch)


def made_by(action: Action) -> Action | None:
    """What an action gives to a neighbouring stage, in the words of `needs`; None for weight gradients."""
    if action.kind is Kind.W:
        return None
    return action._replace(kind=Kind.B) if action.kind is Kind.I else action


def replay(schedule: Schedule, actions: Sequence[Sequence[Action]]) -> Iterator[tuple[int, Action]]:
    """All actions, each with its rank, in an order in which they can be done.

    Args:
        schedule: the sizes, and which rank holds which stage.
        actions: one list for each rank.

    Raises:
        ValueError: some ranks wait for each other, or for something that nobody makes.
    """
    position = [0] * len(actions)
    made: set[Action] = set()
    waiting: dict[Action, int] = {}
    ready = list(reversed(range(len(actions))))
    while ready:
        rank = ready.pop()
        while position[rank] < len(actions[rank]):
            action = actions[rank][position[rank]]
            need = needs(schedule, action)
            if need is not None:
                if need not in made:
                    waiting[need] = rank
                    break
                made.discard(need)
            yield rank, action
            position[rank] += 1
            result = made_by(action)
            if result is not None:
                made.add(result)
                if result in waiting:
                    ready.append(waiting.pop(result))
    if waiting:
        raise ValueError("deadlock: " + "; ".join(_why_stuck(schedule, actions, waiting, position)))


def _why_stuck(
    schedule: Schedule, actions: Sequence[Sequence[Action]], waiting: dict[Action, int], position: list[int]
) -> Iterator[str]:
    for need, rank in sorted(waiting.items(), key=lambda entry: entry[1])[:8]:
        maker = schedule.rank_of(need.stage)
        what = "the output" if need.kind is Kind.F else "the gradient"
        yield (
            f"rank {rank} stands before {actions[rank][position[rank]]} and waits for {what} of stage {need.stage} "
            f"for micro-batch {need.micro_batch} from rank {maker}"
        )


def _check_complete(schedule: Schedule, rank: int, actions: Sequence[Action]) -> None:
    """Every stage of the rank does each pass for each micro-batch once: F, then B, or F, then I, then W."""
    mine = set(schedule.stages_of(rank))
    seen: dict[tuple[int, int], str] = {}
    for action in actions:
        kind, stage, micro_batch = action
        where = f"rank {rank}: {action}"
        if stage not in mine:
            raise ValueError(f"{where} is of a stage that the rank does not hold; it holds {sorted(mine)}")
        if not 0 <= micro_batch < schedule.micro_batches:
            raise ValueError(f"{where} is of no micro-batch; there are {schedule.micro_batches}")
        before = seen.get((stage, micro_batch), "")
        if kind.value in before:
            raise ValueError(f"{where} occurs twice")
        if before + kind.value not in ("F", "FB", "FI", "FIW"):
            raise ValueError(f"{where} comes after {' '.join(before) or 'nothing'} of its stage and micro-batch")
        seen[stage, micro_batch] = before + kind.value
    for stage in sorted(mine):
        for micro_batch in range(schedule.micro_batches):
            done = seen.get((stage, micro_batch), "")
            if done not in ("FB", "FIW"):
                missing = {"": "F", "F": "B", "FI": "W"}[done]
                raise ValueError(f"rank {rank}: {stage}{missing}{micro_batch} is missing")


def _check_order_of_messages(schedule: Schedule, actions: Sequence[Sequence[Action]]) -> None:
    """A stage must take what its neighbour sends in the order in which it was sent."""
    forward: dict[int, list[int]] = {stage: [] for stage in range(schedule.stages)}
    backward: dict[int, list[int]] = {stage: [] for stage in range(schedule.stages)}
    for mine in actions:
        for kind, stage, micro_batch in mine:
            if kind is not Kind.W:
                (forward if kind is Kind.F else backward)[stage].append(micro_batch)
    for order, what in ((forward, "forward"), (backward, "backward")):
        for stage in range(1, schedule.stages):
            for one, other in zip(order[stage - 1], order[stage], strict=True):
                if one != other:
                    raise ValueError(
                        f"stages {stage - 1} and {stage} do their {what} passes in different orders: where the first "
                        f"has micro-batch {one}, the second has {other}"
                    )
