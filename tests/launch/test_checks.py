from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from dthpc.config.compose import read_command_line
from dthpc.launch.checks import find_mistakes, layout_verdicts
from dthpc.launch.request import read_request


def mistakes(*words: str) -> list[str]:
    ((config, _),), _ = read_command_line(list(words), "test")
    return [error.message() for error in find_mistakes(config)]


def test_the_default_run_has_no_mistake() -> None:
    assert mistakes() == []


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("+clusterr=slurm", "did you mean cluster?"),
        ("+train.grad_accumulation=4", "train.grad_accumulation=4: there is no such key"),
        ("+precision.computer=bf16", "did you mean compute?"),
        ("+optim.schedule.warmup=4", "optim.schedule.warmup=4: there is no such key"),
        ("parallel.offload.optimizer=nvme parallel.offload.folder=/nowhere", "parallel.offload.folder=/nowhere"),
        ("precision.compute=fp8", "fp32"),
        ("optim.schedule.name=cosin", "did you mean cosine?"),
        ("comm.backend=glo", "did you mean gloo?"),
        ("comm.backend=nccl", "cluster.gpus_per_node"),
        ("data.valid_fraction=2", "data.valid_fraction=2"),
        ("optim.lr=nan", "finite"),
        ("optim.lr=inf", "finite"),
        ("optim.weight_decay=-3", "at least 0"),
        ("run.seed=-1", "at least 0"),
        ("run.seed=99999999999999999999999", "at most"),
        ("train.steps=99999999999999999999999", "at most"),
        ("job._target_=dthpc.nope", "nothing of this name"),
        ("optim._target_=torch.optim.Adamx", "nothing of this name"),
        ("run.on_change=overwrite", "refuse"),
        ("comm.timeout_s=99999999999999", "at most"),
        ("comm.shared_memory=maybe", "auto, false, true"),
        ("train.steps=0", "at least 1"),
        ("train.micro_batch=0", "at least 1"),
        ("train.eval_every=-2", "at least -1"),
        ("cluster.tasks_per_node=0", "at least 1"),
        ("train.micro_batch=100000", "global_batch"),
        ("'run.name=\"a b/c\"'", "run.name=a-b-c"),
        ("run.name=..", "run.name=run-1"),
        ("optim.lr=0", "positive"),
        ("optim.schedule.warmup_steps=1000000", "warm-up"),
        ("optim.schedule.min_ratio=2", "between 0 and 1"),
        ("train.grad_clip=0", "positive"),
        ("model._target_=nothing.of.Kind", "nothing.of"),
        ("model._target_=Net", "package.module.Name"),
        ("loss._target_=dthpc.modles.losses.next_token", "dthpc.modles"),
        ("+callbacks.mine._target_=no_such_package.Callback", "callbacks.mine"),
        ("model.heads=3", "model.heads"),
        ("data=text", "data.source.path"),
        ("parallel.tp=0", "parallel.tp=0"),
        ("parallel.tp=3 cluster.tasks_per_node=3", "model.heads=4 attention heads do not divide"),
        ("parallel.dp=3", "there are 2 ranks"),
        ("parallel.zero=4", "ZeRO"),
        ("parallel.schedule=1f1", "1f1b"),
        ("precision.loss_scale=-1", "precision.loss_scale"),
        ("parallel=pp parallel.schedule=pipedream", "train.grad_clip=null"),
        ("parallel=zero1 optim._target_=torch.optim.Adafactor", "optim._target_=torch.optim.Adafactor"),
        ("data=text data.source.path=/nowhere", "data.source.path=/nowhere"),
    ],
)
def test_each_mistake_is_named_with_what_to_write(word: str, expected: str) -> None:
    found = mistakes(*shlex.split(word))
    assert len(found) == 1, found
    assert expected in found[0]


def test_all_mistakes_are_reported_together() -> None:
    found = mistakes(
        "train.steps=0", "precision.compute=fp8", "optim.lr=-1", "model._target_=x", "optim.schedule.warmup_steps=0"
    )
    assert len(found) == 4, found


def test_a_class_in_the_folder_where_the_command_is_typed_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "raise RuntimeError('checking must not import it')\nclass Net: ...\n"
    (tmp_path / "my_models.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert mistakes("model._target_=my_models.Net") == []
    assert len(mistakes("model._target_=my_models.Nett")) == 1


def test_images_that_the_ranks_would_not_find_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("model=vit_tiny", "data=digits", "train.seq_len=1")
    assert mistakes(*words) == []
    assert mistakes(*words, "data.held_out_every=1") == [
        "data.held_out_every=1: leaves nothing to train on. Instead: 2 or more"
    ]
    monkeypatch.setitem(sys.modules, "sklearn", None)
    (found,) = mistakes(*words)
    assert "pip install 'dthpc[images]'" in found
    assert mistakes(*words, "cluster.python=/elsewhere/bin/python") == []


NODES = ("+cluster=slurm", "cluster.nodes=2", "comm.hierarchical=true")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["comm.hierarchical=true"], "they are on one node"),
        ([*NODES, "cluster.nodes=1-2", "cluster.tasks_per_node=2"], "they are on one node"),
        ([*NODES, "cluster.nodes=1-2", "cluster.tasks_per_node=1"], "one rank each"),
        ([*NODES, "cluster.tasks_per_node=1"], "one rank each"),
        # Pairs of ranks share a layer, so that a node of two has one replica.
        ([*NODES, "cluster.tasks_per_node=2", "parallel.tp=2"], "one rank each"),
        # Stages lie on nodes of their own, and so do the replicas of each.
        ([*NODES, "cluster.tasks_per_node=2", "parallel=pp"], "they are on one node"),
    ],
)
def test_replicas_that_cannot_sum_in_their_nodes_are_told_so_before_they_start(words: list[str], why: str) -> None:
    (found,) = mistakes(*words)
    assert found.startswith("comm.hierarchical=true: the replicas cannot sum in their nodes first: ")
    assert why in found


@pytest.mark.parametrize(
    "words",
    [
        [*NODES, "cluster.tasks_per_node=2"],
        [*NODES, "cluster.tasks_per_node=4", "parallel.tp=2"],
        [*NODES, "cluster.tasks_per_node=1", "+cluster.srun.distribution=cyclic"],  # only the ranks will know
        ["comm.hierarchical=auto"],
        ["comm.hierarchical=true", "parallel.tp=2"],  # nothing is summed between replicas
        ["comm.hierarchical=true", "job=collectives"],
        ["comm.hierarchical=true", "job=preflight"],
    ],
)
def test_replicas_that_can_or_that_need_not_are_let_pass(words: list[str]) -> None:
    assert mistakes(*words) == []


def verdicts(*words: str) -> list[tuple[str, str]]:
    ((config, _),), _ = read_command_line(list(words), "test")
    assert find_mistakes(config) == []
    return [(verdict.status, verdict.note) for verdict in layout_verdicts(config, read_request(config))]


@pytest.mark.parametrize(
    ("preset", "ranks", "described"),
    [
        ("ddp", 2, "dp=2"),
        ("zero1", 2, "dp=2 zero=1"),
        ("zero2", 2, "dp=2 zero=2"),
        ("zero3", 2, "dp=2 zero=3"),
        ("hsdp", 2, "dp=2 zero=3"),
        ("tp", 2, "dp=1 tp=2+sp"),
        ("pp", 2, "pp=2 (1f1b) dp=1"),
        ("3d", 4, "pp=2 (1f1b) dp=1 zero=1 tp=2+sp"),
    ],
)
def test_every_preset_fits_the_default_run(preset: str, ranks: int, described: str) -> None:
    assert verdicts(f"parallel={preset}", f"cluster.tasks_per_node={ranks}") == [("ok", described)]


def test_every_degree_of_a_preset_can_be_overridden() -> None:
    words = ["parallel=3d", "parallel.tp=4", "parallel.pp=1", "parallel.zero=2", "parallel.dp=2"]
    assert verdicts(*words, "cluster.tasks_per_node=8") == [("ok", "dp=2 zero=2 tp=4+sp")]


def test_hybrid_sharding_takes_any_number_of_nodes() -> None:
    words = ["parallel=hsdp", "+cluster=slurm", "cluster.tasks_per_node=4", "train.global_batch=64"]
    assert verdicts(*words, "cluster.nodes=2-4") == [("ok", "dp=8 (2x4) zero=3")]


def test_tensor_parallelism_across_nodes_is_warned_of() -> None:
    words = ["+cluster=slurm", "cluster.nodes=4", "cluster.tasks_per_node=2"]
    assert verdicts("parallel.tp=2", *words) == [("ok", "dp=4 tp=2")]
    ((status, note),) = verdicts("parallel.tp=4", *words)
    assert status == "warning"
    assert "dp=2 tp=4: tensor parallelism" in note
    assert note.endswith("Inside a node: parallel.tp=2")
    ((status, note),) = verdicts("parallel.tp=2", "parallel.order=[tp,pp,replicate,shard,cp]", *words)
    assert status == "warning"
    assert note.endswith("Inside a node: tp last in parallel.order")
