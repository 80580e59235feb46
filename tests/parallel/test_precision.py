from __future__ import annotations

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from dthpc.errors import UserError
from dthpc.parallel.precision import Precision, check

FORMATS = [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]


def mistakes(**fields: Any) -> list[str]:
    return [error.message() for error in check(OmegaConf.create({"precision": {"compute": "fp16", **fields}}))]


@pytest.mark.parametrize(("compute", "dtype"), FORMATS)
def test_arithmetic_runs_in_the_format_asked_for_and_weights_stay_fp32(compute: str, dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(4, 4)
    with Precision(compute, "cpu").autocast():
        out = layer(torch.randn(2, 4))
    assert out.dtype == dtype
    out.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == layer.weight.dtype == torch.float32


@pytest.mark.parametrize(("compute", "dtype"), FORMATS)
def test_matrices_are_stored_in_fp32_or_in_the_format_of_arithmetic(compute: str, dtype: torch.dtype) -> None:
    assert Precision(compute, "cpu").storage == torch.float32
    assert Precision(compute, "cpu", "compute").storage == dtype


def test_only_fp16_needs_loss_scaling() -> None:
    assert [name for name, _ in FORMATS if Precision(name, "cpu").needs_scaling] == ["fp16"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"compute": "bf61"}, "precision.compute=bf61: unknown number format. Instead: did you mean bf16"),
        ({"parameters": "bf16"}, "precision.parameters=bf16: unknown number format. Instead: valid ones are: compute"),
        ({"loss_scale": 0.0}, "Instead: precision.loss_scale=65536"),
        ({"loss_scale": -4.0}, "precision.loss_scale=-4.0: a loss scale is a power of two"),
        ({"loss_scale": 1000.0}, "Instead: precision.loss_scale=1024"),
        ({"loss_scale": float("nan")}, "a loss scale is a power of two"),
        ({"loss_scale": 2.0**30}, "between 6.10352e-05 and 16777216"),
        ({"loss_scale_growth_every": 0}, "precision.loss_scale_growth_every=0: a number of steps is at least 1"),
    ],
)
def test_mistakes_are_told(fields: dict[str, Any], words: str) -> None:
    (message,) = mistakes(**fields)
    assert words in message


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("parameters", ["fp32", "compute"])
def test_available_formats_pass(compute: str, parameters: str) -> None:
    assert mistakes(compute=compute, parameters=parameters, loss_scale=2.0**-3) == []


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_this_cpu_has_the_formats(compute: str) -> None:
    Precision(compute, "cpu").check_device(torch.device("cpu"))


def test_a_device_that_this_build_cannot_use_is_refused_with_torchs_reason() -> None:
    with pytest.raises(UserError, match=r"precision.compute=fp16: this device or this build of torch does not .*(?i:xpu)"):
        Precision("fp16", "xpu").check_device(torch.device("xpu"))


@pytest.mark.parametrize(
    ("compute", "capability", "refused"),
    [("bf16", (7, 0), True), ("bf16", (8, 0), False), ("fp16", (7, 0), False), ("fp16", (5, 2), True)],
)
def test_gpus_without_the_format_in_hardware_are_told(compute: str, capability: tuple[int, int], refused: bool) -> None:
    why = Precision(compute, "cuda")._lack(capability)
    assert (why is not None) == refused
    assert why is None or f"compute capability {capability[0]}.{capability[1]}" in why
