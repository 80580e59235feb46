"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2).

Gradients below 6e-8 vanish in fp16. So the loss is multiplied by a scale before the backward pass, gradients are
divided by it before they are clipped and used, and the scale is kept as large as it may be: it doubles after some steps
without overflow (as `torch.amp.GradScaler` does), and after an overflow it is halved and the update left out.

Scales are powers of two, so that scaling and unscaling round nothing. Whether there was an overflow is read off the
global gradient norm, which is the same number on all ranks of all axes: they skip together, without a message for it.

    (loss * scaler.scale).backward()          # of each micro-batch
    scale = scaler.scale
    norm = shards.norm() / scale              # inf or nan after an overflow
    if scaler.update(isfinite(norm)):         # from here on, `scaler.scale` is the next step's
        shards.scale(1 / scale * clipping)
        optimizer.step()
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SMALLEST_SCALE = 2.0**-14
LARGEST_SCALE = 2.0**24


@dataclass
class LossScaler:
    """A loss scale and its history. Its state is JSON, for checkpoints; it is the same on all ranks."""

    scale: float = 65536.0
    """What the loss of the next backward pass is multiplied by: a power of two."""

    growth_every: int = 2000
    """Steps without overflow after which the scale doubles."""

    dynamic: bool = True
    """Whether the scale follows the gradients; if not it stays, and every update counts."""

    clean: int = field(default=0, init=False)
    """Steps without overflow since the scale last changed."""

    skipped: int = field(default=0, init=False)
    """Updates left out so far."""

    overflows: int = field(default=0, init=False)
    """Steps so far whose gradients were not finite."""

    def update(self, norm_is_finite: bool) -> bool:
        """Tell whether this step's global gradient norm is finite; returns whether to apply its update.

        Where the scale is fixed the answer is what was told: the caller decides what a norm means that is not finite.

        Raises:
            FloatingPointError: gradients overflow at the smallest scale, so it is no matter of scale.
        """
        if not norm_is_finite:
            self._overflow()
            return False
        if self.dynamic:
            self.clean += 1
            if self.clean >= self.growth_every:
                self.scale, self.clean = min(self.scale * 2, LARGEST_SCALE), 0
        return True

    def _overflow(self) -> None:
        self.overflows += 1
        self.clean = 0
        if not self.dynamic:
            return
        if self.scale <= SMALLEST_SCALE:
            raise FloatingPointError(
                f"gradients are not finite at the smallest loss scale of {SMALLEST_SCALE:g}, so it is the loss or the "
                "forward pass that is not; lower optim.lr, look at the data, or write precision.compute=bf16"
            )
        self.scale = max(self.scale / 2, SMALLEST_SCALE)
        self.skipped += 1

    def state_dict(self) -> dict[str, Any]:
        """What the next steps depend on, and the counters."""
        names = ("scale", "dynamic", "clean", "skipped", "overflows")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state.

        A run may change its format between attempts: a fixed scale stays what it is, and a dynamic one does not go on
        from a fixed one.
        """
        self.skipped, self.overflows = int(state["skipped"]), int(state["overflows"])
        if self.dynamic and state["dynamic"]:
            self.scale, self.clean = float(state["scale"]), int(state["clean"])


def make_scaler(precision: Any) -> LossScaler:
    """The scaler of the `precision` group of a configuration: for fp32 and bf16 one that stays at 1."""
    if precision.compute != "fp16":
        return LossScaler(scale=1.0, dynamic=False)
    return LossScaler(scale=float(precision.loss_scale), growth_every=int(precision.loss_scale_growth_every))
