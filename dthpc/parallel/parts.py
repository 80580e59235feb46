"""Which part of each parameter a rank holds: the vocabulary that tensor, pipeline and data parallelism share.

A *part* is what a rank holds of a parameter after layers were dealt to pipeline stages and matrices were split over
tensor-parallel ranks. A *piece* is the flat range of a part that a rank's optimizer updates: the whole part without
ZeRO, a share of it with ZeRO.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn


@dataclass(frozen=True)
class Part:
    """What this rank holds of one parameter, in the coordinates of the whole one."""

    name: str
    """Global name; of a parameter with several names (tied embeddings), the whole model's first."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""

    dim: int | None = None
    """Dimension along which it is split over tensor-parallel ranks; None: they all hold the whole."""

    start: int = 0
    """First index of this part along `dim`."""

    size: int | None = None
    """Length of this part along `dim`; None where it is not split."""

    partial: bool = False
    """Whether each tensor-parallel rank sees only some of the tokens, so that gradients must be added over them."""

    counts: bool = True
    """Whether norms and checkpoints take this copy: false for all but the first holder among tensor-parallel ranks
    and pipeline stages that hold equal values. Data-parallel copies are no matter of parts."""

    tied_stage_rank: int | None = None
    """Position on the `pp` axis of the other rank that holds a copy whose gradient must be added to this one's."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        if self.dim is None or self.size is None:
            return self.shape
        return (*self.shape[: self.dim], self.size, *self.shape[self.dim + 1 :])

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where the part begins in the whole, for each dimension."""
        return tuple(self.start if dim == self.dim else 0 for dim in range(len(self.shape)))

    def but(self, **changes: object) -> Part:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


Parts = dict[nn.Parameter, Part]
"""The part that each parameter of this rank's chunks is; a parameter in two chunks occurs once."""


@dataclass(frozen=True)
class Piece:
    """What this rank's optimizer updates of one part; fp32."""

    part: Part
    """The part."""

    start: int
    """First element, counted in the flattened part."""

    stop: int
    """After the last element."""

    tensor: nn.Parameter
    """The values, with the gradient in `.grad` when the optimizer runs: the parameter itself where its storage is
    fp32 and unsharded (then of the part's shape), else `[stop - start]`."""


def whole_parts(chunks: list[nn.Module]) -> Parts:
    """The parts of modules that no axis has split."""
    parts: Parts = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parts.setdefault(parameter, Part(name, tuple(parameter.shape)))
    return parts
