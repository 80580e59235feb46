from __future__ import annotations

import json
from pathlib import Path

import pytest

from dthpc.config.compose import read_command_line
from dthpc.errors import UserError
from dthpc.jobs.collectives.settings import Span, parse_size, parse_spans, settings_of
from dthpc.jobs.collectives.terms import OPERATIONS
from dthpc.launch.checks import find_mistakes


def compose(*words: str):
    ((config, _),), _ = read_command_line(["job=collectives", *words], "test")
    return config


def mistakes(*words: str) -> str:
    return "\n".join(error.message() for error in find_mistakes(compose(*words)))


def test_the_job_as_it_stands_has_no_mistake_and_a_name_of_its_own() -> None:
    config = compose()
    assert find_mistakes(config) == []
    assert config.run.name.startswith("collectives-")
    settings = settings_of(config)
    assert settings.operations == OPERATIONS
    assert settings.backends is None


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["job.sizes=8x"], ["job.sizes=8x", "8-1G*2"]),
        (["job.sizes=64M-8"], ["backwards"]),
        (["job.sizes=8-64*1"], ["factor"]),
        (["job.sizes=[8,x,y]"], ["job.sizes=x", "job.sizes=y"]),
        (["job.sizes=0"], ["job.sizes=0"]),
        (["job.pair_size=big"], ["job.pair_size=big"]),
        (["job.operations=[all_redcue]"], ["all_redcue", "did you mean all_reduce"]),
        (["job.operations=[]"], ["nothing to measure"]),
        (["job.backends=[glo]"], ["did you mean gloo"]),
        (["job.groups=[wrld]"], ["did you mean world?"]),
        (["job.groups=[dp]"], ["job.groups=dp", "replicate (whole replicas) or shard (ZeRO)"]),
        (["job.sizes=512T"], ["job.sizes: no size fits: there is memory for messages of", "job.memory_share"]),
        (["job.iterations=1000000000"], ["for ever", "at most 1000000"]),
        (["job.warmup=1000000000"], ["for ever"]),
        (["job.seconds=1e9"], ["job.seconds", "at most 3600"]),
        (["job.backends=[mpi]"], ["comm.backend=mpi"]),
        (["job.backends=[nccl]"], ["cluster.gpus_per_node"]),
        (["job.backends=[raw_mpi]", "comm.backend=mpi", "job.dtype=bf16"], ["16-bit"]),
        (["job.dtype=float32"], ["job.dtype=float32"]),
        (["job.redop=avg", "job.dtype=int32"], ["no average"]),
        (["job.in_place=maybe"], ["job.in_place=maybe"]),
        (["job.pairs=all"], ["job.pairs=all"]),
        (["job.iterations=0"], ["at least 1"]),
        (["job.slow=1.5"], ["at most 1"]),
        (["job.link_gbps=-1"], ["positive"]),
        (["job.reference=/nowhere.json"], ["no such file"]),
        (["cluster.tasks_per_node=1"], ["cluster.tasks_per_node=1", "one rank alone has nobody to talk to"]),
        (["cluster.tasks_per_node=1", "job.groups=[world]"], ["job.groups=[world]", "nobody to talk to"]),
        (["job.groups=[world,tp]"], ["job.groups=[world,tp]", "the groups of tp have one rank each", "[auto]"]),
        (["job.groups=[cross]"], ["the groups of cross have one rank each"]),
        (["job.groups=[node]", "+cluster=slurm", "cluster.nodes=2", "cluster.tasks_per_node=1"], ["groups of node"]),
        (
            ["job.groups=[cross]", "+cluster=slurm", "cluster.nodes=1-4", "cluster.tasks_per_node=2"],
            ["the groups of cross have one rank each"],
        ),
        (["parallel.tp=3"], ["parallel.tp=3", "does not divide the 2 ranks"]),
    ],
)
def test_mistakes_are_told_before_anything_starts(words: list[str], expected: list[str]) -> None:
    told = mistakes(*words)
    assert all(part in told for part in expected), told


def test_a_reference_must_be_what_this_job_wrote(tmp_path: Path) -> None:
    path = tmp_path / "collectives.json"
    path.write_text("{}")
    assert "is no collectives.json" in mistakes(f"job.reference={path}")
    path.write_text(json.dumps({"schema": 1, "lines": []}))
    assert mistakes(f"job.reference={path}") == ""


def test_an_unknown_key_of_the_job_has_a_nearest_one() -> None:
    with pytest.raises(UserError, match="did you mean sizes"):
        compose("job.size=8")


@pytest.mark.parametrize(("text", "bytes_"), [("8", 8), (8, 8), ("64K", 65536), ("4MiB", 4 << 20), ("1gb", 1 << 30)])
def test_sizes_are_read_in_powers_of_1024(text: object, bytes_: int) -> None:
    assert parse_size(text) == bytes_


def test_spans_end_with_their_last_size_and_stop_at_what_fits() -> None:
    assert list(Span(8, 1000, 4).upto(1 << 30)) == [8, 32, 128, 512, 1000]
    assert list(Span(8, 1000, 4).upto(600)) == [8, 32, 128, 512]
    assert list(Span(8, None, 10).upto(900)) == [8, 80, 800, 900]
    assert list(Span(64, 64).upto(63)) == []
    assert parse_spans("8-max*2, 64K") == (Span(8, None, 2), Span(65536, 65536))
    assert parse_spans(["8", "1K-2K"]) == (Span(8, 8), Span(1024, 2048))


def test_sizes_of_all_spans_come_once_each_and_what_does_not_fit_is_known() -> None:
    settings = settings_of(compose("job.sizes=[8-64*8,16,1G]"))
    assert settings.sizes(1 << 20) == [8, 16, 64]
    assert settings.beyond(1 << 20) == 1 << 30
    assert settings.beyond(1 << 30) is None


@pytest.mark.parametrize(
    "words",
    [
        ["cluster.tasks_per_node=64"],
        ["+cluster=slurm", "cluster.nodes=16", "cluster.tasks_per_node=4", "job.link_gbps=200"],
        ["parallel.tp=8", "cluster.tasks_per_node=16", "job.groups=[tp,replicate]"],
        ["parallel.pp=32", "cluster.tasks_per_node=64", "parallel.schedule=interleaved", "job.groups=[pp]"],
        ["model.heads=3", "train.micro_batch=3"],
        ["job.sizes=8-512T*2"],
        ["job.sizes=512T", "+cluster=slurm", "cluster.tasks_per_node=2"],  # the nodes' memory is theirs to know
        ["job.groups=[cross,world]", "+cluster=slurm", "cluster.nodes=2-4", "cluster.tasks_per_node=1"],
    ],
)
def test_what_is_measured_need_not_fit_a_training(words: list[str]) -> None:
    assert mistakes(*words) == ""
