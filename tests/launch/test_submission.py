"""From configurations to started runs; the keepers are `true`, so that runs start and end at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from dthpc.attempt.plan import LaunchPlan
from dthpc.config.compose import read_command_line
from dthpc.errors import UserError, UserErrors
from dthpc.launch.submission import Prepared, ask_site, prepare, start
from dthpc.monitor.events import EventLog, read_events
from dthpc.rundir import RunDir, write_json
from tests.launch.sites import add_command

HOLD = """
import sys
from dthpc.attempt.lock import RunLock
from dthpc.rundir import RunDir
RunLock(RunDir(sys.argv[1])).acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the command is typed."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Slurm of scripts, alone on PATH: one partition of three nodes; sbatch gives job 41."""
    folder = tmp_path / "bin"
    partition = "PartitionName=p Default=YES Nodes=n[1-3] TotalNodes=3 TotalCPUs=24 State=UP MaxTime=UNLIMITED"
    add_command(
        folder,
        "scontrol",
        f'echo "$@" >> "{folder}/asked"; case "$*" in *partition*) echo "{partition}";; '
        '*config*) echo "SLURM_VERSION = 22.05.8";; *) exit 1;; esac',
    )
    add_command(folder, "sinfo", 'echo "p|3|8|8000|(null)|idle"')
    add_command(folder, "sbatch", 'echo "Submitted batch job 41"')
    for name in ("srun", "squeue", "sacctmgr", "sacct", "scancel"):
        add_command(folder, name, "exit 0")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def compose(*words: str) -> list[tuple[Any, dict[str, str]]]:
    return read_command_line(["cluster.tasks_per_node=1", "cluster.python=/bin/true", *words], "submit")[0]


def prepare_one(*words: str) -> Prepared:
    (prepared,), _ = prepare(compose(*words))
    return prepared


def started(*words: str) -> RunDir:
    """A run that was started, and whose keeper has ended."""
    prepared, site = prepare(compose(*words))
    (job,) = start(prepared, site)
    job._process.wait()
    return prepared[0].run


def finish(run: RunDir) -> None:
    """The records of an attempt that finished."""
    write_json(run.attempt(0).start, {"pid": 1, "time": 1.0})
    write_json(run.attempt(0).end, {"cause": "finished", "decision": "finish", "reason": "the run is finished"})


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder with its content."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def test_preparing_writes_nothing(here: Path) -> None:
    prepared = prepare_one("run.name=a")
    assert list(here.iterdir()) == []
    assert prepared.run.path == here / "runs" / "a"
    assert prepared.plan is not None
    assert (prepared.errors, prepared.earlier, prepared.changed, prepared.finished) == ([], None, False, False)


def test_all_mistakes_of_a_sweep_come_together_and_each_once() -> None:
    with pytest.raises(UserErrors) as caught:
        prepare(compose("-m", "train.steps=0", "optim.lr=-1,-2", "run.on_change=maybe"))
    told = [(error.key, error.value) for error in caught.value.errors]
    assert sorted(told) == [("optim.lr", -2.0), ("optim.lr", -1.0), ("run.on_change", "maybe"), ("train.steps", 0)]


def test_mistakes_come_before_the_site_is_asked(commands: Path) -> None:
    with pytest.raises(UserError, match=r"train\.steps=0"):
        prepare(compose("+cluster=slurm", "train.steps=0"))
    assert not (commands / "asked").exists()


def test_a_value_that_has_no_default_is_asked_for() -> None:
    with pytest.raises(UserError, match=r"data\.source\.path: needs a value"):
        prepare(compose("data=text"))


def test_an_interpolation_that_leads_nowhere_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="nowhere") as caught:
        prepare(compose("data.seq_len=${train.nowhere}"))
    assert caught.value.instead == "see --cfg job"


def test_runs_of_a_sweep_with_one_name_are_refused() -> None:
    with pytest.raises(UserError, match=r"run\.name=a: 2 runs of this sweep have the same name"):
        prepare(compose("-m", "run.name=a", "run.seed=1,2"))


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["run.name=a", "run.seed=1,2"], "'run.name=NAME-${run.seed}'"),
        (["comm.timeout_s=60,120"], "'run.name=NAME-${comm.timeout_s}'"),
        (["job=collectives", "cluster.tasks_per_node=2", "job.sizes=8,64"], "'run.name=NAME-${job.sizes}'"),
        (["run.seed=1,1"], "different values for each"),
    ],
)
def test_runs_of_one_name_are_told_by_what_they_differ(words: list[str], instead: str) -> None:
    with pytest.raises(UserError) as caught:
        prepare(compose("-m", *words))
    assert instead in str(caught.value)


def test_a_run_without_a_name_is_named_after_what_it_does() -> None:
    name = prepare_one().run.name
    assert name.startswith("train-gpt_tiny-")
    assert prepare_one("checkpoint.every=7").run.name == name
    assert prepare_one("optim.lr=0.5").run.name != name


def test_folders_are_absolute_whatever_was_typed(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here / "home"))
    for folder in (here / "texts", here / "home" / "texts"):
        folder.mkdir(parents=True)
        for number in range(8):
            (folder / f"{number}.txt").write_text("text\n" * 100)
    near = prepare_one("data=text", "data.source.path=texts", "run.root=out/../runs", "run.name=a")
    assert near.config.data.source.path == str(here / "texts")
    assert (near.config.run.root, near.run.path) == (str(here / "runs"), here / "runs" / "a")
    home = prepare_one("data=text", "data.source.path='~/texts'", "run.root='~/runs'", "run.name=a")
    assert home.config.data.source.path == str(here / "home" / "texts")
    assert home.run.path == here / "home" / "runs" / "a"


def test_a_name_with_another_configuration_is_refused_and_says_what_differs() -> None:
    run = started("run.name=a")
    with pytest.raises(UserError, match=r"run\.name=a: .*train\.steps: 800 → 900") as caught:
        prepare_one("run.name=a", "train.steps=900")
    assert "run.on_change=accept" in str(caught.value.instead)
    same = prepare_one("run.name=a", "checkpoint.every=7")
    assert (same.changed, same.run) == (False, run)
    assert same.earlier is not None
    assert prepare_one("run.name=a", "train.steps=900", "run.on_change=accept").changed


def test_a_finished_run_has_nothing_left_to_do_unless_more_is_asked() -> None:
    finish(started("run.name=a"))
    assert prepare_one("run.name=a").finished
    more = prepare_one("run.name=a", "train.steps=900", "run.on_change=accept")
    assert (more.changed, more.finished) == (True, False)


def test_a_run_that_somebody_keeps_is_refused_until_that_process_is_gone() -> None:
    run = started("run.name=a")
    command = [sys.executable, "-c", HOLD, str(run.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=r"run\.name=a: this run is pending already"):
            prepare_one("run.name=a")
        write_json(run.attempt(0).start, {"pid": holder.pid, "time": 1.0})
        with pytest.raises(UserError, match=r"this run is running already.*status .*/runs/a --watch"):
            prepare_one("run.name=a", "train.steps=900", "run.on_change=accept")
        holder.kill()
        holder.wait()
        earlier = prepare_one("run.name=a").earlier
        assert earlier is not None
        assert earlier.state == "lost"


def test_a_job_that_waits_in_the_queue_is_refused_by_its_id(commands: Path) -> None:
    prepared, site = prepare(compose("+cluster=slurm", "run.name=a"))
    (job,) = start(prepared, site)
    assert job.job_id == "41"
    add_command(commands, "squeue", "exit 1")
    with pytest.raises(UserError, match="this run is pending already as job 41"):
        prepare_one("+cluster=slurm", "run.name=a")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_is_no_run_is_left_alone(here: Path, kind: str) -> None:
    place = here / "runs" / "a"
    if kind == "folder":
        place.mkdir(parents=True)
        (place / "thesis.tex").write_text("years of work")
    else:
        place.parent.mkdir()
        place.write_text("years of work")
    before = tree(here)
    with pytest.raises(UserError, match=r"run\.name=.*/runs/a: something that is no run lies there"):
        prepare_one("run.name=a")
    assert tree(here) == before


def test_an_empty_folder_may_become_a_run(here: Path) -> None:
    (here / "runs" / "a").mkdir(parents=True)
    assert started("run.name=a").config.exists()


def test_what_the_machine_refuses_is_an_error_of_its_run_and_nothing_starts(here: Path) -> None:
    prepared, site = prepare(compose("-m", "run.root=/proc/nothing", "run.seed=1,2"))
    assert [(item.plan, [error.key for error in item.errors]) for item in prepared] == [(None, ["run.root"])] * 2
    with pytest.raises(UserError, match=r"run\.root=/proc/nothing") as caught:
        start(prepared, site)
    assert not isinstance(caught.value, UserErrors)


def test_more_ranks_than_cores_is_a_warning_and_no_error() -> None:
    prepared = prepare_one("cluster.tasks_per_node=999", "train.global_batch=999")
    assert prepared.errors == []
    assert any("share cores" in note for note in prepared.warnings)


def test_the_site_is_asked_once_for_all_runs_that_need_one(commands: Path) -> None:
    assert ask_site([config for config, _ in compose("run.name=a")]) is None
    assert not (commands / "asked").exists()
    prepared, site = prepare(compose("-m", "+cluster=slurm", "run.seed=1,2,3"))
    assert len({item.run.name for item in prepared}) == 3
    assert sorted((commands / "asked").read_text().splitlines()) == ["--oneliner show partition", "show config"]
    assert site is not None
    assert site.version == (22, 5, 8)


def test_a_started_run_holds_its_configuration_its_plan_and_the_submission(here: Path) -> None:
    prepared, site = prepare(compose("run.name=a", "optim.lr=0.25"))
    (job,) = start(prepared, site)
    run = prepared[0].run
    assert OmegaConf.to_container(OmegaConf.load(run.config)) == OmegaConf.to_container(prepared[0].config)
    assert LaunchPlan.read(run) == prepared[0].plan
    ((event,), _) = read_events(run.events)
    assert (event["kind"], event["job_id"], event["launcher"]) == ("run_submitted", job.job_id, "local")
    assert sorted(p.name for p in run.path.iterdir()) == [
        ".start.guard",
        "config.yaml",
        "events.jsonl",
        "launch.json",
        "submissions",
    ]


def test_the_jobs_of_a_sweep_come_in_the_order_of_its_runs(commands: Path) -> None:
    prepared, site = prepare(compose("-m", "+cluster=slurm", "run.name=c,a,b"))
    assert [job.job_id for job in start(prepared, site)] == ["41_0", "41_1", "41_2"]
    events = {item.run.name: read_events(item.run.events)[0][0]["job_id"] for item in prepared}
    assert events == {"c": "41_0", "a": "41_1", "b": "41_2"}


def test_new_runs_whose_keeper_cannot_be_started_leave_nothing(here: Path) -> None:
    prepared, site = prepare(compose("-m", "run.name=a,b", f"cluster.python={here}/absent"))
    with pytest.raises(UserError):
        start(prepared, site)
    assert {name for name in tree(here) if name != "runs"} == set()


def test_new_runs_that_slurm_refuses_leave_nothing(here: Path, commands: Path) -> None:
    add_command(commands, "sbatch", 'echo "sbatch: error: Invalid account specified" >&2; exit 1')
    prepared, site = prepare(compose("-m", "+cluster=slurm", "cluster.account=nobody", "run.name=a,b"))
    with pytest.raises(UserError, match=r"cluster\.account=nobody"):
        start(prepared, site)
    assert not list(here.glob("runs/[ab]"))


def test_a_refusal_takes_new_runs_away_and_no_records_of_old_ones(here: Path, commands: Path) -> None:
    old = started("run.name=old")
    finish(old)
    (old.checkpoints / "step-00000005").mkdir(parents=True)
    (old.checkpoints / "step-00000005" / "weights").write_text("days of work")
    records = {name: text for name, text in tree(old.path).items() if name not in ("config.yaml", "launch.json")}
    prepared, site = prepare(
        compose("-m", "+cluster=slurm", "run.name=old,new", "cluster.tasks_per_node=2", "run.on_change=accept")
    )
    add_command(commands, "sbatch", 'echo "sbatch: error: no" >&2; exit 1')
    with pytest.raises(UserError):
        start(prepared, site)
    assert not (here / "runs" / "new").exists()
    left = tree(old.path)
    assert {name: left.get(name) for name in records} == records


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system in memory with the options that a test gives; the runs' folder."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = []

    def mount(options: str) -> Path:
        again = ["-o", f"remount,{options}"] if mounted else ["-t", "tmpfs", "-o", options, "tmpfs"]
        done = subprocess.run(["mount", *again, str(place)], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"a disk of one's own needs root: {done.stderr.strip()}")
        mounted.append(options)
        return place

    yield mount
    if mounted:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.parametrize("room", ["size=4k", "nr_inodes=2", "nr_inodes=3"])
def test_a_full_disk_is_told_and_new_runs_leave_nothing_on_it(small_disk: Callable[[str], Path], room: str) -> None:
    root = small_disk(room)
    prepared, site = prepare(compose(f"run.root={root}", "run.name=a"))
    with pytest.raises(UserError, match=rf"run\.root={root}.*No space left on device.*a folder with room") as caught:
        start(prepared, site)
    assert caught.value.key == "run.root"
    assert list(root.iterdir()) == []


def test_a_disk_that_has_become_read_only_is_told_and_an_old_run_is_as_it_was(
    small_disk: Callable[[str], Path],
) -> None:
    root = small_disk("size=1m")
    run = started(f"run.root={root}", "run.name=old")
    before = tree(run.path)
    for name in ("old", "new"):
        prepared, site = prepare(compose(f"run.root={root}", f"run.name={name}"))
        small_disk("ro")
        with pytest.raises(UserError, match=rf"run\.root={root}.*Read-only file system"):
            start(prepared, site)
        small_disk("rw")
    assert [path.name for path in root.iterdir()] == ["old"]
    assert tree(run.path) == before


def test_a_run_that_has_come_to_life_is_kept_when_a_later_one_of_its_sweep_fails(here: Path) -> None:
    prepared, site = prepare(compose("-m", "run.name=a,b"))
    first = prepared[0].run
    EventLog(first.events).close()  # as by another who submits the same at the same moment
    prepared[1].run.path.mkdir()
    prepared[1].run.launch.mkdir()
    with pytest.raises(UserError, match=r"run\.root"):
        start(prepared, site)
    assert first.events.exists()


def test_a_start_that_fails_puts_an_old_runs_files_back(here: Path) -> None:
    run = started("run.name=a")
    finish(run)
    before = {path: path.read_bytes() for path in (run.config, run.launch)}
    prepared, site = prepare(compose("run.name=a", "train.steps=900", "run.on_change=accept"))
    run.submissions.rename(run.path / "elsewhere")
    run.submissions.write_text("in the way of the keeper's log")
    with pytest.raises(UserError):
        start(prepared, site)
    assert {path: path.read_bytes() for path in before} == before
    assert not run.config.with_suffix(".partial").exists()


def test_a_start_that_fails_leaves_no_folder_above_the_run(here: Path) -> None:
    prepared, site = prepare(compose("run.root=deep/er", "run.name=a"))
    prepared[0].plan.keeper_command[0] = str(here / "absent")
    with pytest.raises(UserError):
        start(prepared, site)
    assert list(here.iterdir()) == []


def test_of_two_commands_that_found_a_run_free_one_starts_it(here: Path) -> None:
    for _ in range(2):  # a new run, and then one that exists
        first, site = prepare(compose("run.name=a"))
        second, _ = prepare(compose("run.name=a"))
        (job,) = start(first, site)
        job._process.wait()
        with pytest.raises(UserError, match="another command has started this run just now"):
            start(second, site)
        events, _ = read_events(first[0].run.events)
        assert [event["job_id"] for event in events if event["kind"] == "run_submitted"][-1] == job.job_id
        finish(first[0].run)
        (first[0].run.attempt(0).end).unlink()


def test_an_interpreter_that_is_not_there_is_named(here: Path) -> None:
    prepared = prepare_one("run.name=a", "cluster.python=/nonexistent/python")
    assert [error.key for error in prepared.errors] == ["cluster.python"]


def test_the_same_text_gives_the_same_name_from_wherever_it_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "texts").mkdir()
    (here / "texts" / "a.txt").write_text("one two three\n" * 100)
    (here / "below").mkdir()
    above = prepare_one("data=text", "data.source.path=texts")
    monkeypatch.chdir(here / "below")
    below = prepare_one("data=text", "data.source.path=../texts")
    assert above.run.name == below.run.name
    assert above.config.data.source.path == str(here / "texts")


def test_fewer_steps_than_were_made_are_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = started("run.name=a")
    finish(run)
    log = EventLog(run.events)
    log.write("train_end", step=800)
    log.close()
    with pytest.raises(UserError, match="its checkpoints are gone"):
        prepare(compose("run.name=a"))
    commit_empty_checkpoint(run, step=800)
    assert prepare_one("run.name=a").finished
    with pytest.raises(UserError, match=r"train\.steps=20: the run has made 800 steps already"):
        prepare(compose("run.name=a", "train.steps=20", "run.on_change=accept"))


def commit_empty_checkpoint(run: RunDir, step: int) -> None:
    import time

    from dthpc.checkpoint import commit as protocol
    from dthpc.checkpoint.manifest import Manifest

    partial = protocol.begin(run.checkpoints, step, 0)
    protocol.commit(partial, Manifest(step, 0, 1, time.time(), {}, {}, {}))
