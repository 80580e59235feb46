"""A user's own classes, as they plug in by `_target_`, and what ranks do in the tests of the jobs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.train import tasks as training


class Digits:
    """A plain map-style data set: points of two classes."""

    def __init__(self, count: int = 60) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        label = index % 2
        point = torch.randn(4, generator=torch.Generator().manual_seed(index)) + 3 * label
        return point, label


class Named:
    """Data whose inputs are a dict, as other libraries like them."""

    def __init__(self) -> None:
        self.train = _NamedPart(Digits(50))
        self.valid = _NamedPart(Digits(10))


class _NamedPart:
    def __init__(self, digits: Digits) -> None:
        self.digits = digits

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[dict[str, torch.Tensor], int]:
        point, label = self.digits[index]
        return {"point": point, "scale": torch.ones(())}, label


class TrainOnly:
    """Data that holds nothing out."""

    def __init__(self) -> None:
        self.train = Digits(40)


class Streamed:
    """Data whose training part can only be walked through."""

    def __init__(self) -> None:
        self.train = iter(Digits(40))  # type: ignore[call-overload]
        self.valid = Digits(10)


class Perceptron(nn.Module):
    """A user's model, with running statistics."""

    def __init__(self, width: int, classes: int = 2) -> None:
        super().__init__()
        self.inner = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)
        self.outer = nn.Linear(width, classes)

    def forward(self, x: Any) -> torch.Tensor:
        if isinstance(x, dict):
            x = x["point"] * x["scale"][:, None]
        out: torch.Tensor = self.outer(self.norm(self.inner(x)).relu())
        return out


class Spare(Perceptron):
    """A model with a layer that its forward pass leaves out."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.spare = nn.Linear(width, 3)


class Hinge:
    """A loss with state of its own, that says how it counts."""

    def __init__(self, margin: float) -> None:
        self.margin = margin

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = nn.functional.multi_margin_loss(outputs, targets, margin=self.margin, reduction="sum")
        return total, torch.tensor(2 * len(targets))

    def count_targets(self, targets: torch.Tensor) -> int:
        return 2 * len(targets)


def scaled(outputs: torch.Tensor, targets: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss as a function with an option."""
    return scale * nn.functional.cross_entropy(outputs, targets, reduction="sum"), torch.tensor(len(targets))


class NotACallback:
    """Lacks all the methods."""


class DataOfRank:
    """Data that differs between ranks, as files on a disk of each node may."""

    def __init__(self) -> None:
        count = 20 + torch.distributed.get_rank()
        self.train = self.valid = Digits(count)


def train_own(rank: int, folder: str, attempt: int, changes: dict[str, Any]) -> training.Result:
    """A training of a user's model on a user's data."""
    own = {
        "model": {"_target_": "tests.jobs.tasks.Perceptron", "width": 8},
        "data": {"_target_": "tests.jobs.tasks.Digits"},
        "train": {"steps": 20, "global_batch": 10},
    }
    config = training.make_config(**{k: v for k, v in own.items() if k != "data"})
    config.data = own["data"]
    for group, entries in changes.items():
        config[group] = entries if "_target_" in entries else {**config[group], **entries}
    return training.train_config(rank, folder, attempt, config)


def error_of(rank: int, folder: str, attempt: int, changes: dict[str, Any]) -> tuple[str, str]:
    """Kind and text of the exception of `train_own`."""
    try:
        train_own(rank, folder, attempt, changes)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""
