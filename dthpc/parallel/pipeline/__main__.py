"""`python -m dthpc.parallel.pipeline SCHEDULE`: draw a schedule, check it, and say what it costs; no torch needed."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TextIO

from dthpc.errors import UserError
from dthpc.parallel.pipeline import draw, theory
from dthpc.parallel.pipeline.names import SCHEDULES, chunks_of
from dthpc.parallel.pipeline.schedule import Schedule, build
from dthpc.parallel.pipeline.verify import Verdict, verify

EXIT_USER_ERROR = 2

_MOST_DRAWN = 20_000
_MOST_VERIFIED = 5_000_000


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message, instead=f"see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Draw, verify and measure one schedule.

    Args:
        argv: words of the command line; those of the process by default.

    Returns:
        The exit code: 0, or 2 for a mistake in the words.
    """
    try:
        _show(_parser().parse_args(argv), sys.stdout)
    except UserError as error:
        print(f"dthpc: {error.message()}", file=sys.stderr)
        return EXIT_USER_ERROR
    except BrokenPipeError:
        # The reader (`head`, `less`) has seen enough; nothing more may be written, not even by the closing interpreter.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m dthpc.parallel.pipeline",
        description="Draw a pipeline schedule, verify it, and tell its bubble and its peak of activations.",
        epilog="3F0 is stage 3, forward pass, micro-batch 0; B is a backward pass, I makes the gradient of the input "
        "only, W those of the weights only.",
    )
    parser.add_argument("schedule", metavar="SCHEDULE", help=", ".join(SCHEDULES))
    parser.add_argument("--ranks", type=_count, default=4, metavar="P", help="pipeline degree (default: 4)")
    parser.add_argument("--micro-batches", type=_count, default=8, metavar="M", help="of a step (default: 8)")
    parser.add_argument(
        "--chunks", type=_count, metavar="V", help="chunks of layers on each rank (default: what the schedule needs)"
    )
    parser.add_argument("--list", action="store_true", help="print each rank's actions instead of the picture")
    parser.add_argument("--rank", type=int, metavar="R", help="print the actions of this rank only")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the picture there as well")
    return parser


def _count(word: str) -> int:
    try:
        number = int(word)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is no whole number from 1 on")
    return number


def _show(arguments: argparse.Namespace, out: TextIO) -> None:
    name, ranks = arguments.schedule, arguments.ranks
    schedule = build(name, ranks, chunks_of(name, arguments.chunks), arguments.micro_batches)
    if arguments.rank is not None:
        if not 0 <= arguments.rank < ranks:
            raise UserError(f"the ranks are 0 to {ranks - 1}", key="--rank", value=arguments.rank)
        print(*schedule.actions[arguments.rank], file=out)
        return
    passes = 2 * schedule.stages * schedule.micro_batches
    if passes > _MOST_VERIFIED:
        raise UserError(
            f"{passes:,} passes are too many to replay here",
            key="--ranks",
            value=ranks,
            instead="fewer ranks or micro-batches, or --rank R for the actions of one rank",
        )
    verdict, timeline = verify(schedule), draw.in_time(schedule)
    if arguments.svg is not None:
        _write_svg(arguments.svg, draw.svg(schedule, timeline))
    if arguments.list:
        for rank in range(ranks):
            print(f"rank {rank}:", *schedule.actions[rank], file=out)
    else:
        small = passes <= _MOST_DRAWN
        print(draw.text(schedule, timeline) if small else f"({passes:,} passes: too many to draw)", file=out)
    _report(schedule, verdict, timeline, out)


def _report(schedule: Schedule, verdict: Verdict, timeline: theory.Timeline, out: TextIO) -> None:
    ranks, stages = _some(schedule.ranks, "rank"), _some(schedule.stages, "stage")
    formula = theory.bubble(schedule.name, schedule.ranks, schedule.chunks, schedule.micro_batches)
    exact = math.isclose(formula, timeline.bubble, abs_tol=1e-9)
    print(f"{schedule.name}: {ranks}, {stages}, {_some(schedule.micro_batches, 'micro-batch', 'es')}", file=out)
    print(f"verified: {verdict.actions} actions, each there once, in an order without deadlock", file=out)
    print(
        f"bubble: {timeline.bubble:.3f} of the computing time where forward, input gradient and weight gradient take "
        f"equally long (formula{'' if exact else ' for more micro-batches'}: {formula:.3f})",
        file=out,
    )
    of = "a rank's layers" if schedule.chunks == 1 else f"1/{schedule.chunks} of a rank's layers"
    peaks = ", ".join(f"rank {rank}: {peak}" for rank, peak in enumerate(verdict.peak_activations))
    print(f"peak activations, each of one micro-batch in {of}: {peaks}", file=out)


def _some(count: int, word: str, plural: str = "s") -> str:
    return f"{count} {word}{plural if count != 1 else ''}"


def _write_svg(path: Path, document: str) -> None:
    try:
        path.write_text(document, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot be written ({error.strerror})", key="--svg", value=path) from None


if __name__ == "__main__":
    sys.exit(main())
