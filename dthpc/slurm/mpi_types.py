"""Which kinds of MPI a Slurm can wire up: `srun --mpi=list`, and whether a listed one can be loaded."""

from __future__ import annotations

import re

from dthpc.slurm.client import SlurmClient

_HEADS = re.compile(r"types are|plugin types|versions available", re.IGNORECASE)
_WORD = re.compile(r"[a-z][a-z0-9_]*")
_UNLOADABLE = re.compile(r"can not load|couldn't load|unable to load|Invalid MPI type|cannot find mpi plugin", re.I)


def parse_mpi_list(text: str) -> tuple[str, ...]:
    """The types in the output of `srun --mpi=list`, sorted.

    Slurm before 21.08 prints `srun: pmi2`, later ones a line with the word alone, and versions of PMIx on a line of
    their own.
    """
    found: set[str] = set()
    for line in text.splitlines():
        words = re.sub(r"^srun: ", "", line).strip()
        if _HEADS.search(words):
            words = words.rpartition(":")[2] if ":" in words else ""
        found |= {word for word in re.split(r"[,\s]+", words) if _WORD.fullmatch(word)}
    return tuple(sorted(found))


def ask_mpi_types(client: SlurmClient) -> tuple[str, ...]:
    """The types that this site's `srun` lists; empty where it does not tell."""
    answer = client.try_once(["srun", "--mpi=list"])
    # Older versions print the list where errors go.
    return parse_mpi_list(answer.output or answer.errors)


def why_unloadable(client: SlurmClient, kind: str) -> str | None:
    """Why `srun` can't load a type that it lists; `None` if it can, or says nothing of it.

    A list holds every plugin that is installed; that of PMIx lacks its library on some sites. Nothing is started: the
    test ends before it reaches a node.
    """
    answer = client.try_once(["srun", f"--mpi={kind}", "--test-only", "--ntasks=1", "true"])
    lines = [line.strip() for line in answer.errors.splitlines() if _UNLOADABLE.search(line)]
    return re.sub(r"^srun: (error: )?\s*", "", lines[0]) if lines and answer.code != 0 else None
