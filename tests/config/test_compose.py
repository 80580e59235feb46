from __future__ import annotations

from pathlib import Path

import pytest

from dthpc.config.compose import config_folder, read_command_line
from dthpc.errors import UserError


def compose(*words: str):
    return read_command_line(list(words), "python -m dthpc.submit")


def test_no_words_give_the_default_run() -> None:
    found, sweep = compose()
    (config, choices), *rest = found
    assert not rest
    assert not sweep
    assert config.cluster.kind == "local"
    assert config.cluster.tasks_per_node == 2
    assert choices.options["model"] == "gpt_tiny"


def test_a_sweep_gives_one_configuration_each_in_order() -> None:
    found, sweep = compose("-m", "optim.lr=1e-3,2e-3", "run.seed=1,2", "+cluster=slurm")
    assert sweep
    assert [(c.optim.lr, c.run.seed) for c, _ in found] == [(1e-3, 1), (1e-3, 2), (2e-3, 1), (2e-3, 2)]
    assert all(c.cluster.kind == "slurm" for c, _ in found)


def test_a_sweep_leaves_no_file_where_it_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    compose("-m", "run.seed=1,2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.stps=3"], ["train.stps=3", "did you mean steps?"]),
        (["optm.lr=3"], ["optm.lr=3", "optim"]),
        (["modle=x"], ["modle=x", "model"]),
        (["model.dmi=3"], ["model.dmi=3", "did you mean dim?"]),
        (["model=gpt_tny"], ["model=gpt_tny", "did you mean gpt_tiny"]),
        (["cluster=slurm"], ["+cluster=slurm"]),
        (["+cluster=slrum"], ["did you mean slurm?"]),
        (["+cluster=slurm", "cluster.partitoin=x"], ["cluster.partitoin=x", "partition"]),
        (["train.steps=abc"], ["train.steps=abc", "whole number"]),
        (["train.steps="], ["train.steps", "whole number"]),
        (["optim.lr=fast"], ["optim.lr=fast", "a number"]),
        (["dry_run=maybe"], ["dry_run=maybe", "true or false"]),
        (["cluster.exclude=[a,b]"], ["cluster.exclude=[a,b]", "one text"]),
        (["comm.environment=3"], ["comm.environment=3", "{NAME: VALUE}"]),
        (["+comm.environment={1: 2}"], ["comm.environment={1: 2}", "write +comm.environment.NAME=VALUE"]),
        (["cluster.after={a: 1}"], ["cluster.after={a: 1}", "a list is wanted"]),
        (["model.norm=[1"], ["model.norm=[1", "quote it"]),
        (["run.name=größe"], ["run.name=größe", "quote it: 'run.name=\"größe\"'"]),
        (["+model=gpt_small"], ["model=gpt_small", "write model=gpt_small"]),
        (["cluster.after=nope"], ["cluster.after=nope", "'cluster.after=[nope]'"]),
        (["cluster.sbatch.swiches=1"], ["write +cluster.sbatch.swiches=1", "any key"]),
        (["steps"], ["steps", "key=value"]),
        (["optim.lr=1,2"], ["optim.lr=1,2", "-m"]),
        (["parallel.offload=cpu"], ["parallel.offload=cpu", "optimizer, parameters", "parallel.offload.optimizer=…"]),
        (["parallel.order=null"], ["parallel.order=null", "null has no meaning here"]),
        (["train=null"], ["train=null", "the name of a file in conf/train", "train.KEY=VALUE"]),
        (["optim=3"], ["optim=3", "the name of a file in conf/optim"]),
        (["--dry-run"], ["--dry-run: there is no such option", "dry_run=true, without dashes"]),
        (["--parallel.tp=2"], ["--parallel.tp=2", "parallel.tp=2, without dashes"]),
        (["-n", "4"], ["-n: there is no such option"]),
        (["--multrun"], ["did you mean --multirun"]),
        (["parallel:tp=2"], ["dots", "Instead: parallel.tp=2"]),
        (["parallel/tp=2"], ["dots", "Instead: parallel.tp=2"]),
        (["comm.backend==gloo"], ["Instead: comm.backend=gloo"]),
        (["parallel=ddp,zero1"], ["-m", "choose one"]),
        (["cluster.environment={A: b}"], ["none of these names yet", "'+cluster.environment={A: b}'"]),
        (["comm.axes={foo: gloo}"], ["comm.axes.foo: there is no such key", "pp, replicate, shard, tp"]),
        (["parallel.offload={optimizer: cpu, foldr: x}"], ["parallel.offload.foldr", "did you mean folder"]),
        (
            ["comm.axes.dp=gloo"],
            ["comm.axes.dp=gloo", "comm.axes.replicate (whole replicas) or comm.axes.shard (ZeRO)"],
        ),
        (["comm.backend=cpu:gloo,cuda:nccl"], ["-m", "'comm.backend=\"cpu:gloo,cuda:nccl\"' for one text"]),
        (["--config-dir", "/nowhere/at/all"], ["--config-dir=/nowhere/at/all: there is no such folder"]),
    ],
)
def test_what_a_careless_user_types_is_answered_with_what_to_write(words: list[str], expected: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        compose(*words)
    message = str(caught.value)
    assert all(part in message for part in expected), message
    assert "\n" not in message
    assert "Traceback" not in message


def test_options_may_stand_anywhere(tmp_path: Path) -> None:
    found, sweep = compose("train.steps=7", "--config-dir", str(tmp_path), "-m", "run.seed=1,2", "optim.lr=1")
    assert sweep
    assert [(c.train.steps, c.run.seed, c.optim.lr) for c, _ in found] == [(7, 1, 1.0), (7, 2, 1.0)]


def test_a_folder_of_the_users_own_adds_options(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "mysite.yaml").write_text("defaults: [slurm]\npartition: gpu\naccount: physics\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("_target_: mine.Net\nwidth: 7\n")
    ((config, _),), _ = compose("--config-dir", str(tmp_path), "+cluster=mysite", "model=mine", "cluster.nodes=2-4")
    assert (config.cluster.kind, config.cluster.partition, config.cluster.nodes) == ("slurm", "gpu", "2-4")
    assert config.model == {"_target_": "mine.Net", "width": 7}


def test_a_search_path_adds_options(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("_target_: mine.Net\n")
    ((config, _),), _ = compose(f"hydra.searchpath=[file://{tmp_path}]", "model=mine")
    assert config.model._target_ == "mine.Net"


def test_asking_for_the_configuration_prints_it_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = compose("--cfg", "job", "train.steps=7")
    assert found == []
    assert "steps: 7" in capsys.readouterr().out


def test_help_names_the_groups_and_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = compose("--help")
    assert found == []
    text = capsys.readouterr().out
    assert "model: convnet_small, gpt_1b, gpt_fields, gpt_small, gpt_tiny, vit_tiny" in text
    assert "python -m dthpc.submit +cluster=slurm" in text


def test_every_option_of_every_group_composes() -> None:
    folder = config_folder()
    for group in sorted(entry for entry in folder.iterdir() if entry.is_dir() and entry.name != "hydra"):
        for option in sorted(group.glob("*.yaml")):
            sign = "+" if group.name == "cluster" else ""
            ((_, choices),), _ = compose(f"{sign}{group.name}={option.stem}")
            assert choices.options[group.name] == option.stem


def test_what_was_typed_is_known_from_what_presets_say() -> None:
    words = ["+cluster=slurm", "parallel.tp=2", "++train.steps=3", "~callbacks", "cluster.tasks_per_node=2"]
    ((_, choices),), _ = compose(*words)
    assert choices.typed == {"cluster", "parallel.tp", "train.steps", "cluster.tasks_per_node"}
    runs, is_sweep = compose("-m", "run.seed=1,2", "hydra.verbose=false")
    assert is_sweep
    assert [choices.typed for _, choices in runs] == [{"run.seed"}] * 2
