"""Whole trainings by the real job, to be interrupted and resumed in other layouts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, load

from dthpc.checkpoint import store
from dthpc.config.schema import Config
from dthpc.models.losses import next_token
from dthpc.parallel.apply import parallelize
from dthpc.parallel.layout import Layout
from dthpc.parallel.mesh import make_mesh
from dthpc.train.optim import build_optimizer
from dthpc.train.state import TrainState, live_state, take_over
from tests.train.tasks import train_config

STEPS, SAVED = 4, 2


CONFIG: dict[str, Any] = {
    "run": {"seed": 7, "on_change": "refuse"},
    "train": {"steps": STEPS, "seq_len": 16, "global_batch": 8, "eval_every": -1, "grad_clip": 1.0},
    "model": {
        "_target_": "dthpc.models.gpt.GPT",
        "dim": 16,
        "layers": 4,
        "heads": 2,
        "dropout": 0.1,
        "tie_embeddings": True,
    },
    "loss": {"_target_": "dthpc.models.losses.next_token"},
    "data": {"_target_": "tests.train.tasks.Sequences", "length": 16},
    "optim": {
        "_target_": "torch.optim.AdamW",
        "lr": 1e-2,
        "arguments": {"betas": [0.9, 0.95], "eps": 1e-5},
        "schedule": {"name": "cosine", "warmup_steps": 2},
    },
    "checkpoint": {"every": SAVED, "keep": 0},
    "monitor": {"tensorboard": False},
}


def train(rank: int, folder: str, attempt: int, changes: dict[str, Any]) -> list[float]:
    """Train from the newest checkpoint, with values under dotted keys changed; the losses."""
    config = OmegaConf.merge(OmegaConf.structured(Config), copy.deepcopy(CONFIG))
    for key, value in changes.items():
        OmegaConf.update(config, key, value)
    return [record.loss for record in train_config(rank, folder, attempt, config).records]


def restore_frozen(rank: int, folder: str) -> tuple[list[str], bool]:
    """Save and restore a model with a frozen layer: the frozen names, and whether all values came back."""
    config = OmegaConf.merge(OmegaConf.structured(Config), copy.deepcopy(CONFIG), {"parallel": {"zero": 1}})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    mesh = make_mesh(Layout(shard=2, zero=1), "cpu")
    parallel = parallelize(model, next_token, mesh, config, torch.device("cpu"))
    optimizer = build_optimizer(parallel.shards.pieces, config.optim)
    before = [parameter.detach().clone() for parameter in parallel.module.parameters()]
    live = live_state(parallel, optimizer, TrainState())
    store.save(Path(folder), 1, live, attempt=0)
    with torch.no_grad():
        for tensor in (*parallel.module.parameters(), *(piece.tensor for piece in parallel.shards.pieces)):
            tensor.fill_(99.0)
    store.restore(Path(folder), live)
    take_over(parallel, live)
    after = list(parallel.module.parameters())
    return [share.name for share in live.frozen], all(map(torch.equal, before, after))


def whole_state(folder: Path) -> dict[str, torch.Tensor]:
    """All shared tensors of a checkpoint, put together by torch's own reader."""
    known = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in known.items()
        if not key.startswith(("rng.", "extra."))
    }
    load(tensors, storage_reader=FileSystemReader(folder), no_dist=True)
    return tensors
