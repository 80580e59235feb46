"""The job that measures collectives: groups → libraries → operations and sizes → pairs → what is slow → files."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dthpc.comm.addresses import host_identity
from dthpc.jobs.collectives import plots, report
from dthpc.jobs.collectives.buffers import DTYPES, Arena
from dthpc.jobs.collectives.control import Control
from dthpc.jobs.collectives.drivers import Driver, MessageDriver
from dthpc.jobs.collectives.groups import Partition, Place, layout_of, partitions, place_ranks
from dthpc.jobs.collectives.judge import doubts, judge, rate, verdict
from dthpc.jobs.collectives.libraries import Libraries, find_libraries, make_drivers, make_two_levels
from dthpc.jobs.collectives.line import Line
from dthpc.jobs.collectives.link_rate import interface_rate
from dthpc.jobs.collectives.measure import measure
from dthpc.jobs.collectives.pairs import measure_pairs, member_sets
from dthpc.jobs.collectives.report import Results
from dthpc.jobs.collectives.room import free_memory, largest_message
from dthpc.jobs.collectives.settings import Settings, no_room, settings_of
from dthpc.monitor.units import size
from dthpc.rundir import read_json, write_json

if TYPE_CHECKING:
    from dthpc.context import RankContext


def run(config: Any, context: RankContext) -> None:
    """Measure what `config.job` says, and leave `collectives.json`, a table and plots in the run's folder.

    Args:
        config: the whole configuration, resolved; see `dthpc.config.jobs.CollectivesJob`.
        context: this rank; `torch.distributed` is initialised.

    Raises:
        UserError: something that was asked for does not work here.
        Stopped: the run was asked to stop; what was measured is not kept.
    """
    settings = settings_of(config)
    control = Control(context.stop)
    measurement = _Measurement(config, context, settings, control)
    results = measurement.run()
    if context.is_first:
        reference = read_json(Path(settings.reference)) if settings.reference else None
        results.findings = judge(results.lines, results.matrices, results.link_gbps, reference, settings.slow)
        results.doubts = doubts(results.lines, results.link_gbps)
        _leave(results, settings, context)
    control.barrier()


class _Measurement:
    """One run of the job on one rank."""

    def __init__(self, config: Any, context: RankContext, settings: Settings, control: Control) -> None:
        self.context, self.settings, self.control = context, settings, control
        identity = context.identity
        hosts = control.gather((host_identity(), identity.host))
        self.places: list[Place] = place_ranks(hosts)
        self.results = Results([place.host for place in self.places])
        self.results.link_gbps, self.results.link_source = self._link()
        layout = layout_of(config, identity.world_size)
        self.partitions, left_out = partitions(layout, self.places, settings.groups)
        self.libraries: Libraries = find_libraries(settings, context)
        self.results.backends = self.libraries.told
        self.results.notes += [*left_out, *self.libraries.left_out]
        self.timeout = timedelta(seconds=float(config.comm.timeout_s))
        self.arena = self._arena()

    def run(self) -> Results:
        """Measure everything, group by group."""
        for partition in self.partitions:
            drivers = make_drivers(self.libraries, partition, self.context, self.timeout)
            for driver in drivers:
                for operation in self.settings.operations:
                    self._sweep(driver, partition, operation)
            if partition.name == "world":
                self._pairs(drivers, partition)
                self._two_levels(partition)
            for driver in drivers:
                driver.close()
        if self.settings.pairs != "none" and all(partition.name != "world" for partition in self.partitions):
            self.results.notes.append("pairs: they are measured among all ranks, and job.groups leaves world out")
        return self.results

    def _sweep(self, driver: Driver, partition: Partition, operation: str) -> None:
        """All sizes of one operation."""
        lines: list[Line] = []
        for bytes_ in [0] if operation == "barrier" else self.sizes:
            self.control.end_if_asked()
            lines += measure(driver, partition, self.places, operation, bytes_, self.control, self.arena, self.settings)
        self.results.lines += lines
        if self.context.events is not None and lines:
            self.context.events.write("measured", text=_told(partition, operation, driver, lines))

    def _two_levels(self, world: Partition) -> None:
        """All-reduce in one step and in three; only sums are made so."""
        wanted = self.settings.hierarchical and "all_reduce" in self.settings.operations
        if not wanted or self.settings.redop != "sum":
            return
        drivers = make_two_levels(self.libraries, world, self.places, self.context, self.timeout)
        for driver in drivers:
            self._sweep(driver, world, "all_reduce")
        for driver in reversed(drivers):
            driver.close()

    def _pairs(self, drivers: Sequence[MessageDriver], world: Partition) -> None:
        """The matrices, by the first library, and the bisection by each."""
        if self.settings.pairs == "none":
            return
        for kind, sets in member_sets(self.places, self.settings.pairs):
            self.results.matrices += measure_pairs(drivers[0], kind, sets, self.places, self.control, self.settings)
        bytes_ = min(self.settings.pair_size, self.limit)
        for driver in drivers:
            self.results.bisection += measure(
                driver, world, self.places, "sendrecv", bytes_, self.control, self.arena, self.settings
            )

    def _arena(self) -> Arena:
        """Memory for the largest message that all ranks have room for."""
        local = sum(place.node == self.places[self.control.rank].node for place in self.places)
        mine = largest_message(free_memory(), local, self.settings.memory_share)
        self.limit = self.results.largest = int(self.control.smallest([mine])[0])
        self.sizes = self.settings.sizes(self.limit)
        beyond = self.settings.beyond(self.limit)
        if beyond is not None:
            left = f"messages up to {size(beyond)}: there is memory for {size(self.limit)} (job.memory_share)"
            self.results.notes.append(left)
        if not self.sizes:
            raise no_room(self.limit)
        largest = max(*self.sizes, min(self.settings.pair_size, self.limit))
        # At least one element of each rank, whatever the size.
        room = max(largest, DTYPES[self.settings.dtype].itemsize * self.control.size)
        return Arena(room, self.settings.dtype, self.context.device)

    def _link(self) -> tuple[float | None, str]:
        """The rate of the slowest node's link, on all ranks alike."""
        if self.settings.link_gbps is not None:
            return self.settings.link_gbps, "job.link_gbps"
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        mine = interface_rate(interface)
        slowest = self.control.smallest([math.inf if mine is None else mine])[0]
        if math.isinf(slowest):
            return None, "the kernel does not tell; job.link_gbps=RATE does"
        return slowest, f"the kernel's, of {interface} and its likes on the other nodes; the slowest"


def _told(partition: Partition, operation: str, driver: Driver, lines: Sequence[Line]) -> str:
    """One line for those who watch."""
    first, best = lines[0], max(lines, key=lambda line: line.busbw)
    wrong = sum(line.wrong or 0 for line in lines)
    text = f"{partition.title}  {operation}  {driver.name}: {first.p50_us:.1f} µs"
    if first.size:
        text += f" for {size(first.size)}, up to {rate(best.busbw)} busbw at {size(best.size)}"
    return text + (f"; {wrong} WRONG ELEMENTS" if wrong else "")


def _leave(results: Results, settings: Settings, context: RankContext) -> None:
    """Write the files, and what the last screen shows."""
    folder = context.run.path
    write_json(context.run.collectives, report.to_json(results, asdict(replace(settings, spans=()))))
    table = folder / "collectives.txt"
    table.write_text(report.full_table(results), encoding="utf-8")
    files = [context.run.collectives.name, table.name]
    for name, picture in _pictures(results).items() if settings.plots else ():
        (folder / name).write_text(picture, encoding="utf-8")
        files.append(name)
    assert context.events is not None
    context.events.write(
        "report",
        job="collectives",
        result=verdict(results.findings),
        tables=[report.summary_table(results), *report.pair_tables(results.matrices)],
        rows=[*report.summary_rows(results), ["files", ", ".join(files)]],
    )


def _pictures(results: Results) -> dict[str, str]:
    """SVG documents by file name."""
    found = {}
    for group in dict.fromkeys(line.group for line in results.lines):
        lines = [line for line in results.lines if line.group == group]
        if any(line.busbw > 0 and line.operation != "ping_pong" for line in lines):
            title = f"{group}: {lines[0].ranks} ranks on {lines[0].nodes} node{'s' if lines[0].nodes > 1 else ''}"
            found[f"collectives-{group}.svg"] = plots.bandwidth_svg(title, lines, results.link_gbps)
    for matrix in results.matrices:
        found[f"pairs-{matrix.name.replace('ranks of ', '')}.svg"] = plots.pairs_svg(matrix)
    return found
