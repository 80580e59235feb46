"""What ranks do in the tests of memory and offload: a few steps of a small decoder under ZeRO."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn

from dthpc.models.gpt import GPT
from dthpc.parallel.layout import Layout
from dthpc.parallel.memory import FP32, MIXED, StateBytes, expected, measure
from dthpc.parallel.mesh import make_mesh
from dthpc.parallel.offload import Offload
from dthpc.parallel.parts import whole_parts
from dthpc.parallel.sharding import ShardOptions, Shards
from dthpc.parallel.tensor.apply import split_tensors
from dthpc.train.optim import build_optimizer
from tests.parallel.precision_tasks import OPTIM, WORDS

LENGTH = 8


def after_steps(
    rank: int, degrees: dict[str, int], storage: torch.dtype = torch.float32, places: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Three steps under a layout.

    Returns:
        Values and gradient norms, measured and expected bytes with the elements that only pad, and how many mapped
        files lie in the folder of `places`.
    """
    mesh = make_mesh(Layout(**degrees), "cpu")
    torch.manual_seed(0)
    net = GPT(vocab_size=WORDS, dim=48, layers=2, heads=4, max_seq_len=LENGTH)
    parts = whole_parts([net])
    split_tensors([net], parts, mesh, False)
    offload = Offload(torch.device("cpu"), **(places or {}))
    shards = Shards([net], parts, mesh, ShardOptions(zero=mesh.layout.zero, storage=storage), offload)
    optimizer = build_optimizer(shards.pieces, OmegaConf.create(OPTIM))
    autocast = partial(torch.autocast, "cpu", dtype=storage, enabled=storage != torch.float32)
    norms = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + mesh.layout.dp_rank(rank))
        tokens = torch.randint(0, WORDS, (2, LENGTH), generator=generator)
        shards.begin_step()
        with shards.forward(0), autocast():
            # A stand-in for the vocabulary-parallel loss: each rank takes the logits that it has.
            loss = net(tokens).float().square().mean() / mesh.layout.dp
        with shards.backward(0, True):
            loss.backward()
        shards.finish_step()
        norms.append(shards.norm().item())
        shards.scale(0.5)
        if offload.active:
            shards.hand_over()
        offload.step(optimizer)
        shards.publish()
    matrix = FP32 if storage == torch.float32 else MIXED
    shard = mesh.size("shard")
    return {
        "values": [(p.part.name, p.start, p.tensor.detach().clone()) for p in shards.pieces],
        "parameters": _gathered(net, shards, autocast),
        "norms": norms,
        "measured": _numbers(measure(shards, optimizer)),
        "expected": _numbers(expected(parts.values(), zero=mesh.layout.zero, shard=shard, matrix=matrix)),
        "padding": sum(bucket.size - bucket.count for bucket in shards.buckets),
        "files": Path("/proc/self/maps").read_text().count(str((places or {}).get("folder"))),
    }


def _gathered(net: nn.Module, shards: Shards, autocast: Callable[[], Any]) -> list[torch.Tensor]:
    """The parameters as a forward pass sees them."""
    seen: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda module, *_: seen.extend(p.detach().clone() for p in module.parameters()))
        for module in net.modules()
        if not list(module.children())
    ]
    with torch.no_grad(), shards.forward(0), autocast():
        net(torch.zeros(1, LENGTH, dtype=torch.int64))
    for hook in hooks:
        hook.remove()
    return seen


def _numbers(each: StateBytes) -> dict[str, float]:
    return {"parameters": each.parameters, "gradients": each.gradients, "optimizer": each.optimizer}
