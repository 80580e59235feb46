"""A rank's random number generators as one tensor of bytes: Python, NumPy, torch on the CPU and on its own GPU."""

from __future__ import annotations

import base64
import hashlib
import json
import random
from typing import Any

import numpy as np
import torch


def capture() -> torch.Tensor:
    """The state of this process's generators, as uint8 text of JSON, of varying length; draws nothing."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "torch": _text(torch.get_rng_state()),
    }
    # Only this rank's device: asking all of them would make a context, and so take memory, on each.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = _text(torch.cuda.get_rng_state())
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def empty(shape: tuple[int, ...]) -> torch.Tensor:
    """Room for a captured state that was saved with a shape."""
    return torch.empty(shape, dtype=torch.uint8)


def apply(captured: torch.Tensor) -> None:
    """Set this process's generators to a captured state; one for a GPU is passed over where there is none."""
    state = json.loads(captured.numpy().tobytes())
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_bytes(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(state["cuda"]))


def reseed(captured: torch.Tensor, rank: int) -> None:
    """Give a rank of another layout a stream of its own, which depends only on a captured state and on the rank."""
    digest = hashlib.sha256(captured.numpy().tobytes() + rank.to_bytes(8, "little")).digest()
    random.seed(digest)
    np.random.seed(np.frombuffer(digest, dtype=np.uint32))
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
