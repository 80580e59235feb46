"""`sacct` with a header, without one, and in fixed columns."""

from __future__ import annotations

import pytest

from dthpc.errors import UserError
from dthpc.slurm.accounting import parse_sacct


def test_a_job_and_its_steps() -> None:
    jobs = parse_sacct(
        "JobID|State|ExitCode|Elapsed|AllocTRES|MaxRSS|NodeList\n"
        "5|CANCELLED by 1000|0:15|00:00:10|cpu=4,gres/gpu=2,node=2||n[1-2]\n"
        "5.batch|CANCELLED|0:15|00:00:11|cpu=2,node=1|100K|n1\n"
        "5.0|CANCELLED|0:15|00:00:09|cpu=4,node=2|2M|n[1-2]\n"
        "6_[1-3]|PENDING|0:0|00:00:00|||None assigned\n"
    )
    job = jobs["5"]
    assert (job.state, job.exit_code, job.exit_signal, job.gpus) == ("CANCELLED", 0, 15, 2)
    assert (job.nodes, job.num_nodes, job.run_time_s, job.max_rss_kb) == (["n1", "n2"], (2, 2), 10, 2048)
    assert (jobs["6_[1-3]"].nodes, jobs["6_[1-3]"].max_rss_kb) == ([], None)


def test_fixed_columns_with_an_empty_cell() -> None:
    text = (
        "JobID     Account  AllocCPUS      State \n"
        "------ ---------- ---------- ---------- \n"
        "8                          2    RUNNING \n"
    )
    job = parse_sacct(text)["8"]
    assert (job.account, job.num_cpus, job.state) == (None, 2, "RUNNING")


HEADLESS = (
    "9|net|p|COMPLETED|0:0|00:10:00|01:00:00|cpu=8,node=2|2030-01-01T00:00:00|2030-01-01T00:05:00|2030-01-01T00:15:00\n"
    "9.0|step|p|COMPLETED|0:0|00:09:00||cpu=8,node=2|2030-01-01T00:06:00|2030-01-01T00:06:00|2030-01-01T00:15:00\n"
)


def test_a_headless_output_gives_what_its_cells_prove() -> None:
    job = parse_sacct(HEADLESS)["9"]
    assert (job.state, job.exit_code, job.num_nodes, job.run_time_s) == ("COMPLETED", 0, (2, 2), 600)
    assert (job.start_time, job.name) == ("2030-01-01T00:05:00", None)


def test_a_headless_output_with_named_columns() -> None:
    assert parse_sacct("9|FAILED|1:0\n", ["JobID", "State", "ExitCode"])["9"].exit_code == 1
    assert parse_sacct("", ["JobID", "State"]) == {}


def test_what_cannot_be_told_is_refused() -> None:
    with pytest.raises(UserError, match="not told apart"):
        parse_sacct("9|a|b\n")
    with pytest.raises(UserError, match="is no state"):
        parse_sacct("JobID|State\n9|SLEEPY\n")
    with pytest.raises(UserError, match="is no job id"):
        parse_sacct("JobID|State\nnine|FAILED\n")


def test_cells_that_were_cut_are_not_guessed() -> None:
    text = (
        "JobID           State  Timelimit        NodeList   MaxRSS\n"
        "------------ -------- ---------- --------------- --------\n"
        "5            OUT_OF_+ Partition+ node[01-08,11-+         \n"
        "5.bat+       OUT_OF_+                    node01        0 \n"
    )
    job = parse_sacct(text)["5"]
    assert (job.state, job.time_limit_s, job.nodes, job.max_rss_kb) == ("OUT_OF_MEMORY", None, [], 0)
