from __future__ import annotations

from typing import Any

import pytest

from dthpc.monitor.narrate import bar_line, narrate, tell_step
from dthpc.monitor.progress import Progress, fold


def told(event: dict[str, Any], *before: dict[str, Any]) -> str | None:
    return narrate(event, fold([*before, event]))


STEP = {"time": 1.0, "kind": "step", "step": 120, "loss": 2.41, "tokens_per_s": 18200, "step_time": 0.412}


def test_the_bar_fits_any_width_and_keeps_the_loss_longest() -> None:
    progress = fold([{"kind": "train_start", "total_steps": 200}, STEP])
    lines = {width: bar_line(progress, 1.0, width) for width in range(140)}
    assert all(len(line) <= width for width, line in lines.items())
    assert lines[139].startswith(
        " 60% ━━━━━━━━━━━━━━──────────  step 120/200  loss 2.410  18.2k tok/s  412 ms/step  ETA 33 s"
    )
    assert lines[40].startswith("step 120/200  loss 2.410")


def test_what_is_no_token_is_not_called_so() -> None:
    start = {"kind": "train_start", "total_steps": 200, "params": 1000, "unit": "image", "samples_per_step": 64}
    assert told(start) == "training 1.00k parameters, 200 steps of 64 images"
    assert told({**start, "unit": "target"}) == "training 1.00k parameters, 200 steps of 64 samples"
    progress = fold([start, STEP])
    assert "18.2k images/s" in bar_line(progress, 1.0, 200)
    assert "18.2k images/s" in tell_step(progress, 1.0)
    assert "tok" not in bar_line(progress, 1.0, 200) + tell_step(progress, 1.0)


def test_the_bar_can_be_ascii() -> None:
    assert bar_line(fold([STEP]), 1.0, 200, unicode=False).isascii()
    assert bar_line(Progress(), 1.0, 200, unicode=False).isascii()


def test_the_last_evaluation_is_not_an_eta_of_nought() -> None:
    progress = fold([{"kind": "train_start", "total_steps": 120}, STEP])
    assert bar_line(progress, 1.0, 200).endswith("412 ms/step  finishing")


def test_silence_is_said_instead_of_an_eta() -> None:
    progress = fold([{"kind": "train_start", "total_steps": 200}, STEP])
    assert "no news for 2m 00s" in bar_line(progress, 121.0, 200)


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (
            {"kind": "attempt_start", "attempt": 1, "job_id": "77", "nodes": ["a1", "a2"]},
            "attempt 1 starts on 2 nodes (a1,a2), job 77",
        ),
        ({"kind": "ranks_ready", "world_size": 1}, "1 rank met"),
        (
            {
                "kind": "train_start",
                "total_steps": 9,
                "params": 1000,
                "layout": "pp=2 (1f1b) dp=2",
                "precision": "bf16",
            },
            "training 1.00k parameters, 9 steps, pp=2 (1f1b) dp=2, bf16",
        ),
        (
            {"kind": "train_start", "total_steps": 9, "params": 1000, "layout": "dp=1", "precision": "fp32"},
            "training 1.00k parameters, 9 steps",
        ),
        (
            {
                "kind": "memory",
                "rank": 0,
                "parameters": 4 * 2**20,
                "gradients": 4 * 2**20,
                "optimizer": 8 * 2**20,
                "expected": {"parameters": 4 * 2**20, "gradients": 4 * 2**20, "optimizer": 7 * 2**20},
            },
            "rank 0 holds 16.0 MiB (by formula 15.0 MiB): parameters 4.00 MiB, gradients 4.00 MiB, "
            "optimizer state 8.00 MiB",
        ),
        (
            {"kind": "eval", "step": 100, "loss": 2.3, "bits_per_byte": 3.33, "bigram_bits_per_byte": 3.41},
            "step 100  held-out loss 2.3000, 3.330 bits per byte (bigram model: 3.410)",
        ),
        (
            {"kind": "checkpoint_saved", "step": 120, "seconds": 0.12, "bytes": 10 * 2**20},
            "step 120  checkpoint saved in 0.12 s, 10.0 MiB",
        ),
        (
            {"kind": "checkpoint_rejected", "path": "step-00000120", "why": "a.pt: checksum"},
            "checkpoint step-00000120 is not used: a.pt: checksum",
        ),
        ({"kind": "stop_requested", "signal": "SIGTERM", "step": 120}, "asked to stop by SIGTERM at step 120: saving…"),
        ({"kind": "stop_requested", "signal": "SIGTERM"}, "asked to stop by SIGTERM: nothing to save yet"),
        ({"kind": "incident", "what": "hang", "rank": 3}, "incident: hang (rank 3)"),
        ({"kind": "step", "step": 3}, None),
        ({"kind": "attempt_end", "decision": "finish"}, None),
        ({"kind": "attempt_end", "decision": "stop", "reason": "cancelled"}, None),
        ({"kind": "somebody else's"}, None),
    ],
)
def test_each_event_has_its_line(event: dict[str, Any], text: str | None) -> None:
    assert told(event) == text


def test_a_preemption_says_what_is_safe_and_what_comes() -> None:
    saved = {"kind": "checkpoint_saved", "step": 120}
    end = {"kind": "attempt_end", "attempt": 0, "cause": "preempted", "decision": "requeue", "reason": "SIGTERM"}
    assert (
        told(end, STEP, saved)
        == "preempted at step 120, checkpoint of step 120 saved; waiting for the restart (SIGTERM)"
    )


def test_a_step_as_a_log_line() -> None:
    progress = fold([{"kind": "train_start", "total_steps": 200}, STEP])
    assert tell_step(progress, 1.0) == "step 120/200  loss 2.4100  18.2k tok/s  412 ms/step  ETA 33 s"
