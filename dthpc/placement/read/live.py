"""This machine, as this process may use it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dthpc.errors import UserError
from dthpc.placement.read import amd_smi, nvidia_list, nvidia_topo
from dthpc.placement.read.combine import combine
from dthpc.placement.read.nvml import read_nvml
from dthpc.placement.read.sysfs import read_sysfs
from dthpc.placement.read.tree import DirectoryTree
from dthpc.placement.topology import Topology

_QUERY = ["nvidia-smi", "--query-gpu=index,pci.bus_id,uuid,name,memory.total", "--format=csv"]
_DEVICES = {"dev/nvidiactl": "nvidia", "dev/kfd": "amd"}
_AMD = ["rocm-smi", "--showtopo", "--showbus", "--showuniqueid"]


def read_live(tools: bool = True, root: str | Path = "/", timeout_s: float = 20.0) -> Topology:
    """The topology of this machine: the kernel's view, what the GPUs' tools add, and what this process may use.

    A tool that is missing, fails, or prints what cannot be read adds a note and nothing else.

    Args:
        tools: whether to ask NVML, nvidia-smi and rocm-smi; without them only the kernel is asked.
        root: where `sys` and `proc` are mounted.
        timeout_s: how long one tool may take, in seconds.

    Raises:
        UserError: the kernel shows no CPUs.
    """
    kernel = read_sysfs(DirectoryTree(root))
    parts: list[Topology] = [kernel]
    notes: list[str] = []
    # Without a GPU the tools cannot add anything, and some take seconds to say so.
    vendors = {gpu.vendor for gpu in kernel.gpus or ()}
    vendors |= {vendor for device, vendor in _DEVICES.items() if Path(root, device).exists()}
    if tools and "nvidia" in vendors:
        library = read_nvml()
        parts += [library] if library else _run(_QUERY, nvidia_list.read_nvidia_csv, notes, timeout_s)
        if library is None:
            parts += _run(["nvidia-smi", "topo", "-m"], nvidia_topo.read_nvidia_topo, notes, timeout_s)
            parts += _run(["nvidia-smi", "-L"], nvidia_list.read_nvidia_list, notes, timeout_s)
    if tools and "amd" in vendors:
        parts += _run(_AMD, amd_smi.read_rocm_smi, notes, timeout_s)
    merged = combine(parts)
    affinity = frozenset(os.sched_getaffinity(0))
    return replace(
        merged,
        host=socket.gethostname(),
        # A container's /sys may hide CPUs that the process runs on all the same.
        existing=(merged.existing or frozenset()) | affinity,
        allowed=affinity,
        notes=(*merged.notes, *notes),
    )


def _run(
    command: list[str], reader: Callable[[str, str], Topology], notes: list[str], timeout_s: float
) -> list[Topology]:
    if shutil.which(command[0]) is None:
        notes.append(f"{command[0]} is not installed, so that what it knows is missing")
        return []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True)
        return [reader(done.stdout, " ".join(command))]
    except (OSError, subprocess.SubprocessError) as error:
        notes.append(f"{' '.join(command)} failed ({error})")
    except UserError as error:
        notes.append(str(error))
    return []
