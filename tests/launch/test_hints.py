from __future__ import annotations

from pathlib import Path

import pytest

from dthpc.config.compose import read_command_line
from dthpc.launch.checks import find_mistakes
from dthpc.launch.hints import hints
from dthpc.launch.request import read_request
from dthpc.launch.submission import prepare

SLURM = ("+cluster=slurm", "cluster.nodes=2", "cluster.tasks_per_node=2")


def told(*words: str) -> list[str]:
    ((config, choices),), _ = read_command_line(list(words), "test")
    assert find_mistakes(config) == []
    return [verdict.note for verdict in hints(config, read_request(config), choices.typed)]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["parallel.outer.delay=2"], "parallel.outer.delay=2 has no effect because parallel.outer.every=0"),
        (
            ["parallel.outer.momentum=0", "parallel.outer.lr=1"],
            "parallel.outer.lr=1.0, parallel.outer.momentum=0.0 have no effect because parallel.outer.every=0",
        ),
        (["parallel.schedule=zbv"], "parallel.schedule=zbv has no effect because parallel.pp=1: there is no pipeline"),
        (["parallel.sequence_parallel=true"], "parallel.sequence_parallel=true has no effect because parallel.tp=1"),
        (["parallel.offload.folder=/tmp"], "neither parallel.offload.optimizer nor .parameters is nvme"),
        (["parallel.activations.every=2"], "parallel.activations.mode=none"),
        (["parallel=tp", "parallel.zero=1"], "there is one data-parallel rank"),
        (["parallel.tp=2", "parallel.gradients.dtype=bf16"], "parallel.gradients.dtype=bf16 has no effect"),
        (["comm.axes.pp=gloo"], "comm.axes.pp=gloo has no effect because parallel.pp=1"),
        (["comm.hierarchical=auto"], "all 2 ranks are on one node"),
        ([*SLURM, "comm.hierarchical=true", "parallel.zero=1"], "parallel.zero=1 makes one replica of all ranks"),
        (["cluster.tasks_per_node=1", "comm.tune=true"], "comm.tune=true has no effect because there is one rank"),
        (["comm.tune=true", "comm.backend=gloo"], "comm.tune=true has no effect because comm.backend=gloo"),
        (["comm.mpi_plugin=pmix"], "comm.mpi_plugin=pmix has no effect because ranks run on this machine"),
        (["cluster.partition=gpu"], "cluster.partition=gpu has no effect because ranks run on this machine"),
        (["+cluster.sbatch.switches=1"], "cluster.sbatch.switches=1 has no effect because ranks run on this machine"),
        (["+cluster=allocation", "cluster.time=4:00"], "cluster.time=4:00 has no effect because ranks run in the"),
        ([*SLURM, "resilience.requeue_delay_s=5"], "Slurm decides when a job starts again"),
        (["resilience.checks.compute_s=3"], "resilience.preflight=false"),
        (["precision=bf16", "precision.loss_scale=1024"], "precision.compute=bf16 needs no loss scale"),
        (["precision.parameters=compute"], "all is held in fp32"),
        (["optim.schedule.decay_fraction=0.5"], "wsd alone has a decay of its own"),
        (["optim.schedule.name=constant", "optim.schedule.min_ratio=0"], "does not decay"),
        (["train.eval_every=0", "train.eval_samples=4"], "nothing is evaluated during training"),
        (["checkpoint.keep=0", "checkpoint.keep_every=10"], "all checkpoints are kept"),
        (
            ["job=collectives", "train.steps=5", "model=gpt_1b"],
            "model, train.steps=5 have no effect because job=collectives trains nothing",
        ),
        (
            ["job=preflight", "resilience.preflight=true"],
            "resilience.preflight=true has no effect because job=preflight",
        ),
        (["job=preflight", "parallel.tp=2"], "parallel.tp=2 has no effect because job=preflight trains nothing"),
    ],
)
def test_what_was_typed_and_changes_nothing_is_told_with_the_reason(words: list[str], hint: str) -> None:
    (found,) = told(*words)
    assert hint in found
    assert "no effect because" in found


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["parallel=pp", "parallel.schedule=gpipe", "comm.axes.pp=gloo"],
        ["parallel.schedule=1f1b", "cluster.time=1:00:00", "comm.hierarchical=false"],  # as it is anyway
        ["parallel.outer.every=4", "parallel.outer.delay=2"],
        ["precision=fp16", "precision.loss_scale=1024"],  # its own preset says parameters=fp32, and nobody typed that
        ["+cluster.environment={NCCL_DEBUG: INFO}", "cluster.cpus_per_task=2"],
        [*SLURM, "cluster.partition=gpu", "comm.hierarchical=auto", "parallel.bucket_mb=5"],
        [
            "+cluster=slurm",
            "cluster.nodes=1-2",
            "comm.hierarchical=auto",
            "parallel.zero=1",
            "parallel.replicate=nodes",
        ],
        ["job=collectives", "parallel.tp=2", "comm.backend=gloo", "job.sizes=8"],
    ],
)
def test_what_has_an_effect_and_what_presets_say_is_not_told(words: list[str]) -> None:
    assert told(*words) == []


def test_hints_are_warnings_of_the_submission_and_refuse_nothing(tmp_path: Path) -> None:
    words = ["dry_run=true", f"run.root={tmp_path}", "parallel.outer.delay=2,3", "-m"]
    found, _ = read_command_line(words, "test")
    prepared, _ = prepare(found)
    for delay, item in zip((2, 3), prepared, strict=True):
        assert item.errors == []
        assert [note.split(" because")[0] for note in item.warnings if "no effect" in note] == [
            f"parallel.outer.delay={delay} has no effect"
        ]
