"""One process, in plain PyTorch: whole batches, torch's own clipping and optimizer, nothing of the parallel core."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dthpc.data.sampler import sample_indices
from dthpc.models.dropout import DropoutStream, attach
from dthpc.models.gpt import GPT
from dthpc.models.init import init_parameters

STEPS, SEED, SEQ_LEN, SAMPLES = 4, 11, 8, 40
RATES = [0.005, 0.01, 0.01, 0.0055]
"""What the configured schedule gives: two steps of warm-up, then half a cosine, from the peak towards a tenth."""

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
    "data": {"_target_": "tests.proof.reference.Tokens", "vocab_size": 32},
    "optim": {
        "_target_": "torch.optim.AdamW",
        "lr": 0.01,
        "weight_decay": 0.1,
        # Adam divides by the gradient's size: a tiny epsilon blows up the rounding of gradients that are zero by
        # symmetry, such as those of key biases.
        "arguments": {"betas": [0.9, 0.95], "eps": 1e-4},
        "schedule": {"name": "cosine", "warmup_steps": 2, "min_ratio": 0.1},
    },
    "checkpoint": {"every": 0, "keep": 1},
    "precision": {"loss_scale": 4096.0},
}


class Tokens:
    """Random tokens; in each sample another number of targets counts."""

    def __init__(self, vocab_size: int = 32) -> None:
        self.vocab_size = vocab_size
        self.train = _Part(vocab_size, SAMPLES, 1)
        self.valid = _Part(vocab_size, 5, 2)


class _Part:
    def __init__(self, vocab_size: int, count: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(vocab_size, (count, SEQ_LEN + 1), generator=draw)
        # A rule to learn, so that the loss falls.
        self.tokens[:, 1::2] = (self.tokens[:, 0:-1:2] * 3 + 1) % vocab_size

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        targets = self.tokens[index, 1:].clone()
        targets[SEQ_LEN - index % 4 :] = -100
        return self.tokens[index, :-1], targets


@dataclass
class Trained:
    """What came of a training."""

    losses: list[float] = field(default_factory=list)
    """Mean over the targets of each step's global batch, in nats."""

    norms: list[float] = field(default_factory=list)
    """Gradient norm of each step, before clipping."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    """At the end, fp32, by global name."""

    held_out: float = math.nan
    """Mean held-out loss at the end."""


def merged(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with values under dotted keys changed."""
    values = copy.deepcopy(BASE)
    for key, value in overrides.items():
        group, *path, last = key.split(".")
        node = values.setdefault(group, {})
        for name in path:
            node = node.setdefault(name, {})
        node[last] = value
    return values


def train_alone(overrides: Mapping[str, Any]) -> Trained:
    """Train in this process, by the book."""
    values = merged(overrides)
    fields = {key: value for key, value in values["model"].items() if key != "_target_"}
    data = Tokens(values["data"]["vocab_size"])
    model = GPT(vocab_size=data.vocab_size, max_seq_len=SEQ_LEN, **fields)
    init_parameters(model, SEED)
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
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip if clip is not None else math.inf)
        for group in optimizer.param_groups:
            group["lr"] = RATES[step]
        optimizer.step()
        trained.losses.append(loss.item())
        trained.norms.append(norm.item())
    model.eval()
    with torch.no_grad():
        trained.held_out = _mean_loss(model, *_stack(data.valid, list(range(len(data.valid)))), compute).item()
    trained.parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return trained


def _optimizer(model: nn.Module, optim: Mapping[str, Any]) -> torch.optim.Optimizer:
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": optim["weight_decay"]}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=optim["lr"], betas=(0.9, 0.95), eps=optim["arguments"]["eps"])


def _mean_loss(model: nn.Module, inputs: Tensor, targets: Tensor, compute: str) -> Tensor:
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[compute]
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        logits = model(inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100)


def _stack(part: _Part, items: list[int]) -> tuple[Tensor, Tensor]:
    pairs = [part[item] for item in items]
    return torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])
