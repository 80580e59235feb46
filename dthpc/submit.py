"""`python -m dthpc.submit`: checks a configuration and starts its run, here or on a cluster."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dthpc import __version__
from dthpc.config.compose import read_command_line
from dthpc.errors import UserError, tell

if TYPE_CHECKING:
    from dthpc.config.compose import Choices
    from dthpc.launch.submission import Prepared

EXIT_USER_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Compose, check, start, and follow where that is wanted.

    Args:
        argv: words of the command line; those of the process by default.

    Returns:
        0 when the runs were submitted (or, where they are followed, finished), 1 when a followed run failed, 2 for a
        mistake of the user's, 130 when a followed run was stopped.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if "--version" in words:
        print(f"dthpc {__version__}")
        return 0
    # Like `python -m`, the console script finds the user's own modules where the command is typed.
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found, _ = read_command_line(words, _program(words))
        return _run(found) if found else 0
    except UserError as error:
        tell(error, as_json=any(re.fullmatch(r"\+*json=(true|yes|on|1)", word, re.IGNORECASE) for word in words))
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return 130


def _program(words: Sequence[str]) -> str:
    # A shell completes the words of one command, and `python` is not ours.
    completes = any(word in ("-sc", "--shell-completion") for word in words)
    return "dthpc-submit" if completes else "python -m dthpc.submit"


def _run(found: Sequence[tuple[Any, Choices]]) -> int:
    from dthpc.launch.submission import prepare, refuse, start

    prepared, site = prepare(found)
    first = prepared[0].config
    if first.dry_run:
        return _preview(prepared, first.json)
    refuse([error for item in prepared for error in item.errors])
    for note in dict.fromkeys(note for item in prepared for note in item.warnings):
        print(f"dthpc: {note}", file=sys.stderr)
    pending = [item for item in prepared if not item.finished]
    for item in prepared:
        if item.finished and not first.json:
            _say_finished(item)
    jobs = start(pending, site) if pending else []
    ids = {item.run.name: str(job.job_id) for item, job in zip(pending, jobs, strict=True)}
    if first.json:
        print(json.dumps({"runs": [_as_dict(item, ids.get(item.run.name)) for item in prepared]}, indent=2))
    follows = first.follow if first.follow is not None else first.cluster.kind != "slurm"
    if follows and not first.json:
        return _follow(pending, jobs)
    if not first.json:
        for item in pending:
            _say_submitted(item, ids[item.run.name])
    return 0


def _preview(prepared: list[Prepared], as_json: bool) -> int:
    from dthpc.launch.preview import Preview

    previews = [Preview(item.run, item.plan, item.verdicts) for item in prepared]
    if as_json:
        print(json.dumps({"runs": [each.as_dict() for each in previews]}, indent=2))
    else:
        print("\n\n".join(each.text() for each in previews))
    return EXIT_USER_ERROR if any(each.refused for each in previews) else 0


def _follow(pending: list[Prepared], jobs: list[Any]) -> int:
    from dthpc.watch.follow import follow
    from dthpc.watch.survey import quick_client

    slurm = quick_client() if shutil.which("squeue") else None
    worst = 0
    for item, job in zip(pending, jobs, strict=True):
        print(f"run {item.run.name}: {item.run.path}")
        local = item.config.cluster.kind != "slurm"
        code = follow(item.run, stop_on_interrupt=local, job=job if local else None, slurm=slurm)
        worst = max(worst, code)
        if code >= 128:
            break
    return worst


def _say_submitted(item: Prepared, job_id: str) -> None:
    what = f"job {job_id}" if item.config.cluster.kind == "slurm" else f"process {job_id}"
    print(f"submitted {what}: run {item.run.name} in {item.run.path}")
    print(f"  follow it: python -m dthpc.status {item.run.path} --watch")
    stop = f"scancel {job_id}" if item.config.cluster.kind == "slurm" else f"kill {job_id}"
    print(f"  end it:    {stop}")


def _say_finished(item: Prepared) -> None:
    print(f"run {item.run.name} is finished already, and the same command would give the same result: {item.run.path}")
    print(f"  look at it: python -m dthpc.status {item.run.path}")
    print("  train on:   add train.steps=N run.on_change=accept run.name=" + item.run.name)
    print("  once more:  add run.name=ANOTHER, or another run.seed")


def _as_dict(item: Prepared, job_id: str | None) -> dict[str, Any]:
    return {
        "name": item.run.name,
        "path": str(item.run.path),
        "kind": item.config.cluster.kind,
        "job_id": job_id,
        "state": "finished" if item.finished else "submitted",
    }


if __name__ == "__main__":
    sys.exit(main())
