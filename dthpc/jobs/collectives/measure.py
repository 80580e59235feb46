"""Times of one call: warm-up, as many repetitions as time allows, the slowest rank's time of each, and the check."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from dthpc.jobs.collectives.buffers import Arena, Case, count_of, fill, wrong_elements
from dthpc.jobs.collectives.control import Control
from dthpc.jobs.collectives.drivers import Call, Driver
from dthpc.jobs.collectives.groups import Partition, Place
from dthpc.jobs.collectives.line import Line, median, percentile
from dthpc.jobs.collectives.settings import Settings
from dthpc.jobs.collectives.terms import algorithm_bandwidth, bus_bandwidth

FEWEST, MOST = 5, 1000
"""Repetitions, where the time decides; of calls that take longer than twice that time, only two."""

BLOCK = 50
"""Repetitions between two looks at the clock that all ranks agree on."""


def measure(
    driver: Driver, partition: Partition, places: Sequence[Place], operation: str, size: int, control: Control,
    arena: Arena, settings: Settings,
) -> list[Line]:  # fmt: skip
    """Measure one operation of one size, in each form that the library has and the settings ask for; collective.

    Args:
        driver: the library, in this rank's group.
        partition: the groups.
        places: of all ranks.
        operation: which.
        size: bytes, about: shares are whole elements.
        control: all ranks.
        arena: memory.
        settings: the job's.
    """
    lines = []
    members = partition.group_of(control.rank)
    for in_place in driver.forms(operation):
        if in_place not in settings.forms and len(driver.forms(operation)) > 1:
            continue
        count = count_of(operation, size, partition.size, settings.dtype)
        rank = members.index(control.rank)
        case = Case(operation, count, len(members), rank, settings.dtype, settings.redop, in_place)
        operand, result = arena.lend(case)
        call = driver.call(case, operand, result)
        wrong = None
        if settings.check:
            fill(case, operand, result)
            call()
            wrong = int(control.total(wrong_elements(case, result)))
        # Sums of noughts stay noughts, however often they are taken in place.
        operand.zero_()
        result.zero_()
        times = repeat(call, driver.barrier if operation != "barrier" else None, control, settings)
        seconds = [each / 2 for each in times] if operation == "ping_pong" else times
        lines.append(_line(driver.name, partition, places, case, seconds, wrong))
    return lines


def repeat(call: Call, barrier: Call | None, control: Control, settings: Settings) -> list[float]:
    """Seconds of each repetition: of the slowest of all ranks.

    Args:
        call: what is timed.
        barrier: of this rank's group, before each repetition, so that none is late because of the one before.
        control: all ranks, which repeat equally often.
        settings: the job's.
    """
    estimate = _warm_up(call, barrier, control, settings)
    left = settings.iterations or _repetitions(estimate, settings.seconds)
    began, times = time.perf_counter(), []
    while left > 0:
        block = min(left, BLOCK)
        times += [_time(call, barrier) for _ in range(block)]
        left -= block
        spent = control.largest([time.perf_counter() - began])[0]
        if settings.iterations is None and spent > settings.seconds:
            break
    return control.largest(times)


def _warm_up(call: Call, barrier: Call | None, control: Control, settings: Settings) -> float | None:
    """The least time of the calls that are not counted; None where there are none."""
    least = None
    for number in range(settings.warmup):
        least = control.largest([min(_time(call, barrier), least or math.inf)])[0]
        if number == 0 and least > settings.seconds and settings.iterations is None:
            break  # a call that is slower than the whole budget is warm after one
    return least


def _repetitions(estimate: float | None, seconds: float) -> int:
    if estimate is None:
        return FEWEST
    fewest = FEWEST if estimate * FEWEST < 10 * seconds else 2
    return min(MOST, max(fewest, math.ceil(seconds / max(estimate, 1e-9))))


def _time(call: Callable[[], None], barrier: Callable[[], None] | None) -> float:
    if barrier is not None:
        barrier()
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _line(
    backend: str, partition: Partition, places: Sequence[Place], case: Case, times: list[float], wrong: int | None
) -> Line:  # fmt: skip
    ordered = sorted(times)
    middle = median(ordered)
    moved = case.size if case.operation != "barrier" else 0
    return Line(
        backend=backend,
        group=partition.name,
        ranks=partition.size,
        groups=len(partition.groups),
        nodes=partition.nodes(places),
        operation=case.operation,
        size=moved,
        count=case.count if moved else 0,
        dtype=case.dtype,
        redop=case.redop if case.operation in ("all_reduce", "reduce_scatter", "reduce") else None,
        in_place=case.in_place,
        iterations=len(times),
        mean_us=1e6 * sum(times) / len(times),
        min_us=1e6 * ordered[0],
        p50_us=1e6 * middle,
        p90_us=1e6 * percentile(ordered, 0.9),
        p99_us=1e6 * percentile(ordered, 0.99),
        algbw=algorithm_bandwidth(moved, middle),
        busbw=bus_bandwidth(case.operation, case.ranks, moved, middle),
        link_load=partition.link_load(case.operation, places),
        wrong=wrong,
    )
