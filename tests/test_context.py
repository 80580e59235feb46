from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

from dthpc.context import RankContext
from dthpc.placement.identity import RankIdentity
from dthpc.rundir import RunDir


def context(run: Path, rank: int = 0, attempt: int = 0) -> RankContext:
    return RankContext(RankIdentity(rank, 4, rank, 4, 0, 1, "n1", attempt), RunDir(run), torch.device("cpu"))


def test_rank_0_of_all_ranks_is_the_first_and_no_other(tmp_path: Path) -> None:
    assert [context(tmp_path, rank).is_first for rank in range(4)] == [True, False, False, False]


def test_the_first_rank_of_a_later_node_is_not_the_first(tmp_path: Path) -> None:
    second_node = RankIdentity(2, 4, 0, 2, 1, 2, "n2", 0)
    assert not RankContext(second_node, RunDir(tmp_path), torch.device("cpu")).is_first


def test_the_attempt_is_the_one_of_the_identity(tmp_path: Path) -> None:
    assert context(tmp_path, attempt=3).attempt.path == tmp_path / "attempts" / "3"
    assert context(tmp_path, attempt=3).attempt.number == 3


def test_a_job_that_counts_no_steps_has_done_none(tmp_path: Path) -> None:
    fresh = context(tmp_path)
    assert (fresh.step, fresh.events, fresh.backend, fresh.stop.requested) == (None, None, "gloo", None)


def test_contexts_share_no_stop_flag(tmp_path: Path) -> None:
    first, second = context(tmp_path), context(tmp_path)
    first.stop.request("SIGTERM")
    assert (first.stop.requested, second.stop.requested) == ("SIGTERM", None)


def test_an_installed_flag_takes_the_signal_of_the_process(tmp_path: Path) -> None:
    mine = context(tmp_path)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)}
    try:
        mine.stop.install()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert mine.stop.requested == "SIGUSR2"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_the_type_is_known_without_torch() -> None:
    code = "import sys, dthpc.context; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
