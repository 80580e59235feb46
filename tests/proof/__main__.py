"""Holds layouts against one process: `python -m tests.proof [--backend mpi] [--all] [--only WORDS] [--table FILE]`."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.proof.cases import Case, all_cases, chosen_cases, covered, picked_cases
from tests.proof.compare import Deviation, deviation, limit_of
from tests.proof.table import TABLE_MARK, table
from tests.ranks import RankFailed, RankPool, pool


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print a line for each layout, and return how many are over a limit, at most 1."""
    options = _parser().parse_args(arguments)
    cases = [*all_cases(), *picked_cases()] if options.all else chosen_cases()
    if options.only:
        cases = [case for case in cases if set(options.only.split()) <= set(case.features)]
    ranks = pool_of(options.backend)
    started, failed = time.monotonic(), 0
    results: dict[Case, Deviation] = {}
    for number, case in enumerate(cases, start=1):
        found, told = _hold(ranks, case)
        results[case] = found
        failed += not found.within(limit_of(case))
        verdict = "ok " if found.within(limit_of(case)) else "BAD"
        print(f"{number}/{len(cases)} {verdict} {case.ranks} ranks, {case}: {told}", flush=True)
    print(f"{len(cases)} layouts, {failed} over a limit, {time.monotonic() - started:.0f} s")
    for size, words in ((2, "pairs"), (3, "triples")):
        print("{} of {} {} of features".format(*covered(cases, size), words))
    if options.table:
        path = Path(options.table)
        before, mark, _ = path.read_text(encoding="utf-8").partition(TABLE_MARK)
        path.write_text(before + (mark or TABLE_MARK) + "\n\n" + table(results), encoding="utf-8")
    return min(failed, 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.proof", description="Hold layouts against one process.")
    parser.add_argument("--backend", choices=("gloo", "mpi"), default="gloo", help="by what the ranks talk")
    parser.add_argument("--all", action="store_true", help="every feature alone, every pair and triple, and the picked")
    parser.add_argument("--only", metavar="WORDS", help="only layouts that have all of these features")
    parser.add_argument("--table", metavar="FILE", help="write the table into this file, after its mark")
    return parser


def pool_of(backend: str) -> RankPool:
    """The ranks that talk by a backend; those of MPI are loaded only where they are wanted."""
    if backend == "gloo":
        return pool()
    from tests import mpi_ranks

    return mpi_ranks.pool()


def _hold(ranks: RankPool, case: Case) -> tuple[Deviation, str]:
    """The deviation of a layout, and what to print; infinite where its ranks failed."""
    try:
        found = deviation(ranks, case)
    except RankFailed as error:
        return Deviation(math.inf, math.inf, math.inf, "the ranks failed"), str(error)
    return found, "; ".join([str(found), *found.beyond(limit_of(case))])


if __name__ == "__main__":
    sys.exit(main())
