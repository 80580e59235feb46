"""The console script `dthpc`: `dthpc VERB …` is `python -m dthpc.VERB …`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from dthpc import __version__
from dthpc.errors import nearest

VERBS = {
    "submit": "check a configuration and start its run: here, or on a cluster with +cluster=slurm",
    "status": "show all runs, or one in detail; --watch follows it",
    "doctor": "a node's topology, where ranks would go on it, and what is wrong with it",
}
"""Verbs and what they do; each is a module of the package with `main(argv) -> exit code`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb that the words name.

    Args:
        argv: words after the program's name; those of the process by default.

    Returns:
        The verb's exit code; 2 for a verb that does not exist.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        # Help that was asked for is an answer; help for want of a verb is an error.
        print(usage(), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"dthpc {__version__}")
        return 0
    verb = words[0]
    if verb not in VERBS:
        print(f"dthpc: there is no verb {verb!r}; {nearest(verb, VERBS)} (`dthpc --help` lists them)", file=sys.stderr)
        return 2
    # Imported only now: `dthpc status` must not pay for Hydra.
    door = importlib.import_module(f"dthpc.{verb}")
    return int(door.main(words[1:]))


def usage() -> str:
    """The text of `dthpc --help`."""
    verbs = "\n".join(f"  {verb:<8} {what}" for verb, what in VERBS.items())
    return (
        "usage: dthpc VERB [ARGUMENTS]\n\n"
        "Trains large models on HPC clusters, through Slurm, preemption and requeue.\n\n"
        f"verbs:\n{verbs}\n\n"
        "options:\n  -h, --help     show this text; `dthpc VERB --help` shows the verb's own\n"
        "  -V, --version  show the version"
    )
