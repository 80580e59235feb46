from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from dthpc.parallel.check import check


def messages(
    optimizer: str = "torch.optim.AdamW",
    clip: float | None = None,
    precision: dict[str, str] | None = None,
    **parallel: Any,
) -> list[str]:
    config = {
        "parallel": parallel,
        "train": {"global_batch": 64, "micro_batch": None, "grad_clip": clip},
        "optim": {"_target_": optimizer},
        "precision": {"compute": "fp32", "parameters": "fp32", **(precision or {})},
    }
    return [error.message() for error in check(OmegaConf.create(config), 8)]


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "RMSprop", "Adagrad", "NAdam", "Rprop", "ASGD"])
def test_element_wise_optimizers_go_with_every_layout(name: str) -> None:
    assert messages(f"torch.optim.{name}", zero=3, tp=2, pp=2) == []


@pytest.mark.parametrize(
    ("name", "parallel", "cut"),
    [
        ("torch.optim.Adafactor", {"zero": 1}, "with parallel.zero=1 a rank"),
        ("torch.optim.Muon", {"tp": 2}, "with parallel.tp=2 a rank"),
        ("torch.optim.SparseAdam", {"zero": 2, "tp": 2}, "with parallel.zero=2 and parallel.tp=2 a rank"),
        ("torch.optim.LBFGS", {"pp": 2}, "with parallel.pp=2 a rank"),
        ("apex.optimizers.FusedLAMB", {"zero": 1}, "FusedLAMB sees whole matrices"),
        ("my.DistributedShampoo", {"zero": 1}, "sees whole matrices"),
        ("my.SOAP", {"zero": 1}, "sees whole matrices"),
        ("my.LARS", {"zero": 1}, "sees whole matrices"),
    ],
)
def test_optimizers_that_see_whole_matrices_are_refused_where_matrices_are_cut(
    name: str, parallel: dict[str, int], cut: str
) -> None:
    (found,) = messages(name, **parallel)
    assert found.startswith(f"optim._target_={name}: ")
    assert cut in found
    assert messages(name) == []


def test_names_that_only_look_alike_are_let_pass() -> None:
    assert messages("my.LambdaAdam", zero=1) == []
    assert messages("my.shampoo.Adam", zero=1) == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"zero": 1, "gradients": {"powersgd_rank": 4}},
            "parallel.gradients.powersgd_rank=4: PowerSGD approximates whole matrices, and parallel.zero=1",
        ),
        (
            {"gradients": {"powersgd_rank": 4}, "precision": {"compute": "bf16", "parameters": "compute"}},
            "precision.parameters=compute holds them in bf16",
        ),
        ({"zero": 2, "offload": {"parameters": "cpu"}}, "parallel.zero=2 keeps them whole. Instead: parallel.zero=3"),
        ({"offload": {"optimizer": "nvme"}}, "parallel.offload.optimizer=nvme: needs a folder on a local disk"),
        ({"zero": 3, "offload": {"parameters": "nvme"}}, "parallel.offload.parameters=nvme: needs a folder"),
        ({"outer": {"every": 4, "delay": 4}}, "parallel.outer.every=4 steps later. Instead: at most 3"),
        ({"outer": {"every": 4, "lr": 0.0}}, "parallel.outer.lr=0.0: a learning rate is positive"),
        ({"outer": {"every": 4, "lr": float("nan")}}, "parallel.outer.lr=nan"),
        ({"outer": {"every": 4, "momentum": 1.0}}, "parallel.outer.momentum=1.0: a momentum is at least 0 and less"),
        (
            {"pp": 2, "schedule": "pipedream", "zero": 1},
            "so parallel.zero=1 does not go with it. Instead: parallel.zero=0",
        ),
        (
            {"pp": 2, "schedule": "pipedream", "clip": 1.0},
            "so train.grad_clip=1.0 does not go with it. Instead: train.",
        ),
        (
            {"pp": 2, "schedule": "pipedream", "precision": {"compute": "fp16"}},
            "so precision.compute=fp16 does not go with it. Instead: precision.compute=bf16",
        ),
        ({"pp": 2, "schedule": "pipedream", "outer": {"every": 2}}, "so parallel.outer.every=2 does not go with it"),
    ],
)
def test_what_does_not_go_together_is_told(settings: dict[str, Any], expected: str) -> None:
    found = messages(**settings)
    assert len(found) == 1, found
    assert expected in found[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"gradients": {"powersgd_rank": 4}, "precision": {"compute": "fp32", "parameters": "compute"}},
        {"zero": 3, "offload": {"optimizer": "nvme", "parameters": "nvme", "folder": "/scratch"}},
        {"offload": {"optimizer": "cpu"}},
        {"outer": {"delay": 3, "lr": -1.0}},
        {"pp": 2, "schedule": "pipedream"},
        {"schedule": "pipedream", "zero": 1, "clip": 1.0},
    ],
)
def test_what_goes_together_or_takes_no_part_is_let_pass(settings: dict[str, Any]) -> None:
    assert messages(**settings) == []


def test_all_that_pipedream_excludes_is_told_together() -> None:
    found = messages(clip=1.0, precision={"compute": "fp16"}, pp=2, schedule="pipedream", zero=1)
    assert len(found) == 3
