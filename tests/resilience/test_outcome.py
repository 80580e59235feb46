from __future__ import annotations

from pathlib import Path

from dthpc.resilience.outcome import Death, Outcome, RankRecord, first_failure, is_echo, read_records, read_verdict
from dthpc.rundir import RunDir, read_json, write_json


def test_a_record_comes_back_as_it_was_written_with_the_code_of_its_cause(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path).attempt(0)
    for rank, (cause, code) in enumerate([("finished", 0), ("preempted", 75), ("user_error", 2), ("crash", 1)]):
        record = RankRecord(rank, cause, signal="SIGTERM", error="e", traceback_tail=["a", "b"], step=3)
        record.write(attempt)
        assert read_json(attempt.rank_exit(rank))["code"] == code == record.code
        assert read_records(attempt)[rank] == record


def test_what_is_no_record_is_passed_over(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path).attempt(0)
    RankRecord(1, "finished").write(attempt)
    attempt.rank_exit(0).write_text('{"rank": 0, "cau')
    attempt.rank_exit(2).write_text("[]")
    assert list(read_records(attempt)) == [1]


def test_the_first_failure_in_time_is_the_cause() -> None:
    records = [
        RankRecord(0, "crash", time=3.0, error="echo"),
        RankRecord(1, "preempted", time=1.0),
        RankRecord(2, "user_error", time=2.0, error="cause"),
    ]
    failure = first_failure(records)
    assert failure is not None
    assert failure.error == "cause"
    assert first_failure(records[1:2]) is None


def test_a_failure_that_is_known_to_be_an_echo_is_not_the_first_whatever_the_clocks_say() -> None:
    echo = RankRecord(0, "crash", time=1.0, error="rank 1 on b failed: ValueError", echo=True)
    cause = RankRecord(1, "crash", time=9.0, error="ValueError")
    assert first_failure([echo, cause]) is cause
    assert first_failure([echo]) is echo


def test_a_death_is_the_cause_before_what_the_watchdogs_of_the_others_say() -> None:
    records = {0: RankRecord(0, "crash", error="rank 1 on b is gone", echo=True)}
    death = Outcome(2, records, {"rank 1": -9, "rank 0": 1}).first_death
    assert death == Death(1, "SIGKILL")


def test_a_verdict_comes_back_as_the_watchdogs_left_it(tmp_path: Path) -> None:
    attempt = RunDir(tmp_path).attempt(0)
    assert read_verdict(attempt) == ""
    write_json(attempt.verdict, {"why": "rank 3 never came", "details": [], "blamed": [3]})
    assert read_verdict(attempt) == "rank 3 never came"


def test_errors_that_tell_of_other_ranks_are_known() -> None:
    assert is_echo("RuntimeError: Connection closed by peer [10.0.0.1]:394")
    assert is_echo("RankLost: rank 2 did not take part in a collective within 6 s")
    assert not is_echo("ValueError: a hole in the data")


def test_a_run_is_finished_only_when_every_rank_says_so() -> None:
    both = {rank: RankRecord(rank, "finished") for rank in range(2)}
    assert Outcome(2, both, {}).all_finished
    assert not Outcome(3, both, {}).all_finished
    assert Outcome(3, both, {}).silent == [2]
    assert not Outcome(2, {**both, 1: RankRecord(1, "preempted")}, {}).all_finished


def test_a_rank_that_was_killed_first_is_the_failure_and_one_that_was_killed_later_is_not() -> None:
    broken = {1: RankRecord(1, "crash", error="RuntimeError: Connection reset by peer")}
    first = Outcome(2, broken, {"rank 0": -9, "rank 1": 1})
    assert first.first_death == Death(0, "SIGKILL")
    assert first.to_json()["first_failure"]["rank"] == 0
    # The keeper kills whoever does not end after the first failure.
    assert Outcome(2, broken, {"rank 1": 1, "rank 0": -9}).first_death is None
    # NCCL's watchdog aborts a rank because of another one's error.
    own = {1: RankRecord(1, "crash", error="ValueError: the data has a hole")}
    assert Outcome(2, own, {"rank 0": -6, "rank 1": 1}).first_death is None
    told = Outcome(2, broken, {"srun": 137}, srun_deaths=(Death(0, "SIGKILL"),))
    assert told.first_death == Death(0, "SIGKILL")
