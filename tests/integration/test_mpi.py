"""Training over MPI by the real command, on this machine and over two nodes of a real Slurm: the bits of a Gloo run.

Two ranks add two numbers in either order, so their sums, and all that follows, must agree to the last bit.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dthpc.monitor.events import read_events
from tests.attempt.runs import alive, wait_for
from tests.integration.trial import STEPS, Trial, submit, write_text
from tests.mpi_installations import FAMILIES, python_of

GATES = (3, 7)
NODES = ("cluster.nodes=2", "cluster.tasks_per_node=1", "cluster.time=0:10:00")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mpi")
    write_text(folder / "text")
    return folder


@pytest.fixture(scope="module")
def reference(root: Path) -> Trial:
    """A run over Gloo that nobody interrupts."""
    trial = Trial(root, "reference", "comm.backend=gloo").submit()
    trial.end(0)
    return trial


def backends(trial: Trial) -> list[str]:
    """What each attempt says its ranks talked by."""
    events, _ = read_events(trial.run.events)
    return [event["backend"] for event in events if event["kind"] == "ranks_ready"]


def ranks_of(trial: Trial) -> dict[int, int]:
    """Process ids of a run's ranks that live, by rank."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"dthpc.attempt.rank" in words and os.fsencode(trial.run.path) in words and alive(int(folder.name)):
                env = dict(
                    pair.split(b"=", 1) for pair in (folder / "environ").read_bytes().split(b"\0") if b"=" in pair
                )
                found[int(env.get(b"DTHPC_RANK") or env[b"SLURM_PROCID"])] = int(folder.name)
        except (OSError, ValueError):
            continue
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_local_ranks_are_killed_preempted_and_end_with_the_bits_of_gloo(
    family: str, root: Path, reference: Trial
) -> None:
    python = f"cluster.python={python_of(family)}"
    name = family.lower().replace(" ", "")
    trial = Trial(root, f"local-{name}", "comm=mpi", python, "checkpoint.every=2", gates=GATES).submit().held(3)
    os.kill(ranks_of(trial)[1], signal.SIGKILL)
    end = trial.end(0)
    assert (end["cause"], end["decision"]) == ("crash", "restart")
    assert "rank 1 was killed by SIGKILL" in end["reason"]
    trial.open(3).held(7)
    os.kill(int(trial.job), signal.SIGUSR2)
    assert trial.end(1)["cause"] == "preempted"
    trial.open(7).end(2)
    assert trial.ends()[-1] == ("finished", "finish")
    assert all("mpi4py" in backend for backend in backends(trial))
    assert trial.bits() == reference.bits()
    assert trial.losses() == reference.losses()
    wait_for(lambda: not alive(int(trial.job)) and not ranks_of(trial))


@pytest.mark.slurm
def test_over_two_nodes_a_rank_is_killed_the_job_preempted_and_the_bits_are_those_of_gloo(
    minicluster: Any, root: Path, reference: Trial
) -> None:
    words = (*NODES, "comm=mpi", "checkpoint.every=2", f"cluster.python={python_of('MPICH')}")
    trial = Trial(root, "two-nodes", *words, gates=GATES, cluster=minicluster).submit().held(3)
    os.kill(ranks_of(trial)[1], signal.SIGKILL)
    end = trial.end(0)
    assert (end["cause"], end["decision"]) == ("crash", "requeue")
    assert "rank 1 was killed by SIGKILL" in end["reason"]
    trial.open(3).release().held(7)
    minicluster.preempt(trial.job)
    assert trial.end(1)["cause"] == "preempted"
    trial.open(7).release().done()
    assert trial.ends()[-1] == ("finished", "finish")
    assert all("mpi4py" in backend for backend in backends(trial))
    assert "--mpi=pmi2" in (trial.run.path / "launch.json").read_text()
    assert trial.bits() == reference.bits()
    assert trial.losses() == reference.losses()
    assert sorted(trial.losses()) == list(range(1, STEPS + 1))


@pytest.mark.slurm
def test_ranks_that_srun_did_not_wire_up_are_refused_with_the_fix(minicluster: Any, root: Path) -> None:
    words = (*NODES, "comm=mpi", "comm.mpi_plugin=none", f"cluster.python={python_of('MPICH')}")
    trial = Trial(root, "lonely", *words, cluster=minicluster).submit()
    end = trial.end(0)
    assert (end["cause"], end["decision"]) == ("user_error", "stop")
    assert "rank 0 of 1" in end["reason"]
    assert "comm.mpi_plugin=auto" in end["reason"]
    trial.done("FAILED")


@pytest.mark.slurm
def test_a_dry_run_shows_how_slurm_wires_the_ranks_up(minicluster: Any, root: Path) -> None:
    words = [*Trial(root, "dry", *NODES, "comm=mpi", f"cluster.python={python_of('MPICH')}").words, "dry_run=true"]
    told = submit(words, minicluster)
    [preview] = told["runs"]
    assert "--mpi=pmi2" in preview["ranks_command"]
    assert "can use pmi2; Slurm offers" in preview["site"]["decisions"]["reasons"]["mpi"]
    assert "pmi2" in preview["site"]["learnt"]["mpi_types"]
