"""Ranks under MPI's launchers, kept by a real keeper: whatever holds for plain children must hold for them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dthpc.attempt.mpi_wiring import MpiWiring, launcher_environment, without_outer, without_outer_mpi
from dthpc.errors import UserError
from dthpc.launch.mpi import plan_mpi
from dthpc.rundir import RunDir, read_json
from tests.attempt.runs import alive, end_of, keep, make_run, start_keeper, wait_for, wait_ready
from tests.launch.sites import make_config
from tests.mpi_installations import FAMILIES, python_of


def launcher_of(python: Path) -> list[str]:
    config = make_config(kind="local", python=str(python))
    config.comm.backend = "mpi"
    start = plan_mpi(config, None)
    assert start is not None
    return list(start.launcher)


@pytest.fixture(params=FAMILIES)
def plan(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Settings of a launch plan whose ranks meet by this MPI."""
    python = python_of(request.param)
    return {
        "rank_command": [str(python), "-m", "tests.attempt.mpi_rank"],
        "mpi": {"launcher": launcher_of(python)},
        "requeue": "never",
    }


def processes_of(run: RunDir) -> list[int]:
    """Ranks and agents of a run's launcher, and the launcher, that live."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            except OSError:
                continue
            if os.fsencode(f"DTHPC_TEST_RUN={run.path}") in words and alive(int(folder.name)):
                found.append(int(folder.name))
    return found


def test_ranks_meet_by_mpi_under_the_numbers_that_the_keeper_gave_them(tmp_path: Path, plan: dict[str, Any]) -> None:
    run = make_run(tmp_path / "run", [["finish"] * 3], **plan)
    code, output = keep(run)
    assert code == 0, output
    seen = [read_json(run.attempt(0).path / f"mpi-{rank}.json") for rank in range(3)]
    assert [(each["rank"], each["size"], each["total"]) for each in seen] == [(0, 3, 6), (1, 3, 6), (2, 3, 6)]
    assert end_of(run, 0)["exit_codes"] == {"rank 0": 0, "rank 1": 0, "rank 2": 0}
    assert sorted(path.name for path in run.attempt(0).path.glob("rank-*.log")) == [
        f"rank-{rank:05d}.log" for rank in range(3)
    ]


def test_all_ranks_are_asked_to_save_and_stop(tmp_path: Path, plan: dict[str, Any]) -> None:
    run = make_run(tmp_path / "run", [["save", "save"]], **plan)
    keeper = start_keeper(run.path)
    wait_ready(run, 0, 2)
    keeper.send_signal(signal.SIGTERM)
    assert keeper.wait(timeout=60) == 75
    end = end_of(run, 0)
    assert (end["cause"], end["rank_codes"]) == ("stopped", {"0": 75, "1": 75})


def test_a_killed_rank_is_told_as_the_cause_and_ends_the_others(tmp_path: Path, plan: dict[str, Any]) -> None:
    run = make_run(tmp_path / "run", [["save", "helper"]], **plan)
    keeper = start_keeper(run.path)
    _, killed = wait_ready(run, 0, 2)
    helper = int((run.path / "helper-1").read_text())
    os.kill(killed, signal.SIGKILL)
    # MPI cannot be taken down without the rank that died, so a survivor may hang there until it is killed.
    assert keeper.wait(timeout=60) == 1
    end = end_of(run, 0)
    assert end["reason"].startswith("rank 1 was killed by SIGKILL"), end["reason"]
    assert end["exit_codes"]["rank 1"] == -signal.SIGKILL
    assert not alive(helper)


def test_a_rank_that_calls_mpi_abort_ends_all_with_its_words(tmp_path: Path, plan: dict[str, Any]) -> None:
    run = make_run(tmp_path / "run", [["save", "abort"]], **plan)
    code, output = keep(run)
    assert code == 1, output
    end = end_of(run, 0)
    assert end["cause"] == "crash"
    assert 7 in end["exit_codes"].values(), end
    # Open MPI's ends the rank that calls it, MPICH's lets the launcher kill all.
    assert "ranks ended without a word" in end["reason"]
    assert "Abort" in end["reason"] or "gives up" in end["reason"], end["reason"]


def test_nothing_outlives_a_keeper_that_is_killed(tmp_path: Path, plan: dict[str, Any]) -> None:
    run = make_run(tmp_path / "run", [["helper", "deaf"]], **plan)
    keeper = start_keeper(run.path, env={"DTHPC_TEST_RUN": str(run.path)})
    wait_ready(run, 0, 2)
    assert len(processes_of(run)) >= 6  # keeper, launcher, an agent for each rank, the ranks
    keeper.kill()
    keeper.wait()
    wait_for(lambda: not [pid for pid in processes_of(run) if pid != int((run.path / "helper-0").read_text())])
    os.kill(int((run.path / "helper-0").read_text()), signal.SIGKILL)  # a helper answers for itself (worker_signals)


def test_a_launcher_that_fails_is_told_with_its_words(tmp_path: Path) -> None:
    broken = tmp_path / "mpiexec"
    broken.write_text("#!/bin/sh\necho 'no such fabric'\nexit 3\n")
    broken.chmod(0o755)
    run = make_run(tmp_path / "run", [["finish", "finish"]], mpi={"launcher": [str(broken), "-n"]})
    code, output = keep(run)
    assert code == 2
    assert "mpiexec ended with exit code 3: no such fabric" in output
    absent = MpiWiring([str(tmp_path / "none"), "-n"], 1, {}, tmp_path / "log")
    with pytest.raises(UserError, match="can't be started: No such file"):
        absent.start()


def test_a_launcher_of_another_mpi_is_told_by_its_numbers(tmp_path: Path) -> None:
    loner = tmp_path / "mpiexec"
    loner.write_text('#!/bin/sh\nshift 2\nPMI_RANK=0 "$@" &\nPMI_RANK=0 "$@" &\nwait\n')
    loner.chmod(0o755)
    wiring = MpiWiring([str(loner), "-n"], 2, dict(os.environ), tmp_path / "log")
    with pytest.raises(UserError, match="told a process no rank of its own among 2"):
        wiring.start()


def test_the_launcher_hears_nothing_of_an_outer_job() -> None:
    outer = {"PMI_FD": "7", "PMIX_RANK": "1", "SLURM_JOB_ID": "9", "OMPI_COMM_WORLD_RANK": "0", "MPI_LOCALRANKID": "0"}
    kept = {
        "PATH": "/bin",
        "PMIX_MCA_gds": "hash",
        "OMPI_MCA_btl": "self",
        "HYDRA_FULL_ERROR": "1",
        "I_MPI_FABRICS": "shm",
    }
    assert without_outer({**outer, **kept}) == kept
    assert {name: value for name, value in launcher_environment(outer).items() if "ROOT" not in name} == {}
    assert without_outer_mpi({**outer, **kept}) == {**kept, "SLURM_JOB_ID": "9"}
