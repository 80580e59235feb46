"""Dropout whose masks belong to the samples: whichever rank works on a sample, and however it is split, drops the same.

A mask is a function of (seed, step, global sample number, name of the layer, place in the sample). It is made by a
counter-based generator in integer arithmetic, so it is the same on every device, costs no state, and is made again
bit for bit where a layer is recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dthpc.models.init import named_seed

_LANES = 4
"""Decisions taken from one 64-bit word, 16 bits each."""

_LEVELS = 1 << 16

Place = tuple[int, int, int]
"""A dimension, the first index of a slice along it, and the length of the whole."""


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


class DropoutStream:
    """What the masks of a whole model depend on beside names; the runtime moves it on before each pass."""

    def __init__(self, seed: int) -> None:
        """Begin at step 0, with no samples: until they are set, masks are drawn from torch's generator.

        Args:
            seed: of the run.
        """
        self.seed = seed
        self.step = 0
        """Optimizer updates made."""
        self.samples: range | Tensor | None = None
        """Global numbers of the samples in the rows of the micro-batch at hand, int64 `[B]`; they must be set to the
        same again before a backward pass that recomputes activations."""

    def keys(self, name: str, device: torch.device) -> Tensor:
        """One key for each row, int64 `[B]`: a hash of seed, step, sample and `name`."""
        samples = self.samples
        if samples is None:
            raise ValueError("the stream has no samples")
        if isinstance(samples, range):
            samples = torch.arange(samples.start, samples.stop, samples.step, device=device)
        base = named_seed(self.seed, "dropout", self.step, name)
        return _mix((samples.to(device) + 1) * _GOLDEN + base)


class Streamed(nn.Module):
    """A module that drops by a stream; `attach` gives it one."""

    def __init__(self) -> None:
        super().__init__()
        self.stream: DropoutStream | None = None
        """Where masks come from; None: torch's generator, as in `torch.nn.Dropout`."""
        self.name = ""
        """The module's global name."""

    def drop(self, x: Tensor, p: float, place: Place | None = None) -> Tensor:
        """Set each element of `x` to zero with probability `p`, and scale the others by 1/(1-p).

        Args:
            x: `[B, …]`, or `[B·n, …]` where n neighbouring rows belong to one sample.
            p: probability.
            place: where `x` is a slice of what the layer works on, which slice.
        """
        if p == 0 or not x.numel():
            return x
        if self.stream is None or self.stream.samples is None:
            return F.dropout(x, p)
        dropped = _dropped_levels(p)
        keep = keep_mask(self.stream.keys(self.name, x.device), x.shape, p, place)
        return (x * keep) * (_LEVELS / (_LEVELS - dropped))


class Dropout(Streamed):
    """Dropout of elements (Srivastava et al. 2014) with masks that do not depend on the layout.

    The first dimension of its input are the rows of the micro-batch. Without a stream it behaves as
    `torch.nn.Dropout`. A module that is called twice in one pass drops the same elements twice: use one for each place.
    """

    def __init__(self, p: float) -> None:
        """Take the probability, in [0, 1)."""
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"a dropout probability lies in [0, 1), not {p}")
        self.p = p
        self.shard: tuple[int, int, int] | None = None
        """(dimension, index, count): the input is the index-th of `count` equal slices along a dimension; None: it is
        whole. Set by sequence parallelism."""

    def forward(self, x: Tensor) -> Tensor:
        """Map `[B, …]` to itself."""
        if not self.training:
            return x
        return self.drop(x, self.p, None if self.shard is None else slice_place(x, self.shard))

    def extra_repr(self) -> str:
        """The probability."""
        return f"p={self.p}"


def slice_place(x: Tensor, shard: tuple[int, int, int]) -> Place:
    """Where the index-th of `count` equal slices along a dimension lies in the whole."""
    dim, index, count = shard
    size = x.shape[dim]
    return dim, index * size, count * size


def attach(model: nn.Module, stream: DropoutStream) -> None:
    """Give all layers of `model` that drop their stream and their names.

    Args:
        model: with its global names; a stage of a pipeline has them too.
        stream: shared by all chunks of a rank.
    """
    for name, module in model.named_modules():
        if isinstance(module, Streamed):
            module.stream, module.name = stream, name


def keep_mask(keys: Tensor, shape: Sequence[int], p: float, place: Place | None = None) -> Tensor:
    """Which elements are kept.

    Element i of a row is decided by 16 bits of output i // 4 of SplitMix64 (Steele, Lea and Flood 2014, "Fast
    splittable pseudorandom number generators"), started at the row's key; along the last dimension counting begins
    anew at a whole word. So p is rounded to a multiple of 2^-16.

    Args:
        keys: int64 `[B]`.
        shape: `(B·n, …)`; n rows for each key.
        p: probability that an element is dropped.
        place: where `shape` is that of a slice along a dimension other than the first, which slice.

    Returns:
        bool, of `shape`.

    Raises:
        ValueError: the rows are no multiple of the keys, or a slice is asked for along the rows.
    """
    rows = len(keys)
    if not rows or shape[0] % rows:
        raise ValueError(f"{shape[0]} rows cannot be dealt to {rows} samples: the first dimension must be the batch")
    inner = [shape[0] // rows, *shape[1:], *([1] if len(shape) == 1 else [])]
    counters, first, size = _counters(inner, place, keys.device)
    words = _mix(keys.view(-1, *[1] * len(inner)) + counters)
    lanes = words.view(torch.int16)[..., first : first + size]
    return (lanes >= _dropped_levels(p) - _LEVELS // 2).view(*shape)


def _counters(inner: Sequence[int], place: Place | None, device: torch.device) -> tuple[Tensor, int, int]:
    """Counters of the words that cover a row, times the generator's increment; the first lane used, and how many."""
    starts, totals = [0] * len(inner), list(inner)
    if place is not None:
        dim, start, total = place
        if dim % len(inner) == 0:
            raise ValueError("rows are known by their samples, not by their place")
        starts[dim], totals[dim] = start, total
    first, size = starts[-1], inner[-1]
    ranges = [range(start, start + length) for start, length in zip(starts, inner, strict=True)]
    ranges[-1] = range(first // _LANES, -(-(first + size) // _LANES))
    totals[-1] = -(-totals[-1] // _LANES)
    counters, stride = torch.ones((), dtype=torch.int64, device=device), 1
    for numbers, total in zip(reversed(ranges), reversed(totals), strict=True):
        along = torch.arange(numbers.start, numbers.stop, device=device) * stride
        counters = along.view(-1, *[1] * counters.dim()) + counters if counters.dim() else along + counters
        stride *= total
    return counters.mul_(_GOLDEN), first % _LANES, size


def _mix(words: Tensor) -> Tensor:
    """The finalizer of SplitMix64, in place; int64 arithmetic wraps as that of unsigned words does."""
    shifted = torch.empty_like(words)
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, None)):
        # An arithmetic shift repeats the sign, which a logical one would not.
        torch.bitwise_right_shift(words, shift, out=shifted)
        words ^= shifted.bitwise_and_((1 << (64 - shift)) - 1)
        if factor is not None:
            words *= factor
    return words


def _dropped_levels(p: float) -> int:
    return min(round(p * _LEVELS), _LEVELS - 1)
