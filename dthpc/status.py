"""`python -m dthpc.status [RUN ...]`: all runs, or some in detail. No torch, no Hydra, and it works without Slurm."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from dthpc.errors import UserError, nearest, tell
from dthpc.monitor.summary import short_path
from dthpc.monitor.table import print_lines
from dthpc.options import OptionParser, file
from dthpc.rundir import RunDir
from dthpc.watch.follow import follow
from dthpc.watch.report import SCHEMA, STATES, RunReport
from dthpc.watch.survey import LOG_LINES, Jobs, find_runs, is_run, job_ids, last_lines, quick_client, survey
from dthpc.watch.view import print_detail, print_overview

EXIT_FAILED = 1
EXIT_USER_ERROR = 2

_MOST_LOGS = 8

_EPILOG = f"""\
A RUN is a name under --root, a folder, or the id of a Slurm job.

states: {", ".join(STATES)}
exit codes: 0 fine; {EXIT_FAILED} a run that was asked for failed or is lost; {EXIT_USER_ERROR} there is no such run
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Show runs.

    Args:
        argv: words of the command line; those of the process by default.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        # Runs may stand before, between and after options.
        return _show(_parser().parse_intermixed_args(words), sys.stdout)
    except UserError as error:
        tell(error, "--json" in words, {"schema": SCHEMA})
        return EXIT_USER_ERROR
    except BrokenPipeError:
        # The reader (`head`, `less`) has seen enough; nothing more may be written, not even by the closing interpreter.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="python -m dthpc.status",
        description="Show all runs, or some in detail.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a run to show in detail; none: a table of all")
    parser.add_argument(
        "--root",
        default="runs",
        type=file("--root", "runs"),
        metavar="FOLDER",
        help="folder that holds the runs (default: runs)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--watch", action="store_true", help="follow one run until it ends")
    parser.add_argument(
        "--logs", action="store_true", help="print the last lines of every rank's log of the newest attempt"
    )
    parser.add_argument("--verify", action="store_true", help="verify every checksum of the newest checkpoint")
    return parser


def _show(arguments: argparse.Namespace, out: TextIO) -> int:
    slurm = quick_client()
    if not arguments.runs:
        return _show_all(arguments, slurm, out)
    runs = [_find(word, arguments.root) for word in arguments.runs]
    if arguments.watch:
        if arguments.json:
            raise UserError("shows lines for people", key="--watch", instead="--watch or --json, not both")
        return _watch(runs, slurm, out)
    reports = survey(runs, slurm, detail=True, full_verify=arguments.verify)
    if arguments.json:
        _print_json(reports, arguments.root, out)
    else:
        for number, (run, report) in enumerate(zip(runs, reports, strict=True)):
            if number:
                print_lines(out, "")
            print_detail(out, report)
            if arguments.logs:
                print_logs(out, run)
    return EXIT_FAILED if any(report.state in ("failed", "lost") for report in reports) else 0


def _show_all(arguments: argparse.Namespace, slurm: Jobs | None, out: TextIO) -> int:
    if arguments.watch:
        raise UserError("follows one run, and none is named", key="--watch", instead="status RUN --watch")
    reports = survey(find_runs(arguments.root), slurm, full_verify=arguments.verify)
    # Newest last: that is where the eye is when the prompt comes back.
    reports.sort(key=lambda report: (report.updated or report.submitted or 0.0, report.name))
    if arguments.json:
        _print_json(reports, arguments.root, out)
    elif reports:
        print_overview(out, reports)
    else:
        print_lines(out, f"There is no run under {arguments.root}. Start one with: python -m dthpc.submit")
    return 0


def _print_json(reports: list[RunReport], root: Path, out: TextIO) -> None:
    runs = [report.to_json() for report in reports]
    value = {"schema": SCHEMA, "time": round(time.time(), 3), "root": os.path.abspath(root), "runs": runs}
    out.write(json.dumps(value, indent=2, allow_nan=False) + "\n")
    out.flush()


def _find(word: str, root: Path) -> RunDir:
    """The run that a word means: a name under the root, a folder, or the id of a Slurm job.

    Raises:
        UserError: there is none.
    """
    for path in (root / word, Path(word)):
        if path.is_dir() and is_run(path):
            return RunDir(path)
    runs = find_runs(root)
    if word.split("_")[0].isdigit():
        for run in reversed(runs):
            if word in job_ids(run):
                return run
        raise UserError("no run had a job of this id", key="run", value=word, instead=f"a run under {root}")
    if not runs:
        raise UserError(f"there is no run under {root}", key="run", value=word, instead="name its folder by --root")
    raise UserError(f"there is no such run; {nearest(word, [run.name for run in runs])}", key="run", value=word)


def print_logs(out: TextIO, run: RunDir) -> None:
    """Print the last lines of the logs of a run's newest attempt."""
    numbers = run.attempt_numbers()
    logs = sorted(run.attempt(numbers[-1]).path.glob("rank-*.log")) if numbers else []
    if not logs:
        print_lines(out, "\nno rank has written a log")
    for log in logs[:_MOST_LOGS]:
        lines = last_lines(log, LOG_LINES) or ["(empty)"]
        print_lines(out, "\n".join(["", f"{short_path(log)}:", *(f"  | {line}" for line in lines)]))
    if len(logs) > _MOST_LOGS:
        print_lines(out, f"\n{len(logs) - _MOST_LOGS} more in {short_path(logs[0].parent)}")


def _watch(runs: list[RunDir], slurm: Jobs | None, out: TextIO) -> int:
    if len(runs) > 1:
        raise UserError("follows one run", key="--watch", value=" ".join(run.name for run in runs), instead="name one")
    # Whoever only looks does not stop the run with Ctrl-C; the one who started it in a terminal does.
    return follow(runs[0], stop_on_interrupt=False, slurm=slurm, out=out)


if __name__ == "__main__":
    sys.exit(main())
