"""Optimizer state and parameter shards in host memory, or in files on a local disk, between their uses.

The idea is that of ZeRO-Offload and ZeRO-Infinity (Ren et al. 2021; Rajbhandari et al. 2021): what is used once a step
need not lie where a step computes. fp32 masters and optimizer state are placed beside the CPU, which makes the update;
its gradients come from the device and the new values go back. Parameter shards of ZeRO stage 3 are placed there too,
and visit the device when they are gathered.

Files are memory-mapped: a tensor's memory *is* the file, the kernel reads and writes it as pages are touched, and drops
them when memory is short. They have no name: a file is removed from its folder as soon as it is made, so that nothing
is left behind, however a rank ends. Numbers are the same as without offload, since only places differ.
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dthpc.errors import UserError

_KEY = "parallel.offload.folder"
_TRIM_EVERY = 32 << 20


class Offload:
    """Places tensors as the configuration says, and makes the updates of what was placed."""

    def __init__(
        self,
        device: torch.device,
        optimizer: str | None = None,
        parameters: str | None = None,
        folder: str | Path | None = None,
    ) -> None:
        """Say what goes where.

        Args:
            device: where steps compute; host memory that a GPU exchanges with is pinned.
            optimizer: place of fp32 masters and optimizer state: None (where they are), `cpu` or `nvme`.
            parameters: place of the parameter shards of ZeRO stage 3: likewise.
            folder: where the files of `nvme` are made, best on a disk of the node.
        """
        self._device = device
        self._where = {"optimizer": optimizer, "parameters": parameters}
        self._folder = None if folder is None else Path(folder)
        self._placed: set[int] = set()
        self._freed = 0
        self._updated = False

    @property
    def active(self) -> bool:
        """Whether anything is placed elsewhere."""
        return any(where is not None for where in self._where.values())

    def moves(self, what: str) -> bool:
        """Whether `optimizer` or `parameters` are placed elsewhere."""
        return self._where[what] is not None

    def place(self, tensor: Tensor, what: str) -> Tensor:
        """A copy of a tensor where `what` (`optimizer` or `parameters`) belongs; the tensor itself if it stays.

        Raises:
            UserError: the folder of the files is missing, full, or not to be written to.
        """
        where = self._where[what]
        if where is None:
            return tensor
        if where == "nvme" and tensor.numel():
            assert self._folder is not None, "checked with the configuration"
            self._trim(tensor.nbytes)
            copy = file_tensor(self._folder, tensor.numel(), tensor.dtype).view(tensor.shape)
        else:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._device.type == "cuda")
        copy.copy_(tensor.detach())
        self._placed.add(copy.untyped_storage().data_ptr())
        return copy

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer's update, and place what state it has that is not placed yet.

        Optimizers make their state in the first update, beside the masters. For host memory that is its place. For
        files, state moves there tensor by tensor, so that it never lies in memory as a whole.
        """
        if self._where["optimizer"] != "nvme":
            optimizer.step()
            return
        self._place_state(optimizer)  # that a checkpoint gave it
        if not self._updated and type(optimizer).__module__.startswith("torch.optim."):
            for _ in _one_by_one(optimizer):
                optimizer.step()
                self._place_state(optimizer)
        else:
            # An optimizer from elsewhere may count its updates for all parameters together.
            optimizer.step()
            self._place_state(optimizer)
        self._updated = True

    def _place_state(self, optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            for entry, value in state.items():
                if isinstance(value, Tensor) and value.numel() > 1 and not self._holds(value):
                    state[entry] = self.place(value, "optimizer")

    def _trim(self, leaving: int) -> None:
        """Give memory back to the system now and then, of which `leaving` bytes more are about to move to a file.

        glibc keeps freed tensors for later ones, which do not always fit: without this, a state that moved to files
        piece by piece has been seen to stay in memory as a whole.
        """
        self._freed += leaving
        if self._freed >= _TRIM_EVERY:
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:
                trim(0)
            self._freed = 0

    def _holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._placed


def make_offload(config: Any, device: torch.device) -> Offload:
    """The offload of the `parallel.offload` group of a configuration, on the device of the steps."""
    return Offload(device, config.get("optimizer"), config.get("parameters"), config.get("folder"))


def file_tensor(folder: Path, elements: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor of zeros whose memory is a file without a name in a folder; the file lives as long as the tensor.

    Raises:
        UserError: the folder is missing, full, or not to be written to.
    """
    size = elements * torch.empty(0, dtype=dtype).element_size()
    with _told(folder, size), tempfile.TemporaryFile(dir=folder) as file:
        free = os.statvfs(file.fileno())
        if free.f_bavail * free.f_frsize < size:
            raise OSError(errno.ENOSPC, "full")
        # Without its blocks a full disk would show at the first write to memory, as a signal that kills the process.
        os.posix_fallocate(file.fileno(), 0, size)
        return torch.from_file(f"/proc/self/fd/{file.fileno()}", shared=True, size=elements, dtype=dtype)


@contextmanager
def _told(folder: Path, size: int) -> Iterator[None]:
    """Tell what an operating system's refusal means for the user."""
    try:
        yield
    except OSError as error:
        shown = f"{size / 2**20:.1f} MiB of offloaded tensors"
        other = "a folder on a local disk of the node that this user may write to, or parallel.offload.*=cpu"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            why, other = f"has no room for another {shown}", "a folder with more room, or parallel.offload.*=cpu"
        elif error.errno in (errno.ENOENT, errno.ENOTDIR):
            why = f"is no folder on node {os.uname().nodename}, so {shown} cannot be written there"
        else:
            why = f"cannot be written to ({error.strerror or error}), so {shown} have no place"
        raise UserError(why, key=_KEY, value=str(folder), instead=other) from error


def _one_by_one(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let an optimizer see only one of its parameters in each turn."""
    whole = [list(group["params"]) for group in optimizer.param_groups]
    try:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            for parameter in parameters:
                for each in optimizer.param_groups:
                    each["params"] = [parameter] if each is group else []
                yield
    finally:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = parameters
