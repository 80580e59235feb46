"""How long a schedule takes and what it holds: simulated from the costs of its passes, and in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dthpc.errors import raise_together
from dthpc.parallel.pipeline.names import mistakes
from dthpc.parallel.pipeline.schedule import Action, Kind, Schedule
from dthpc.parallel.pipeline.verify import made_by, needs, peak_activations, replay

Cost = float | Sequence[float]
"""Time of a pass of one micro-batch through one stage: the same for all stages, or one number for each."""


@dataclass(frozen=True)
class Span:
    """One action in time."""

    action: Action
    """What is done."""

    start: float
    """When it starts, in the unit of the costs, counted from the step's beginning."""

    end: float
    """When it has ended."""


@dataclass(frozen=True)
class Timeline:
    """A schedule in time, on machines where nothing takes longer than it must."""

    spans: tuple[tuple[Span, ...], ...]
    """For each rank its actions, in order."""

    @property
    def makespan(self) -> float:
        """Time from the step's beginning to the end of the last action."""
        return max((mine[-1].end for mine in self.spans if mine), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """For each rank the time in which it computes."""
        return tuple(sum(span.end - span.start for span in mine) for mine in self.spans)

    @property
    def idle(self) -> float:
        """The least time in which a rank does not compute, until the step's end."""
        return self.makespan - max(self.busy)

    @property
    def bubble(self) -> float:
        """Idle time over computing time, of the rank that computes longest."""
        return self.idle / max(self.busy) if max(self.busy) else 0.0

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """For each rank the most activations held at once, as `verify.Verdict` counts them."""
        return tuple(peak_activations([span.action for span in mine]) for mine in self.spans)


def simulate(
    schedule: Schedule, forward: Cost, input_backward: Cost, weight_backward: Cost, send: float = 0.0
) -> Timeline:
    """When each action of a schedule starts and ends.

    A rank starts its next action as soon as it has done the one before and has what the action takes. Nothing but
    `send` is counted between ranks, and sending keeps no rank from computing.

    Args:
        schedule: one that `verify` finds no fault in.
        forward: time of a forward pass through a stage. A rank with several chunks has several stages: for the same
            model cut finer, each costs less.
        input_backward: time for the gradient of a stage's input.
        weight_backward: time for the gradients of its weights; a full backward pass takes both.
        send: time from one rank to another, for an activation or its gradient.

    Raises:
        ValueError: the schedule deadlocks, or a list of costs does not have one for each stage.
    """
    costs = [_per_stage(cost, schedule.stages) for cost in (forward, input_backward, weight_backward)]
    times = {
        Kind.F: costs[0],
        Kind.B: [one + other for one, other in zip(costs[1], costs[2], strict=True)],
        Kind.I: costs[1],
        Kind.W: costs[2],
    }
    spans: list[list[Span]] = [[] for _ in range(schedule.ranks)]
    made: dict[Action, tuple[int, float]] = {}
    for rank, action in replay(schedule, [schedule.actions[rank] for rank in range(schedule.ranks)]):
        start = spans[rank][-1].end if spans[rank] else 0.0
        need = needs(schedule, action)
        if need is not None:
            maker, when = made.pop(need)
            start = max(start, when if maker == rank else when + send)
        end = start + times[action.kind][action.stage]
        spans[rank].append(Span(action, start, end))
        result = made_by(action)
        if result is not None:
            made[result] = rank, end
    return Timeline(tuple(tuple(mine) for mine in spans))


def _per_stage(cost: Cost, stages: int) -> list[float]:
    costs = [float(cost)] * stages if isinstance(cost, (int, float)) else [float(one) for one in cost]
    if len(costs) != stages:
        raise ValueError(f"{len(costs)} costs for {stages} stages")
    return costs


def idle_time(
    name: str,
    ranks: int,
    chunks: int,
    micro_batches: int,
    forward: float = 1.0,
    input_backward: float = 1.0,
    weight_backward: float = 1.0,
) -> float:
    """Time of a step in which a rank does not compute, by the closed formula, with free communication.

    Args:
        name: the schedule.
        ranks: pipeline degree p.
        chunks: chunks of layers on each rank, v.
        micro_batches: micro-batches in a step, m.
        forward: time F of a forward pass of one micro-batch through all layers of a rank.
        input_backward: time I for the gradient of their input.
        weight_backward: time W for the gradients of their weights.

    Returns:
        gpipe, 1f1b and pipedream: (p-1)(F+I+W) (Narayanan et al. 2021a, section 2.2.1).
        interleaved: (p-1)(F+I+W)/v (there, section 2.2.2).
        zb_h1: (p-1)(F+I-W) (Qi et al. 2024, table 2), for W no longer than F or I, and m at least p.
        zbv: (p-1)F/2, for F = I, W from F/2 to F, and m at least 3p/2. Qi et al. count a rank's time from its own
            first pass and so find no bubble; here a step begins for all ranks at once, and the last one waits for
            the chunks of the p-1 ranks before it.
        Where these conditions do not hold, `simulate` tells the time.

    Raises:
        UserError: there is no such schedule, or it cannot have these sizes.
    """
    raise_together(mistakes(name, ranks, chunks, micro_batches))
    if name == "zbv":
        return (ranks - 1) * forward / 2
    if name == "zb_h1":
        return (ranks - 1) * (forward + input_backward - weight_backward)
    whole = (ranks - 1) * (forward + input_backward + weight_backward)
    return whole / chunks if name == "interleaved" else whole


def bubble(
    name: str,
    ranks: int,
    chunks: int,
    micro_batches: int,
    forward: float = 1.0,
    input_backward: float = 1.0,
    weight_backward: float = 1.0,
) -> float:
    """`idle_time` over the time of the step's m(F+I+W) of work: (p-1)/m for 1f1b, (p-1)/(vm) for interleaved."""
    idle = idle_time(name, ranks, chunks, micro_batches, forward, input_backward, weight_backward)
    return idle / (micro_batches * (forward + input_backward + weight_backward))
