"""Number formats of the forward and backward arithmetic; weights, gradients and optimizer state stay fp32."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dthpc.errors import UserError, nearest

if TYPE_CHECKING:
    import torch

AVAILABLE = ("fp32", "bf16")


def check(config: Any) -> list[UserError]:
    """Mistakes in `config.precision`; free of torch."""
    compute = config.precision.compute
    if compute == "fp16":
        return [
            UserError(
                "fp16 needs dynamic loss scaling, which is not available in this version",
                key="precision.compute",
                value=compute,
                instead="precision.compute=bf16 (no loss scaling needed) or fp32",
            )
        ]
    if compute not in AVAILABLE:
        hint = nearest(str(compute), AVAILABLE)
        return [UserError("unknown number format", key="precision.compute", value=compute, instead=hint)]
    return []


@dataclass(frozen=True)
class Precision:
    """The format of arithmetic on one device."""

    compute: str
    """`fp32` or `bf16`."""

    device_type: str
    """`cpu` or `cuda`."""

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context for a forward pass and its loss; for fp32 it does nothing and costs nothing."""
        if self.compute == "fp32":
            return contextlib.nullcontext()
        import torch

        return torch.autocast(self.device_type, dtype=torch.bfloat16)


def make_deterministic(device: torch.device) -> None:
    """Let only algorithms run that give the same bits each time.

    On the CPU the operations used in training are so already, for a fixed number of threads. On a GPU, operations
    that have no such algorithm warn once.
    """
    if device.type != "cuda":
        return
    import torch

    # cuBLAS reads this when its first handle is made; without it two streams may share a workspace in either order.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling fresh memory helps to find bugs, and costs a pass over every activation.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
