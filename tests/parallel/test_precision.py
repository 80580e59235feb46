from __future__ import annotations

import pytest
import torch
from omegaconf import OmegaConf

from dthpc.parallel.precision import Precision, check


@pytest.mark.parametrize(("compute", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_arithmetic_runs_in_the_format_asked_for_and_weights_stay_fp32(compute: str, dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(4, 4)
    with Precision(compute, "cpu").autocast():
        out = layer(torch.randn(2, 4))
    assert out.dtype == dtype
    out.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == layer.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("compute", "words"),
    [("fp16", "needs dynamic loss scaling"), ("bf61", "did you mean bf16")],
)
def test_other_formats_are_refused(compute: str, words: str) -> None:
    (error,) = check(OmegaConf.create({"precision": {"compute": compute}}))
    assert words in error.message()


def test_available_formats_pass() -> None:
    assert check(OmegaConf.create({"precision": {"compute": "bf16"}})) == []
