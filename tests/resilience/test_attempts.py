from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from dthpc.resilience.attempts import (
    attempts_without_progress,
    committed_checkpoints,
    config_digest,
    is_current,
    is_finished,
    newest_step,
    of_chain,
    read_attempts,
)
from dthpc.rundir import RunDir, write_json


def add(run: RunDir, number: int, start: dict[str, Any], end: dict[str, Any] | None) -> None:
    write_json(run.attempt(number).start, start)
    if end is not None:
        write_json(run.attempt(number).end, end)


def test_progress_is_a_checkpoint_that_the_next_attempt_finds_new(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    add(run, 0, {"chain": "a", "checkpoints": {}}, {"cause": "preempted", "progressed": False})
    add(run, 1, {"chain": "a", "checkpoints": {"step-00000010": 5}}, {"cause": "crash", "progressed": False})
    add(run, 2, {"chain": "a", "checkpoints": {"step-00000010": 5}}, {"cause": "crash", "progressed": False})
    add(run, 10, {"chain": "b", "checkpoints": {"step-00000010": 6}}, None)
    attempts = read_attempts(run)
    assert [attempt.number for attempt in attempts] == [0, 1, 2, 10]
    # 0 committed after its keeper had written the end; 2 replaced a checkpoint by another of the same step.
    assert [attempt.progressed for attempt in attempts] == [True, False, True, False]
    assert [attempt.cause for attempt in attempts] == ["preempted", "crash", "crash", None]
    assert attempts_without_progress(attempts[:2]) == 1
    assert attempts_without_progress(attempts) == 0
    assert [attempt.number for attempt in of_chain(attempts, "a")] == [0, 1, 2]


def test_only_committed_checkpoints_count(tmp_path: Path) -> None:
    for name in ("step-00000010", "step-00000200", "step-00000300.partial-1", "other"):
        (tmp_path / name).mkdir()
    found = committed_checkpoints(tmp_path)
    assert sorted(found) == ["step-00000010", "step-00000200"]
    assert newest_step(found) == 200
    assert committed_checkpoints(tmp_path / "absent") == {}
    assert newest_step({}) is None


def test_finished_counts_for_the_configuration_that_finished(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.config.write_text("steps: 10\n")
    add(run, 0, {}, {"cause": "finished", "config_digest": config_digest(run)})
    add(run, 1, {}, {"cause": "crash"})
    assert is_finished(run, read_attempts(run))
    run.config.write_text("steps: 20\n")
    assert not is_finished(run, read_attempts(run))


def test_an_attempt_is_current_until_a_later_one_begins(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.attempt(3).path.mkdir(parents=True)
    assert is_current(run, 3)
    assert not is_current(run, 2)


def test_the_history_is_read_without_torch() -> None:
    code = "import sys; import dthpc.resilience.attempts, dthpc.resilience.decide; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
