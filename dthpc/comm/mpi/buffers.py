"""Tensors as MPI takes them: contiguous, in memory that it can read, described by address, count and datatype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_INT_MAX = 2**31 - 64
"""Elements in one message where the library counts by int: a little less than there are, for whole cache lines."""


class Buffers:
    """Makes buffers out of tensors, for one MPI library."""

    def __init__(self, mpi: Any, *, wide: bool, cuda_aware: bool) -> None:
        """Describe the library.

        Args:
            mpi: the module `mpi4py.MPI`.
            wide: whether it counts in 64 bits.
            cuda_aware: whether it takes pointers to GPU memory.
        """
        self._at = mpi.buffer.fromaddress
        self.most = None if wide else _INT_MAX
        self._cuda_aware = cuda_aware
        self._moved = {1: mpi.UINT8_T, 2: mpi.UINT16_T, 4: mpi.UINT32_T, 8: mpi.UINT64_T, 16: mpi.C_DOUBLE_COMPLEX}

    def moved(self, tensor: Tensor) -> Any:
        """The MPI datatype that moves an element of a tensor, whatever it means."""
        return self._moved[tensor.element_size()]

    def spec(self, tensor: Tensor, datatype: Any) -> list[Any]:
        """A contiguous tensor for mpi4py's calls."""
        count = tensor.numel()
        return [self._at(tensor.data_ptr(), count * tensor.element_size()), count, datatype]

    def spec_v(self, tensor: Tensor, counts: Sequence[int], datatype: Any) -> list[Any]:
        """A contiguous flat tensor whose consecutive parts belong to the ranks, for the calls with counts."""
        return [self._at(tensor.data_ptr(), tensor.numel() * tensor.element_size()), counts, datatype]

    def pieces(self, flat: Tensor) -> Sequence[Tensor]:
        """A contiguous tensor in parts whose count the library takes: itself, if it can."""
        if self.most is None or flat.numel() <= self.most:
            return [flat]
        return flat.view(-1).tensor_split(list(range(self.most, flat.numel(), self.most)))

    def direct(self, tensor: Tensor) -> bool:
        """Whether MPI may read and write a tensor where it is."""
        return tensor.is_contiguous() and (not tensor.is_cuda or self._cuda_aware)

    def readable(self, tensor: Tensor) -> Tensor:
        """A tensor's contents for MPI to read: the tensor itself, or a copy.

        What the GPU still computes of it is waited for, as MPI does not know the GPU's streams.
        """
        if tensor.is_cuda:
            _finish(tensor)
        if self.direct(tensor):
            return tensor
        room = self.room(tensor)
        room.copy_(tensor)
        return room

    def writable(self, tensor: Tensor) -> Tensor:
        """Where MPI may write a tensor's new contents, which `deliver` then brings into it."""
        if tensor.is_cuda:
            _finish(tensor)
        return tensor if self.direct(tensor) else self.room(tensor)

    def room(self, like: Tensor, *shape: int) -> Tensor:
        """Uninitialised contiguous memory for a tensor's like, where MPI can reach it."""
        shape = shape or tuple(like.shape)
        if like.is_cuda and not self._cuda_aware:
            return torch.empty(shape, dtype=like.dtype, pin_memory=True)
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    @staticmethod
    def deliver(buffer: Tensor, tensor: Tensor) -> None:
        """Bring what MPI has written to its place."""
        if buffer is not tensor:
            tensor.copy_(buffer)
        if tensor.is_cuda:
            _finish(tensor)


def _finish(tensor: Tensor) -> None:
    torch.cuda.current_stream(tensor.device).synchronize()


def adjacent(tensors: Sequence[Tensor]) -> Tensor | None:
    """One flat tensor over contiguous tensors that lie one after the other in one storage, or None."""
    first = tensors[0]
    end = first.data_ptr()
    for tensor in tensors:
        if tensor.dtype != first.dtype or not tensor.is_contiguous() or tensor.data_ptr() != end:
            return None
        end += tensor.nbytes
    total = sum(tensor.numel() for tensor in tensors)
    if first.storage_offset() + total > first.untyped_storage().nbytes() // first.element_size():
        return None
    return first.as_strided((total,), (1,), first.storage_offset())
