"""Small data sets for the proof: random, but with a rule to learn, so that losses fall."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dthpc.data.sampler import sample_indices

SEED, SEQ_LEN, SAMPLES, HELD_OUT, FIRST_BATCH = 11, 8, 40, 5, 16


class Tokens:
    """Token sequences; in each sample another number of targets counts."""

    def __init__(self, vocab_size: int = 32, lonely: bool = False) -> None:
        """Draw them.

        Args:
            vocab_size: number of tokens.
            lonely: whether a single target counts in the first step, so that its gradient is large, and most ranks
                and micro-batches have no target at all.
        """
        self.vocab_size = vocab_size
        first = sample_indices(SEED, SAMPLES, list(range(FIRST_BATCH))).tolist() if lonely else []
        self.train = _Sequences(vocab_size, SAMPLES, 1, first)
        self.valid = _Sequences(vocab_size, HELD_OUT, 2, [])


class _Sequences:
    def __init__(self, vocab_size: int, count: int, seed: int, masked: Sequence[int]) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(vocab_size, (count, SEQ_LEN + 1), generator=draw)
        self.tokens[:, 1::2] = (self.tokens[:, 0:-1:2] * 3 + 1) % vocab_size
        self.targets = self.tokens[:, 1:].clone()
        for number in range(count):
            self.targets[number, SEQ_LEN - number % 4 :] = -100
        for place, number in enumerate(masked):
            self.targets[number, 1 if place == 0 else 0 :] = -100

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index, :-1], self.targets[index]


class Images:
    """Images of 8 by 8 pixels, `[1, 8, 8]`, of ten classes: each has a pattern of its own under noise."""

    def __init__(self) -> None:
        self.train = _Patterns(SAMPLES, 1)
        self.valid = _Patterns(HELD_OUT, 2)


class _Patterns:
    def __init__(self, count: int, seed: int) -> None:
        patterns = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        draw = torch.Generator().manual_seed(seed)
        self.classes = torch.randint(10, (count,), generator=draw)
        self.images = patterns[self.classes] + torch.randn(count, 1, 8, 8, generator=draw)

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.classes[index]
