"""How long each layer of a model takes, for stages that are balanced by time."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dthpc.parallel.pipeline.stages import keep, layers_of
from dthpc.parallel.pipeline.worker import Loss


def measure(
    model: nn.Module,
    inputs: Any,
    targets: Any,
    loss: Loss,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    repeats: int = 3,
) -> list[float]:
    """Seconds that each pipeline layer takes for forward and backward, the least of some tries.

    One layer at a time is copied to the device, with values that do not matter, so that the whole model need not fit.

    Args:
        model: the whole model, perhaps on the meta device.
        inputs: one micro-batch, on the device.
        targets: of it; the loss counts for the last layer.
        loss: of the model's outputs.
        device: where to run.
        autocast: makes the context of forward passes.
        repeats: tries.
    """
    # Layers may draw random numbers, and a run must draw the same ones whether it measures or not.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        return _measure(model, inputs, targets, loss, device, autocast, repeats)


def _measure(
    model: nn.Module,
    inputs: Any,
    targets: Any,
    loss: Loss,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]],
    repeats: int,
) -> list[float]:
    layers = layers_of(model)
    seconds: list[float] = []
    x = inputs
    for number in range(len(layers)):
        chunk = _real(keep(model, layers, [number]), device)
        last = number == len(layers) - 1

        def run(chunk: nn.Module = chunk, x: Any = x, first: bool = not seconds, last: bool = last) -> Tensor:
            x = x if first else x.detach().requires_grad_()
            with autocast():
                output: Tensor = chunk(x)
                end = loss(output, targets)[0] if last else output
            if end.requires_grad:
                torch.autograd.backward(end, torch.ones_like(end))
            return output.detach()

        x = run()
        seconds.append(min(_time(run, device) for _ in range(repeats)))
    return seconds


def _time(run: Callable[[], Any], device: torch.device) -> float:
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


@torch.no_grad()
def _real(chunk: nn.Module, device: torch.device) -> nn.Module:
    """A copy with memory of its own; values of a model without any are small, so that none overflows."""
    if not any(tensor.is_meta for tensor in chunk.parameters()):
        return copy.deepcopy(chunk).to(device)
    chunk = chunk.to_empty(device=device)
    for parameter in chunk.parameters():
        parameter.normal_(0.0, 0.02, generator=torch.Generator(device).manual_seed(0))
    getattr(chunk, "reset_buffers", lambda: None)()
    return chunk
