from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dthpc.monitor.progress import fold
from dthpc.monitor.summary import report_tables, run_word, summary_lines
from dthpc.monitor.table import Column
from dthpc.rundir import RunDir

EVENTS: list[dict[str, Any]] = [
    {"kind": "ranks_ready", "world_size": 2},
    {"kind": "train_start", "total_steps": 200},
    {"kind": "step", "step": 200, "loss": 1.9, "tokens_per_s": 17000, "step_time": 0.5},
    {"kind": "eval", "step": 200, "loss": 2.0, "bits_per_byte": 2.9, "bigram_bits_per_byte": 3.4},
    {
        "kind": "train_end",
        "step": 200,
        "seconds": 112.0,
        "tokens_per_s": 18234,
        "step_time": 0.412,
        "step_seconds": 100.0,
        "eval_seconds": 5.0,
        "checkpoint_seconds": 0.5,
        "lost_seconds": 0.0,
    },
]


def test_images_are_not_called_tokens_in_the_summary(tmp_path: Path) -> None:
    events = [{**event, "unit": "image"} if event["kind"] == "train_start" else event for event in EVENTS]
    run = RunDir(tmp_path / "demo")
    lines = summary_lines(run, fold(events), None, attempts=1)
    assert "loss           1.9000 training, 2.0000 held-out (nats an image)" in lines
    assert "throughput     18.2k images/s over 2 ranks, 412 ms a step" in lines
    assert not any("token" in line for line in lines)


def test_the_summary_tells_all_in_aligned_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDir(tmp_path / "runs/demo")
    run.tensorboard.mkdir(parents=True)
    assert summary_lines(run, fold(EVENTS), run.checkpoints / "step-00000200", attempts=3) == [
        "finished       demo: step 200/200 in 1m 52s, 3 attempts",
        "loss           1.9000 training, 2.0000 held-out (nats a token)",
        "bits per byte  2.900 held-out; a bigram model: 3.400 (0.500 better)",
        "throughput     18.2k tokens/s over 2 ranks, 412 ms a step",
        "time           1m 40s steps, 5.0 s evaluation, 0.50 s checkpoints",
        "folder         runs/demo",
        "checkpoint     runs/demo/checkpoints/step-00000200",
        "curves         tensorboard --logdir runs/demo/tensorboard",
        "details        python -m dthpc.status demo",
        "go on          the same command with run.name=demo run.on_change=accept and more train.steps",
    ]


def test_what_was_not_recorded_is_left_out(tmp_path: Path) -> None:
    lines = summary_lines(RunDir(tmp_path / "demo"), fold([{"kind": "train_end", "step": 3}]), None, attempts=1)
    assert [line.split()[0] for line in lines] == ["finished", "folder", "details", "go"]


def test_memory_and_loss_scale_have_their_lines(tmp_path: Path) -> None:
    end = {"kind": "train_end", "step": 3, "state_bytes": 3 * 2**20, "loss_scale": 1024.0, "skipped_steps": 1}
    lines = summary_lines(RunDir(tmp_path / "demo"), fold([end]), None, attempts=1)
    told = {line[:10].strip(): line[10:].strip() for line in lines}
    assert told["memory"] == "3.00 MiB of parameters, gradients and optimizer state on rank 0"
    assert told["loss scale"] == "1024, 1 update left out"


def test_a_model_worse_than_the_baseline_is_told_so(tmp_path: Path) -> None:
    worse = {"kind": "eval", "step": 1, "loss": 3.0, "bits_per_byte": 4.0, "bigram_bits_per_byte": 3.5}
    lines = summary_lines(RunDir(tmp_path / "demo"), fold([worse]), None, attempts=1)
    assert any("(0.500 worse)" in line for line in lines)


def test_a_run_is_named_by_what_status_understands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_word(RunDir(tmp_path / "runs/demo")) == "demo"
    assert run_word(RunDir(tmp_path / "other/de mo")) == "'other/de mo'"
    assert run_word(RunDir(Path("/elsewhere/demo"))) == "/elsewhere/demo"


def test_a_job_that_does_not_train_tells_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDir(tmp_path / "runs/links")
    table = {"title": "pairs", "columns": [["from", False], ["n1", True]], "rows": [["n0", "1.00 GB/s"]]}
    found = fold([{"kind": "report", "tables": [table], "rows": [["result", "slow"], ["", "n1 is slow"]]}])
    assert summary_lines(run, found, None, attempts=2) == [
        "finished  links, 2 attempts",
        "result    slow",
        "          n1 is slow",
        "folder    runs/links",
    ]
    assert found.report is not None
    assert report_tables(found.report) == [("pairs", [Column("from"), Column("n1", right=True)], [["n0", "1.00 GB/s"]])]
    assert fold([{"kind": "report", "tables": []}, {"kind": "attempt_start"}]).report is None
