"""`cluster.exclude`: a host list, in which `preflight:RUN` stands for the bad nodes that a preflight has found."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dthpc.errors import UserError, nearest
from dthpc.rundir import RunDir, read_json
from dthpc.slurm.hostlist import expand

KEY = "cluster.exclude"
LAST = "last"

_REFERENCE = re.compile(r"(?:^|(?<=,))\s*preflight:([^,\s\[\]]+)\s*(?:,|$)")


def excluded_nodes(cfg: Any) -> list[str]:
    """The nodes to avoid, each once, in the order given.

    `preflight:RUN` names a run of `job=preflight` under `run.root`, or its folder; `preflight:last` the newest there.

    Raises:
        UserError: the host list is malformed, or there is no such preflight, or it has not ended.
    """
    value = cfg.cluster.exclude
    if value is None:
        return []
    text = str(value)
    runs = _REFERENCE.findall(text)
    rest = _REFERENCE.sub("", text)
    try:
        named = expand(rest)
    except UserError as error:
        raise UserError(error.why, key=KEY, value=value, instead=error.instead) from error
    if not named and not runs:
        raise UserError("names no host", key=KEY, value=repr(value), instead="leave it out")
    found = [node for run in runs for node in bad_nodes(run, Path(cfg.run.root))]
    return list(dict.fromkeys([*named, *found]))


def bad_nodes(run: str, root: Path) -> list[str]:
    """The nodes that a preflight called bad.

    Args:
        run: its name, its folder, or `last`.
        root: where runs lie.

    Raises:
        UserError: there is none, or it has not ended.
    """
    path = _newest(root) if run == LAST else next((p for p in (root / run, Path(run)) if p.is_dir()), None)
    value = f"preflight:{run}"
    if path is None:
        names = [folder.parent.name for folder in root.glob("*/preflight.json")]
        instead = nearest(run, names) if names else "run one: python -m dthpc.submit +cluster=slurm job=preflight"
        raise UserError(f"there is no such preflight under {root}", key=KEY, value=value, instead=instead)
    told = read_json(RunDir(path).preflight)
    if not isinstance(told, dict) or not isinstance(told.get("bad"), list):
        why = "the run holds no preflight.json: it is no preflight, or has not ended"
        raise UserError(why, key=KEY, value=value, instead=f"wait for it, or see `python -m dthpc.status {path}`")
    return [str(node) for node in told["bad"]]


def _newest(root: Path) -> Path | None:
    found = sorted(root.glob("*/preflight.json"), key=lambda path: path.stat().st_mtime)
    return found[-1].parent if found else None
