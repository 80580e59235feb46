"""From configuration to objects: a user's classes plug in by `_target_`, and their mistakes get one clear message."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from dthpc.errors import UserError
from dthpc.models.init import InitByName, init_parameters
from dthpc.parallel.materialize import is_meta

HELD_OUT_EVERY = 20
"""A data set without a split of its own gives each 20th sample to the held-out part."""


def instantiate(node: Any, key: str, **defaults: Any) -> Any:
    """The object that a node describes.

    Args:
        node: a mapping with `_target_` and arguments.
        key: its name in the configuration, for messages.
        defaults: arguments for those that the node leaves out or sets to null, where the target takes them.

    Raises:
        UserError: the target cannot be imported, or refuses its arguments; a `UserError` of the target passes as it is.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate as hydra_instantiate

    target = find_target(node, key)
    taken = _parameters(target)
    extra = {name: value for name, value in defaults.items() if name in taken and node.get(name) is None}
    try:
        return hydra_instantiate(node, **extra, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, UserError):
            raise cause from None
        if isinstance(cause, TypeError):
            raise UserError(
                f"cannot be built: {cause}",
                key=key,
                value=node["_target_"],
                instead="the arguments that it takes: " + (", ".join(taken) or "none"),
            ) from error
        raise (cause or error) from None


def find_target(node: Any, key: str) -> Callable[..., Any]:
    """The class or function that `_target_` names; raises `UserError` where there is none."""
    name = str((node.get("_target_") if node is not None else None) or "")
    if "." not in name:
        raise UserError("names nothing to build", key=f"{key}._target_", instead="package.module.Name")
    try:
        target: Callable[..., Any] = _locate(name)
    except Exception as error:
        raise UserError(
            f"cannot be imported: {type(error).__name__}: {error}",
            key=f"{key}._target_",
            value=name,
            instead="check the spelling, or add its folder to PYTHONPATH",
        ) from error
    return target


def _locate(name: str) -> Any:
    """The object of a dotted name: the longest part that is a module is imported, the rest are attributes."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], start=2):
        if not hasattr(found, part) and isinstance(found, ModuleType):
            path = ".".join(parts[:number])
            if importlib.util.find_spec(path) is not None:
                importlib.import_module(path)
        found = getattr(found, part)
    return found


def build_data(node: Any) -> Any:
    """The data, prepared: an object with non-empty `train` and `valid` data sets.

    A plain map-style data set is split by a stable rule, see `HELD_OUT_EVERY`.
    """
    data = instantiate(node, "data")
    if not hasattr(data, "train"):
        if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise UserError(
                f"a {type(data).__name__} is no data",
                key="data._target_",
                value=node["_target_"],
                instead="a map-style data set (`len`, `[i] -> (input, target)`), or a class with two of them, `train` "
                "and `valid`",
            )
        data = SplitData(data)
    if hasattr(data, "prepare"):
        data.prepare()
    return data


def build_model(config: Any, data: Any) -> nn.Module:
    """The whole model: without memory if it fills itself by name, else with its first values, on the CPU.

    Raises:
        UserError: it is no `nn.Module`, or its vocabulary is smaller than the data's.
    """
    vocab = getattr(data, "vocab_size", None)
    asked = config.model.get("vocab_size")
    if vocab is not None and asked is not None and asked < vocab:
        raise UserError(
            f"the data has {vocab} different tokens",
            key="model.vocab_size",
            value=asked,
            instead=f"model.vocab_size=null to take the data's, or at least {vocab}",
        )
    # For models that draw their weights when they are built; others are filled by name, each rank its part.
    torch.manual_seed(config.run.seed)
    defaults = {"max_seq_len": config.train.seq_len, **({} if vocab is None else {"vocab_size": vocab})}
    target = find_target(config.model, "model")
    with torch.device("meta") if _builds_without_memory(target) else nullcontext():
        model = instantiate(config.model, "model", **defaults)
    if not isinstance(model, nn.Module):
        raise UserError(
            f"builds a {type(model).__name__}",
            key="model._target_",
            value=config.model["_target_"],
            instead="something that builds a torch.nn.Module",
        )
    if not is_meta(model):
        init_parameters(model, config.run.seed)
    return model


def _builds_without_memory(target: Any) -> bool:
    """Whether a class can fill parameters by name and buffers anew, so that no rank need ever hold the whole model."""
    return inspect.isclass(target) and issubclass(target, InitByName) and hasattr(target, "reset_buffers")


def build_loss(node: Any) -> Callable[[Any, Any], Any]:
    """The loss: an object of a class, or a function with the node's other entries as keyword arguments."""
    target = find_target(node, "loss")
    if inspect.isclass(target):
        loss: Callable[[Any, Any], Any] = instantiate(node, "loss")
        return loss
    arguments = {name: node[name] for name in node if name != "_target_"}
    return partial(target, **arguments) if arguments else target


@dataclass(frozen=True)
class SplitData:
    """A plain data set in two parts."""

    whole: Any
    """Map-style data set of (input, target) pairs."""

    @property
    def train(self) -> EveryNth:
        """All samples but each 20th."""
        return EveryNth(self.whole, HELD_OUT_EVERY, held_out=False)

    @property
    def valid(self) -> EveryNth:
        """Each 20th sample."""
        return EveryNth(self.whole, HELD_OUT_EVERY, held_out=True)

    @property
    def vocab_size(self) -> int | None:
        """The data set's own, if it has one."""
        return getattr(self.whole, "vocab_size", None)


@dataclass(frozen=True)
class EveryNth:
    """Each n-th sample of a data set (n-1, 2n-1, …), or all the others."""

    whole: Any
    """The data set."""

    n: int
    """How many samples go to one that is held out."""

    held_out: bool
    """Which of the two parts this is."""

    def __len__(self) -> int:
        count = len(self.whole)
        return count // self.n if self.held_out else count - count // self.n

    def __getitem__(self, index: int) -> Any:
        """The sample at a place of this part."""
        if self.held_out:
            return self.whole[(index + 1) * self.n - 1]
        return self.whole[index + index // (self.n - 1)]


def _parameters(target: Callable[..., Any]) -> list[str]:
    try:
        return [name for name in inspect.signature(target).parameters if name != "self"]
    except (TypeError, ValueError):
        return []
