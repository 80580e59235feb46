"""Number formats: of arithmetic, and of what is stored; master weights and optimizer state stay fp32."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dthpc.errors import UserError, nearest
from dthpc.parallel.scaler import LARGEST_SCALE, SMALLEST_SCALE

if TYPE_CHECKING:
    import torch

COMPUTE = ("fp32", "bf16", "fp16")
PARAMETERS = ("fp32", "compute")
# First CUDA compute capability with the format in hardware; before it, it is missing or slower than fp32.
_FIRST_CAPABILITY = {"fp16": (5, 3), "bf16": (8, 0)}


def check(config: Any) -> list[UserError]:
    """Mistakes in `config.precision`; free of torch."""
    return list(_find_mistakes(config.precision))


def _find_mistakes(precision: Any) -> Iterator[UserError]:
    for key, valid in (("compute", COMPUTE), ("parameters", PARAMETERS)):
        value = precision.get(key, "fp32")
        if value not in valid:
            yield UserError(
                "unknown number format", key=f"precision.{key}", value=value, instead=nearest(str(value), valid)
            )
    scale = precision.get("loss_scale", 65536.0)
    if not (SMALLEST_SCALE <= scale <= LARGEST_SCALE and math.frexp(scale)[0] == 0.5):  # nan is not, either
        yield UserError(
            f"a loss scale is a power of two (so that scaling is exact) between {SMALLEST_SCALE:g} and "
            f"{LARGEST_SCALE:.0f}",
            key="precision.loss_scale",
            value=scale,
            instead=f"precision.loss_scale={_power_of_two_near(scale):g}",
        )
    every = precision.get("loss_scale_growth_every", 2000)
    if every < 1:
        yield UserError(
            "a number of steps is at least 1",
            key="precision.loss_scale_growth_every",
            value=every,
            instead="precision.loss_scale_growth_every=2000",
        )


def _power_of_two_near(scale: float) -> float:
    if not 0 < scale < math.inf:
        return 65536.0
    return float(min(max(2.0 ** round(math.log2(scale)), SMALLEST_SCALE), LARGEST_SCALE))


@dataclass(frozen=True)
class Precision:
    """The number formats on one device."""

    compute: str
    """Format of arithmetic: `fp32`, `bf16` or `fp16`."""

    device_type: str
    """`cpu` or `cuda`."""

    parameters: str = "fp32"
    """Format in which matrices and their gradients are stored: `fp32`, or `compute` for that of arithmetic."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of arithmetic."""
        import torch

        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.compute]

    @property
    def storage(self) -> torch.dtype:
        """Type in which matrices (parameters of two or more dimensions) are stored; vectors always are fp32."""
        import torch

        return self.dtype if self.parameters == "compute" else torch.float32

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context for a forward pass and its loss; for fp32 it does nothing and costs nothing."""
        if self.compute == "fp32":
            return contextlib.nullcontext()
        import torch

        return torch.autocast(self.device_type, dtype=self.dtype)

    def check_device(self, device: torch.device) -> None:
        """See whether the device computes in the format: by what it says of itself, then by a small layer.

        Raises:
            UserError: it does not.
        """
        if self.compute == "fp32":
            return
        why = self._lack(_capability(device)) or self._failure(device)
        if why is not None:
            raise UserError(
                why, key="precision.compute", value=self.compute, instead=f"precision.compute={self._alternative()}"
            )

    def _lack(self, capability: tuple[int, int] | None) -> str | None:
        """Why a GPU of that compute capability lacks the format."""
        first = _FIRST_CAPABILITY[self.compute]
        if capability is None or capability >= first:
            return None
        return f"this GPU (compute capability {_dotted(capability)}) lacks the format, which came with {_dotted(first)}"

    def _failure(self, device: torch.device) -> str | None:
        """Why a small attention layer does not run, forward and backward."""
        import torch
        from torch.nn.functional import linear, scaled_dot_product_attention

        try:
            x = torch.ones(1, 2, 8, 8, device=device, requires_grad=True)
            with torch.autocast(device.type, dtype=self.dtype):
                y = linear(x, torch.ones(8, 8, device=device) / 8)
                z = scaled_dot_product_attention(y, y, y, is_causal=True)
            z.float().sum().backward()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            return f"this device or this build of torch does not compute in it ({str(error).splitlines()[0]})"
        return None

    def _alternative(self) -> str:
        return "fp16, which older GPUs have, or fp32" if self.compute == "bf16" else "bf16 or fp32"


def _capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA GPU; None for what has none."""
    import torch

    if device.type != "cuda" or torch.version.cuda is None:
        return None
    return torch.cuda.get_device_capability(device)


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


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
