"""Real keepers, real processes, real signals; the ranks do what a script says, without torch."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from dthpc.attempt.lock import Holder, RunLock
from dthpc.monitor.events import EventLog, read_events
from dthpc.rundir import read_json
from dthpc.watch.survey import survey
from tests.attempt.runs import alive, end_of, keep, make_run, start_keeper, wait_for, wait_ready


def test_a_run_that_finishes_leaves_its_records_and_frees_its_lock(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [["finish", "finish"]])
    code, output = keep(run)
    assert code == 0, output
    assert end_of(run, 0) | {"cause": "finished", "decision": "finish"} == end_of(run, 0)
    assert read_json(run.attempt(0).start)["world_size"] == 2
    assert read_json(run.attempt(0).environment)["python"]
    assert not run.lock.exists()
    assert [event["kind"] for event in read_events(run.events)[0]] == ["attempt_start", "attempt_end"]


def test_a_finished_run_starts_no_attempt_until_its_configuration_changes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [["finish"]])
    assert keep(run)[0] == 0
    code, output = keep(run)
    assert (code, run.attempt_numbers()) == (0, [0])
    assert "already finished" in output
    run.config.write_text("job: {more: steps}\n")
    assert keep(run)[0] == 0
    assert run.attempt_numbers() == [0, 1]


def test_sigusr2_preempts_and_the_next_attempt_starts_by_itself(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [["work", "work"], ["finish", "finish"]])
    process = start_keeper(run.path)
    wait_ready(run, 0, 2)
    process.send_signal(signal.SIGUSR2)
    assert process.wait(60) == 0
    first = end_of(run, 0)
    assert (first["cause"], first["decision"], first["progressed"]) == ("preempted", "restart", True)
    assert first["exit_codes"] == {"rank 0": 75, "rank 1": 75}
    assert "saved at step 1" in first["reason"]
    assert end_of(run, 1)["cause"] == "finished"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_lets_the_ranks_save_and_is_not_followed_by_an_attempt(tmp_path: Path, number: int) -> None:
    run = make_run(tmp_path / "run", [["save", "save"], ["finish", "finish"]])
    process = start_keeper(run.path)
    wait_ready(run, 0, 2)
    process.send_signal(number)
    assert process.wait(60) == 75
    assert (end_of(run, 0)["cause"], end_of(run, 0)["decision"]) == ("stopped", "stop")
    assert run.attempt_numbers() == [0]
    assert keep(run)[0] == 0
    assert end_of(run, 1)["cause"] == "finished"


def test_a_second_interrupt_kills(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [["deaf", "helper"]])
    process = start_keeper(run.path)
    ranks = wait_ready(run, 0, 2)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert "asked to save and stop" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 75
    assert end_of(run, 0)["cause"] == "stopped"
    assert "not saved" in end_of(run, 0)["reason"]
    assert not any(alive(pid) for pid in ranks)


def test_a_crash_ends_the_others_and_is_told_with_its_reason(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [["save", "crash"]], restart_on_failure=False)
    code, output = keep(run)
    end = end_of(run, 0)
    assert code == 1
    assert (end["cause"], end["decision"]) == ("crash", "stop")
    assert "rank 1" in end["reason"]
    assert "the test's crash" in end["reason"]
    assert end["first_failure"]["rank"] == 1
    assert end["exit_codes"] == {"rank 0": 75, "rank 1": 1}
    assert "the test's crash" in output


def test_a_rank_that_is_killed_is_named_with_its_signal(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [["save", "kill"]], restart_on_failure=False)
    assert keep(run)[0] == 1
    assert "rank 1 was killed by SIGKILL (out of memory?)" in end_of(run, 0)["reason"]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_is_blamed_and_not_the_survivor_whose_connection_broke(tmp_path: Path, killed: int) -> None:
    script = ["kill", "reset"] if killed == 0 else ["reset", "kill"]
    run = make_run(tmp_path / "run", [script], restart_on_failure=False)
    assert keep(run)[0] == 1
    end = end_of(run, 0)
    assert end["reason"].startswith(f"rank {killed} was killed by SIGKILL (out of memory?)")
    assert end["first_failure"]["rank"] == killed
    report = survey([run], None)[0]
    assert report.failure is not None
    assert (report.failure.rank, report.failure.cause) == (killed, "no record")
    assert "reset" not in (report.why or "")


def test_attempts_without_progress_are_counted_and_end_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [["kill", "save"]], max_attempts_without_progress=3)
    assert keep(run)[0] == 1
    assert run.attempt_numbers() == [0, 1, 2]
    assert [end_of(run, number)["decision"] for number in range(3)] == ["restart", "restart", "stop"]
    assert "3 attempts in a row" in end_of(run, 2)["reason"]
    assert "killed by SIGKILL" in end_of(run, 2)["reason"]
    # The same command again is a new wish of the user, and counts anew.
    assert keep(run)[0] == 1
    assert run.attempt_numbers() == [0, 1, 2, 3, 4, 5]


def test_the_same_crash_at_the_same_place_is_tried_twice_and_no_more(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [["crash", "save"]], max_attempts_without_progress=3)
    assert keep(run)[0] == 1
    assert [end_of(run, number)["decision"] for number in run.attempt_numbers()] == ["restart", "stop"]
    assert "the test's crash; as in the attempt before" in end_of(run, 1)["reason"]


def test_a_user_error_is_never_restarted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [["user_error", "save"]])
    assert keep(run)[0] == 2
    assert (end_of(run, 0)["cause"], run.attempt_numbers()) == ("user_error", [0])


def test_ranks_and_their_helpers_die_with_a_keeper_that_is_killed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [["deaf", "save"], ["finish", "finish"]])
    process = start_keeper(run.path)
    ranks = wait_ready(run, 0, 2)
    process.kill()
    process.wait()
    wait_for(lambda: not any(alive(pid) for pid in ranks))
    code, output = keep(run)
    assert code == 0, output
    lost = end_of(run, 0)
    assert lost["cause"] == "lost"
    assert "killed" in lost["reason"]
    assert end_of(run, 1)["cause"] == "finished"


def test_a_rank_that_dies_leaves_no_helper_behind(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [["helper", "helper"]], restart_on_failure=False)
    process = start_keeper(run.path)
    ranks = wait_ready(run, 0, 2)
    helpers = [int((run.path / f"helper-{rank}").read_text()) for rank in range(2)]
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    assert process.wait(60) == 1
    wait_for(lambda: not any(alive(pid) for pid in helpers))


def test_a_second_keeper_is_refused_with_the_first_ones_whereabouts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [["save"]])
    first = start_keeper(run.path)
    wait_ready(run, 0, 1)
    code, output = keep(run)
    assert code == 2
    assert "already running" in output
    assert str(first.pid) in output
    first.terminate()
    assert first.wait(60) == 75
    assert run.attempt_numbers() == [0]


def test_a_keeper_whose_lock_was_taken_over_ends_without_writing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [["deaf"]])
    process = start_keeper(run.path)
    ranks = wait_ready(run, 0, 1)
    run.lock.unlink()
    RunLock(run, Holder.myself({"SLURM_JOB_ID": "7"})).acquire()
    assert process.wait(60) == 1
    assert not alive(ranks[0])
    assert not run.attempt(0).end.exists()
    assert run.lock.exists()


def test_a_local_sweep_keeps_its_runs_one_after_another(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / name, [[what]]) for name, what in (("a", "finish"), ("b", "user_error"), ("c", "finish"))
    ]
    index = tmp_path / "index.json"
    index.write_text(json.dumps({"runs": [str(run.path) for run in runs]}))
    process = start_keeper("--sweep", index)
    assert process.wait(60) == 2
    assert [end_of(run, 0)["cause"] for run in runs] == ["finished", "user_error", "finished"]
    starts = [read_json(run.attempt(0).start)["time"] for run in runs]
    assert starts == sorted(starts)


@pytest.mark.parametrize("what", ["save", "late"])
def test_a_sweep_that_is_stopped_leaves_word_in_the_runs_that_it_does_not_begin(tmp_path: Path, what: str) -> None:
    first, second = make_run(tmp_path / "a", [[what]]), make_run(tmp_path / "b", [["finish"]])
    index = tmp_path / "index.json"
    index.write_text(json.dumps({"runs": [str(first.path), str(second.path)]}))
    process = start_keeper("--sweep", index)
    EventLog(second.events).write("run_submitted", job_id=str(process.pid), launcher="local")
    wait_ready(first, 0, 1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 75
    assert second.attempt_numbers() == []
    report = survey([second], None)[0]
    assert (report.state, report.why) == ("stopped", "not started; the sweep was stopped")
    # Submitted again, it is a run like any other.
    assert keep(second)[0] == 0
    assert survey([second], None)[0].state == "finished"


def test_a_task_of_an_array_takes_the_run_of_its_index(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, [["finish"]]) for name in "ab"]
    index = tmp_path / "index.json"
    index.write_text(json.dumps({"runs": [str(run.path) for run in runs]}))
    assert start_keeper("--sweep", index, env={"SLURM_ARRAY_TASK_ID": "1"}).wait(60) == 0
    assert [run.attempt_numbers() for run in runs] == [[], [0]]
    outside = start_keeper("--sweep", index, env={"SLURM_ARRAY_TASK_ID": "2"})
    assert outside.wait(60) == 2


def test_a_command_that_does_not_exist_is_told_and_stops_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [["finish"]], rank_command=["/nowhere/python"])
    code, output = keep(run)
    assert code == 2
    assert "/nowhere/python" in output
    assert end_of(run, 0)["cause"] == "user_error"


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    process = start_keeper(tmp_path)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "no launch plan" in output
