"""Text sources, tokenizers, packed shards, the sampler and the loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dthpc.data.text import TextData

__all__ = ["TextData"]


def __getattr__(name: str) -> Any:
    # Lazily, since the login path checks sources here and must not import torch.
    if name == "TextData":
        from dthpc.data.text import TextData

        return TextData
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
