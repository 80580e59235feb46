from __future__ import annotations

import copy

import pytest
from omegaconf import OmegaConf

from dthpc.config.compose import read_command_line
from dthpc.config.identity import default_name, differences


def resolved(*words: str) -> tuple[dict, dict[str, str]]:
    ((config, choices),), _ = read_command_line(list(words), "test")
    return OmegaConf.to_container(config, resolve=True), choices.options


def test_the_same_command_means_the_same_run() -> None:
    assert default_name(*resolved("run.seed=5")) == default_name(*resolved("run.seed=5"))


@pytest.mark.parametrize("word", ["run.seed=5", "optim.lr=0.5", "model.dim=64", "+cluster=slurm", "cluster.nodes=3"])
def test_what_decides_the_result_gives_another_name(word: str) -> None:
    assert default_name(*resolved(word)) != default_name(*resolved())


@pytest.mark.parametrize("word", ["monitor.log_every=1", "checkpoint.every=7", "train.eval_every=3", "follow=false"])
def test_what_decides_nothing_keeps_the_name(word: str) -> None:
    assert default_name(*resolved(word)) == default_name(*resolved())


def test_a_name_says_what_it_is() -> None:
    assert default_name(*resolved()).startswith("train-gpt_tiny-")


def test_differences_name_key_old_and_new() -> None:
    before, _ = resolved()
    after = copy.deepcopy(before)
    after["optim"]["lr"] = 0.5
    after["cluster"]["nodes"] = 4
    after["model"]["dim"] = 256
    assert differences(before, after) == [
        f"model.dim: {before['model']['dim']} → 256",
        f"optim.lr: {before['optim']['lr']} → 0.5",
    ]


def test_a_key_that_appears_or_goes_is_a_difference() -> None:
    before, _ = resolved()
    after = copy.deepcopy(before)
    after["model"]["extra"] = 1
    assert differences(before, after) == ["model.extra: None → 1"]
    assert differences(after, before) == ["model.extra: 1 → None"]
