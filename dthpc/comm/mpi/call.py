"""What a user called, in words: for messages, and to see whether all ranks called the same."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

_SHOWN = 4

_FOLLOWED = attrgetter("requires_grad")


class Call:
    """One call of an operation; its words are made only when somebody reads them."""

    __slots__ = ("_detail", "_tensors", "_uneven", "name")

    def __init__(self, name: str, tensors: Sequence[Tensor] = (), detail: str = "", *, uneven: bool = False) -> None:
        """Describe a call.

        Args:
            name: of the operation, as `torch.distributed` has it.
            tensors: what is sent or received.
            detail: reduction, root or peer, tag.
            uneven: whether ranks may differ in the tensors' sizes.
        """
        self.name = name
        self._tensors, self._detail, self._uneven = tensors, detail, uneven

    @property
    def requires_gradients(self) -> bool:
        """Whether autograd follows one of the tensors."""
        return any(map(_FOLLOWED, self._tensors))

    @property
    def device(self) -> torch.device | None:
        """Where the tensors are; None if there are none."""
        return self._tensors[0].device if self._tensors else None

    @property
    def common(self) -> str:
        """What must be the same on all ranks."""
        return self._text(sizes=not self._uneven)

    def __str__(self) -> str:
        return self._text(sizes=True)

    def _text(self, sizes: bool) -> str:
        shown = [_text_of(tensor, sizes) for tensor in self._tensors[:_SHOWN]]
        if not sizes:
            shown = sorted(set(shown))
        elif len(self._tensors) > _SHOWN:
            elements = sum(tensor.numel() for tensor in self._tensors)
            shown.append(f"… of {len(self._tensors)} tensors with {elements} elements")
        inner = ", ".join([*shown, self._detail] if self._detail else shown)
        return f"{self.name}({inner})"


def _text_of(tensor: Tensor, sizes: bool) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)}" if sizes else dtype
