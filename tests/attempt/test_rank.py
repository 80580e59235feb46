"""Real ranks with torch: how each kind of end is recorded, and what a rank sets up before torch looks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dthpc.attempt.plan import LaunchPlan
from dthpc.attempt.rank import choose_device
from dthpc.errors import UserError
from dthpc.monitor.events import read_events
from dthpc.placement.identity import RankIdentity
from dthpc.resilience.outcome import read_records
from dthpc.resilience.stop import Stopped
from dthpc.rundir import RunDir
from tests.attempt.runs import REPOSITORY, make_run, wait_for

CONFIG = """
job: {{_target_: tests.attempt.test_rank.{job}}}
comm: {{backend: auto, interface: null, timeout_s: 60, rendezvous_timeout_s: 60}}
"""


# --- jobs ---------------------------------------------------------------------------------------------------------


def look_around(config: Any, context: Any) -> None:
    import torch

    print("threads", torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], context.device, context.backend)
    print("rank", context.identity.rank, "first", context.is_first, "events", context.events is not None)
    context.step = 7


def misuse(config: Any, context: Any) -> None:
    raise UserError("does not fit", key="model.dim", value=3, instead="model.dim=4")


def one_fails(config: Any, context: Any) -> None:
    import torch
    import torch.distributed as dist

    context.step = 3
    if context.identity.rank == 1:
        raise ValueError("a hole in the data")
    dist.all_reduce(torch.zeros(1))


def obey(config: Any, context: Any) -> None:
    (context.attempt.path / "working").touch()
    wait_for(lambda: context.stop.requested, 60)
    raise Stopped(5)


# --- tests --------------------------------------------------------------------------------------------------------


def start(run: RunDir, job: str, size: int) -> list[subprocess.Popen[str]]:
    run.config.write_text(CONFIG.format(job=job))
    run.attempt(0).path.mkdir(parents=True)
    processes = []
    for rank in range(size):
        own = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "ATTEMPT": 0}
        env = {**os.environ, **{f"DTHPC_{name}": str(value) for name, value in own.items()}, "OMP_NUM_THREADS": "7"}
        command = [sys.executable, "-m", "dthpc.attempt.rank", str(run.path)]
        processes.append(
            subprocess.Popen(
                command, cwd=REPOSITORY, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    return processes


def test_a_job_finds_its_rank_threads_and_device_set_up(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [["finish", "finish"]], threads_per_rank=2)
    processes = start(run, "look_around", 2)
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "threads 2 2 cpu gloo" in outputs[0]
    assert "rank 0 first True events True" in outputs[0]
    assert "rank 1 first False events False" in outputs[1]
    assert [(one.cause, one.step) for one in read_records(run.attempt(0)).values()] == [("finished", 7)] * 2
    (ready,) = read_events(run.events)[0]
    assert (ready["kind"], ready["world_size"], ready["interface"]) == ("ranks_ready", 2, "lo")


def test_a_users_mistake_ends_with_code_2_and_no_traceback(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [["finish"]])
    (process,) = start(run, "misuse", 1)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "dthpc: model.dim=3: does not fit. Instead: model.dim=4" in output
    assert "Traceback" not in output
    assert read_records(run.attempt(0))[0].cause == "user_error"


@pytest.mark.parametrize(("job", "why"), [("absent", "cannot be imported"), ("os.absent", "cannot be imported")])
def test_a_job_that_does_not_exist_is_the_users_mistake(tmp_path: Path, job: str, why: str) -> None:
    run = make_run(tmp_path / "run", [["finish"]])
    (process,) = start(run, job, 1)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert why in output
    assert f"job._target_=tests.attempt.test_rank.{job}" in output


def test_the_rank_that_failed_first_is_known_by_its_traceback(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [["finish", "finish"]])
    processes = start(run, "one_fails", 2)
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    records = read_records(run.attempt(0))
    assert records[1].error == "ValueError: a hole in the data"
    assert records[1].step == 3
    assert records[1].traceback_tail is not None
    assert 'raise ValueError("a hole in the data")' in "\n".join(records[1].traceback_tail)
    assert records[0].cause == "crash"
    assert records[1].time < records[0].time
    assert "ValueError: a hole in the data" in outputs[1]


def test_a_stop_is_caught_before_torch_is_there_and_ends_with_code_75(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [["finish"]])
    (process,) = start(run, "obey", 1)
    # Handlers are there as soon as the kernel says that the process catches SIGTERM, long before torch is.
    wait_for(lambda: catches(process.pid, signal.SIGTERM))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    record = read_records(run.attempt(0))[0]
    assert (record.cause, record.signal, record.step) == ("preempted", "SIGTERM", 5)


def catches(pid: int, number: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def test_without_configuration_or_identity_the_message_is_clear(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [["finish"]])
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "DTHPC_"))}
    command = [sys.executable, "-m", "dthpc.attempt.rank", str(run.path)]
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "python -m dthpc.submit" in done.stderr


def test_a_rank_takes_its_own_gpu_and_too_few_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    cpu = LaunchPlan.read(make_run(tmp_path / "cpu", [["finish"]]))
    gpu = LaunchPlan.read(make_run(tmp_path / "gpu", [["finish"]], gpus_per_node=4))
    identity = RankIdentity(3, 4, 3, 4, 0, 1, "n1", 0)
    assert choose_device(cpu, identity) == torch.device("cpu")
    for visible, expected in ((1, 0), (4, 3), (8, 3)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda visible=visible: visible)
        assert choose_device(gpu, identity) == torch.device("cuda", expected)
    for visible in (0, 2):
        monkeypatch.setattr(torch.cuda, "device_count", lambda visible=visible: visible)
        with pytest.raises(UserError, match=f"n1 shows {visible} GPUs to 4 ranks"):
            choose_device(gpu, identity)
