"""Initial weights that depend only on the seed and the parameter's global name, never on a layout or on an order."""

from __future__ import annotations

import hashlib
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class InitByName(Protocol):
    """A model that fills its own parameters one at a time; one without this keeps what its constructor drew."""

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Fill `parameter`, whose global name is `name`, drawing from `generator` only."""


def named_seed(seed: int, *names: object) -> int:
    """A 63-bit seed from a seed and any names, the same on every machine and in every process."""
    text = "\0".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def init_parameters(model: nn.Module, seed: int) -> None:
    """Fill every parameter of `model` from (seed, global name).

    A parameter that is shared under several names is filled under the first. Values are drawn on the CPU, so that
    the kind of device does not change them either. A model without `init_parameter` is left as it was built: build it
    under `torch.manual_seed(seed)`, as the training job does.
    """
    if not isinstance(model, InitByName):
        return
    for name, parameter in model.named_parameters():
        generator = torch.Generator(device="cpu").manual_seed(named_seed(seed, name))
        with torch.no_grad():
            if parameter.device.type == "cpu":
                model.init_parameter(name, parameter, generator)
            else:
                values = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                model.init_parameter(name, values, generator)
                parameter.copy_(values)
