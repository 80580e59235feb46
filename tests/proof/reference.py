"""One process, in plain PyTorch: whole batches, torch's own clipping and optimizer, nothing of the parallel core."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from torch import Tensor, nn

from dthpc.data.sampler import sample_indices
from dthpc.models.dropout import DropoutStream, attach
from dthpc.models.init import init_parameters
from tests.proof.data import SAMPLES, SEED, SEQ_LEN

RATES = [0.005, 0.01, 0.01, 0.0055]
"""What the configured schedule gives: two steps of warm-up, then half a cosine, from the peak towards a tenth."""

STEPS = len(RATES)

BASE: dict[str, Any] = {
    "run": {"seed": SEED, "on_change": "refuse"},
    "train": {
        "steps": STEPS,
        "seq_len": SEQ_LEN,
        "global_batch": 16,
        "micro_batch": None,
        "eval_every": 0,
        "eval_samples": None,
        "grad_clip": None,
    },
    "model": {
        "_target_": "dthpc.models.gpt.GPT",
        "dim": 16,
        "layers": 4,
        "heads": 4,
        "kv_heads": 2,
        "hidden": 24,
        "norm": "rms",
        "position": "rope",
        "mlp": "swiglu",
        "tie_embeddings": False,
        "dropout": 0.0,
    },
    "loss": {"_target_": "dthpc.models.losses.next_token"},
    "data": {"_target_": "tests.proof.data.Tokens", "vocab_size": 32},
    "optim": {
        "_target_": "torch.optim.AdamW",
        "lr": 0.01,
        "weight_decay": 0.1,
        # Adam divides by the gradient's size, which makes whole updates of the rounding of elements that are nearly
        # zero. This epsilon is below the size of a usual element (5e-3), and above what 16 bits round it by.
        "arguments": {"betas": [0.9, 0.95], "eps": 1e-3},
        "schedule": {"name": "cosine", "warmup_steps": 2, "min_ratio": 0.1},
    },
    "checkpoint": {"every": 0, "keep": 1},
    "precision": {"loss_scale": 4096.0},
    "monitor": {"tensorboard": False},
}


@dataclass
class Trained:
    """What came of a training."""

    losses: list[float] = field(default_factory=list)
    """Mean over the targets of each step's global batch, in nats."""

    norms: list[float] = field(default_factory=list)
    """Gradient norm of each step, before clipping; not finite where 16-bit gradients overflow."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    """At the end, fp32, by global name."""

    held_out: float = math.nan
    """Mean held-out loss at the end."""

    others: list[Trained] = field(default_factory=list)
    """What the other ranks recorded; it must be the same, bit for bit."""


def merged(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with values under dotted keys changed; a key without a dot replaces a whole group."""
    values = copy.deepcopy(BASE)
    for key, value in overrides.items():
        *path, last = key.split(".")
        node = values
        for name in path:
            node = node.setdefault(name, {})
        node[last] = copy.deepcopy(value)
    return values


def train_alone(overrides: Mapping[str, Any]) -> Trained:
    """Train in this process, by the book."""
    values = merged(overrides)
    data = instantiate(values["data"])
    model = _build(values["model"], data)
    stream = DropoutStream(SEED)
    attach(model, stream)
    optimizer = _optimizer(model, values["optim"])
    batch, clip = values["train"]["global_batch"], values["train"]["grad_clip"]
    compute = values["precision"].get("compute", "fp32")
    scale = values["precision"]["loss_scale"] if compute == "fp16" else 1.0
    trained = Trained()
    for step in range(STEPS):
        numbers = range(step * batch, (step + 1) * batch)
        stream.step, stream.samples = step, numbers
        inputs, targets = _stack(data.train, sample_indices(SEED, SAMPLES, list(numbers)).tolist())
        loss = _mean_loss(model, inputs, targets, compute)
        optimizer.zero_grad()
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= scale
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip if clip is not None else math.inf).item()
        for group in optimizer.param_groups:
            group["lr"] = RATES[step]
        if math.isfinite(norm):
            optimizer.step()
        else:
            scale /= 2
        trained.losses.append(loss.item())
        trained.norms.append(norm)
    model.eval()
    with torch.no_grad():
        trained.held_out = _mean_loss(model, *_stack(data.valid, list(range(len(data.valid)))), compute).item()
    trained.parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return trained


def _build(fields: Mapping[str, Any], data: Any) -> nn.Module:
    words = {"vocab_size": data.vocab_size, "max_seq_len": SEQ_LEN} if hasattr(data, "vocab_size") else {}
    model: nn.Module = instantiate(fields, **words)
    init_parameters(model, SEED)
    return model


def _optimizer(model: nn.Module, optim: Mapping[str, Any]) -> torch.optim.Optimizer:
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": optim["weight_decay"]}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=optim["lr"], betas=(0.9, 0.95), eps=optim["arguments"]["eps"])


def _mean_loss(model: nn.Module, inputs: Tensor, targets: Tensor, compute: str) -> Tensor:
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[compute]
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        scores = model(inputs)
    return F.cross_entropy(scores.float().flatten(0, -2), targets.flatten(), ignore_index=-100)


def _stack(part: Any, items: list[int]) -> tuple[Tensor, Tensor]:
    pairs = [part[item] for item in items]
    return torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])
