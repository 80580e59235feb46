"""Small images as training data."""

from __future__ import annotations

import gzip
import hashlib

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from dthpc.data.digits import check_split, digits_file
from dthpc.errors import raise_together

SIDE = 8
BRIGHTEST = 16


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Images in memory, with their classes."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        """Take float32 `[N, C, H, W]` and int64 `[N]`."""
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One image `[C, H, W]` and its class, an int64 scalar."""
        return self.images[index], self.labels[index]


class Digits:
    """1,797 handwritten digits of 8x8 pixels that scikit-learn ships (UCI "Optical recognition of handwritten digits").

    Pixels are scaled to [-1, 1].
    """

    classes = 10
    unit = "image"
    """What one target is, in a run's lines."""

    def __init__(self, held_out_every: int = 5) -> None:
        """Describe the data; nothing is read yet.

        Args:
            held_out_every: each n-th image is held out, at least 2.
        """
        self.held_out_every = held_out_every
        self.fingerprint: str | None = None
        """Stands for all images of both splits, once they are read."""
        self._whole: Images | None = None

    def prepare(self) -> None:
        """Read the images.

        Raises:
            UserError: scikit-learn is not installed, or `held_out_every` is out of range.
        """
        raise_together(check_split(self.held_out_every))
        packed = digits_file().read_bytes()
        rows = np.loadtxt(gzip.decompress(packed).decode("ascii").splitlines(), delimiter=",", dtype=np.int64, ndmin=2)
        pixels = torch.from_numpy(rows[:, :-1]).float().view(-1, 1, SIDE, SIDE)
        self._whole = Images(pixels / (BRIGHTEST / 2) - 1, torch.from_numpy(rows[:, -1].copy()))
        self.fingerprint = f"{hashlib.blake2b(packed, digest_size=16).hexdigest()}-{self.held_out_every}"

    @property
    def train(self) -> Images:
        """Training images."""
        return self._part(held_out=False)

    @property
    def valid(self) -> Images:
        """Held-out images."""
        return self._part(held_out=True)

    def _part(self, held_out: bool) -> Images:
        if self._whole is None:
            self.prepare()
        assert self._whole is not None
        chosen = (torch.arange(len(self._whole)) % self.held_out_every == self.held_out_every - 1) == held_out
        return Images(self._whole.images[chosen], self._whole.labels[chosen])
