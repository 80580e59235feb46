"""What ranks do in the tests of precision: a small decoder, the same work in every format."""

from __future__ import annotations

import math
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from dthpc.models.gpt import GPT
from dthpc.parallel.layout import Layout
from dthpc.parallel.mesh import make_mesh
from dthpc.parallel.parts import whole_parts
from dthpc.parallel.precision import Precision
from dthpc.parallel.scaler import make_scaler
from dthpc.parallel.sharding import ShardOptions, Shards
from dthpc.train.optim import build_optimizer

WORDS, LENGTH, SAMPLES = 11, 16, 8
OPTIM = {"_target_": "torch.optim.AdamW", "lr": 3e-3, "weight_decay": 0.1, "arguments": {"betas": [0.9, 0.95]}}


def sequences(step: int) -> Tensor:
    """Arithmetic sequences modulo a prime `[SAMPLES, LENGTH + 1]`: a rule that a small model learns in a few steps."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, WORDS, (SAMPLES, 1), generator=generator)
    stride = torch.randint(1, 4, (SAMPLES, 1), generator=generator)
    return (start + stride * torch.arange(LENGTH + 1)) % WORDS


def curve(
    rank: int, ranks: int, precision: dict[str, Any], zero: int, steps: int, skip: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Train, leaving out the updates of the steps in `skip`.

    Returns:
        This rank's share of each step's mean loss, the steps whose updates were left out, the norms, and the scaler's
        state.
    """
    torch.manual_seed(0)
    net = GPT(vocab_size=WORDS, dim=32, layers=2, heads=4, max_seq_len=LENGTH)
    formats = Precision(precision["compute"], "cpu", precision.get("parameters", "fp32"))
    scaler = make_scaler(OmegaConf.create({"loss_scale": 65536.0, "loss_scale_growth_every": 20, **precision}))
    mesh = make_mesh(Layout(**({"shard": ranks} if zero else {"replicate": ranks}), zero=zero), "cpu")
    shards = Shards([net], whole_parts([net]), mesh, ShardOptions(zero=zero, storage=formats.storage))
    optimizer = build_optimizer(shards.pieces, OmegaConf.create(OPTIM))
    losses, norms, skipped = [], [], []
    for step in range(steps):
        mine = sequences(step).chunk(ranks)[rank]
        shards.begin_step()
        with shards.forward(0), formats.autocast():
            logits = net(mine[:, :-1])
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), mine[:, 1:].flatten(), reduction="sum")
        mean = loss / (SAMPLES * LENGTH)
        with shards.backward(0, True):
            (mean * scaler.scale).backward()
        shards.finish_step()
        scale = scaler.scale
        norm = shards.norm().item() / scale
        if scaler.update(math.isfinite(norm)) and step not in skip:
            shards.scale(min(1.0, 1.0 / norm) / scale)
            optimizer.step()
            shards.publish()
        else:
            skipped.append(step)
        losses.append(mean.item())
        norms.append(norm)
    return {"losses": losses, "norms": norms, "skipped": skipped, "scaler": scaler.state_dict()}
