"""The bigram baseline: what a model must beat to have learnt more than which byte follows which."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SYMBOLS = 257
END = 256


class BigramCounts:
    """Counts of pairs of neighbouring symbols (bytes, and the end of a document) in a stream."""

    def __init__(self) -> None:
        self.pairs = np.zeros((SYMBOLS, SYMBOLS), dtype=np.int64)
        """Count of (symbol, next symbol), `[257, 257]`."""
        self._last = END

    def add(self, symbols: npt.NDArray[np.unsignedinteger]) -> None:
        """Count the pairs of the stream's next symbols, the one with the last symbol before them included.

        The stream begins after an end of document, as the packed tokens do.
        """
        if not symbols.size:
            return
        after = symbols.astype(np.int64)
        codes = np.empty_like(after)
        codes[0] = self._last
        codes[1:] = after[:-1]
        codes *= SYMBOLS
        codes += after
        self.pairs += np.bincount(codes, minlength=SYMBOLS * SYMBOLS).reshape(SYMBOLS, SYMBOLS)
        self._last = int(after[-1])


def bits_per_byte(train: BigramCounts, held_out: BigramCounts) -> float:
    """Cost of the held-out text under the training text's bigram model, in bits for each of its bytes.

    The model is interpolated with the (add-one smoothed) unigram model by the weights of Witten and Bell (1991, "The
    zero-frequency problem", method C): p(b|a) = (c(a,b) + d(a) p(b)) / (c(a) + d(a)), with d(a) the number of different
    symbols seen after a. Ends of documents are predicted too and their cost is counted, as in a language model's loss.
    """
    counts = train.pairs.astype(np.float64)
    singles = counts.sum(axis=0) + 1.0
    unigram = singles / singles.sum()
    seen = counts.sum(axis=1, keepdims=True)
    different = np.count_nonzero(counts, axis=1)[:, None].astype(np.float64)
    # After a symbol that was never seen nothing is known but the unigram model.
    different[seen == 0] = 1.0
    model = (counts + different * unigram) / (seen + different)
    total_bits = -float((held_out.pairs * np.log2(model)).sum())
    return total_bits / int(held_out.pairs[:, :END].sum())
