"""What is wrong with the settings of the machine at hand: limits, modules, clocks, shared memory, disk. Each as a
function of a root folder, so that a recorded tree can be asked as well."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from dthpc.placement.plan.units import compute_gpus
from dthpc.placement.problem import Problem, gravest_first
from dthpc.placement.topology import Topology

SHM_BYTES = 1 << 30
DISK_BYTES = 10 << 30
SKEW_S = 2.0
FILES = 4096
_SMI_S = 10.0

_THROTTLE = {0x8: "hardware slowdown", 0x40: "too hot", 0x80: "power brake", 0x20: "software: too hot"}
"""Bits of `clocks_throttle_reasons.active` that tell of trouble (nvml.h); idle and power caps are none."""

_SMI_FIELDS = (
    "index",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_throttle_reasons.active",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "temperature.gpu",
)


def diagnose_node(topology: Topology, folder: Path | None = None, root: Path = Path("/")) -> list[Problem]:
    """Problems of this machine's settings, the gravest first.

    Args:
        topology: of this machine.
        folder: where runs are written; its clock and its room are looked at.
        root: root of the file system with `proc` and `sys`.
    """
    found = [
        *numa_balancing(topology, root),
        *memlock(topology),
        *open_files(),
        *gpudirect(topology, root),
        *governor(root),
        *shared_memory(root / "dev/shm"),
        *gpu_health(),
    ]
    if folder is not None:
        found += [*disk_space(folder), *clock_skew(folder)]
    return gravest_first(found)


def numa_balancing(topology: Topology, root: Path) -> Iterator[Problem]:
    """Pages that the kernel moves after threads that are bound already."""
    nodes = [node for node in topology.numa or () if node.cpus]
    if len(nodes) > 1 and _read(root / "proc/sys/kernel/numa_balancing") not in ("", "0"):
        yield Problem(
            "warning",
            "kernel.numa_balancing is on",
            "the kernel unmaps pages of bound ranks to see who uses them, which costs steps of uneven length",
            "as root: sysctl kernel.numa_balancing=0",
        )


def memlock(topology: Topology) -> Iterator[Problem]:
    """Memory that may be pinned, which RDMA needs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if any(nic.rdma for nic in topology.nics or ()) and soft != resource.RLIM_INFINITY:
        yield Problem(
            "error" if soft < 1 << 30 else "warning",
            f"the limit of locked memory is {soft // 1024} KiB",
            "RDMA pins its buffers and fails or falls back to TCP",
            "ulimit -l unlimited (limits.conf: * - memlock unlimited; Slurm: PropagateResourceLimitsExcept=MEMLOCK)",
        )


def open_files() -> Iterator[Problem]:
    """Files and sockets that a rank may hold."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FILES:
        fix = f"ulimit -n {FILES} (limits.conf: * - nofile 65536)"
        yield Problem("warning", f"at most {hard} open files", "many ranks' sockets and data shards need more", fix)


def gpudirect(topology: Topology, root: Path) -> Iterator[Problem]:
    """The module by which NICs read GPU memory."""
    nvidia = any(gpu.vendor == "nvidia" for gpu in compute_gpus(topology))
    rdma = any(nic.rdma and nic.kind in ("infiniband", "roce") for nic in topology.nics or ())
    loaded = any((root / "sys/module" / name).exists() for name in ("nvidia_peermem", "nv_peer_mem"))
    if nvidia and rdma and (root / "sys/module/nvidia").exists() and not loaded:
        yield Problem(
            "warning",
            "the module nvidia_peermem is not loaded",
            "unless the driver offers dma-buf, what GPUs send between nodes is copied through host memory",
            "as root: modprobe nvidia-peermem",
        )


def governor(root: Path) -> Iterator[Problem]:
    """The policy of the processors' clocks."""
    policy = _read(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if policy == "powersave" and not _read(root / "sys/devices/system/cpu/intel_pstate/status"):
        fix = "as root: cpupower frequency-set -g performance"
        yield Problem("warning", "processors run by the governor powersave", "at their lowest clock", fix)


def shared_memory(shm: Path) -> Iterator[Problem]:
    """Room for what processes of a node share."""
    try:
        size = shutil.disk_usage(shm)
    except OSError:
        yield Problem("error", f"{shm} is not there", "data loaders and NCCL share memory by it", f"mount it: {shm}")
        return
    if min(size.total, size.free) < SHM_BYTES:
        yield Problem(
            "warning",
            f"{shm} has {size.free / 2**20:.0f} MiB free of {size.total / 2**20:.0f}",
            "data loaders and NCCL share memory by it and end with SIGBUS when it is full",
            "containers: --shm-size=16g or --ipc=host; else: mount -o remount,size=50% /dev/shm",
        )


def disk_space(folder: Path) -> Iterator[Problem]:
    """Room where the runs are written."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    size = shutil.disk_usage(there)
    inodes = os.statvfs(there)
    if size.free < DISK_BYTES:
        fix = "remove old runs, or run.root on another file system"
        yield Problem("warning", f"{there} has {size.free / 2**30:.1f} GiB free", "checkpoints may not fit", fix)
    if inodes.f_files and inodes.f_favail < 1000:
        fix = "remove files, or ask for a larger quota of files"
        yield Problem("warning", f"{there} takes {inodes.f_favail} more files", "runs write several a rank", fix)


def clock_skew(folder: Path) -> Iterator[Problem]:
    """This machine's clock against that of the file system."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        before = time.time()
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"x")
            file.flush()
            stamp = os.fstat(file.fileno()).st_mtime
        after = time.time()
    except OSError as error:
        yield Problem("error", f"{there} can't be written to ({error.strerror})", "runs can't start", "run.root=…")
        return
    skew = max(before - stamp, stamp - after, 0.0)
    if skew > SKEW_S:
        yield Problem(
            "warning",
            f"the clock differs from that of {there} by {skew:.0f} s",
            "times of records do not fit together, and locks look older than they are",
            "as root: systemctl restart chronyd (or ntpd)",
        )


def gpu_health() -> Iterator[Problem]:
    """Errors, throttling and narrow links as nvidia-smi tells them; nothing where it is not there."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return
    command = [tool, f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        fix = "reset the GPUs or drain the node; see `dmesg` for Xid errors"
        yield Problem("error", f"nvidia-smi does not answer within {_SMI_S:.0f} s", "a GPU hangs", fix)
        return
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines()
        fix = "check that the driver is loaded and of the library's version"
        yield Problem("error", f"nvidia-smi fails ({said[0] if said else 'no words'})", "no GPU can be used", fix)
        return
    yield from gpu_problems(done.stdout)


def gpu_problems(table: str) -> Iterator[Problem]:
    """Problems in the lines of nvidia-smi's query of `_SMI_FIELDS`."""
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_SMI_FIELDS):
            continue
        gpu, errors, throttled, width, widest, heat = cells
        if errors.isdigit() and int(errors):
            fix = "reset the GPU, and have it replaced if they come back"
            yield Problem("error", f"GPU{gpu} counts {errors} memory errors", "results may be wrong", fix)
        bits = int(throttled, 16) if throttled.startswith("0x") else 0
        reasons = [word for bit, word in _THROTTLE.items() if bits & bit]
        if reasons:
            fix = "check cooling and power supplies"
            yield Problem("warning", f"GPU{gpu} is slowed ({', '.join(reasons)}, {heat} °C)", "all ranks wait", fix)
        if width.isdigit() and widest.isdigit() and int(width) < int(widest):
            fix = "reseat it; look for PCIe errors in `dmesg`"
            yield Problem("warning", f"GPU{gpu} has {width} of {widest} PCIe lanes", "copies and sends are slow", fix)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
