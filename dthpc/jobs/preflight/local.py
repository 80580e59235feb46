"""What a rank measures by itself: arithmetic, memory, file systems."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

WINDOWS = 3
"""Parts of a measurement, of which the fastest counts. Each is long against the 100 ms in which the kernel hands out a
processor quota: shorter ones would run at full speed between two throttles and see nothing."""

_CPU_SIDE = 512
_GPU_SIDE = 8192
_CHUNK = 4 << 20
_GPU_BATCH = 8


def compute(device: torch.device, seconds: float, work: int = 1) -> float:
    """Floating-point operations a second of matrix products: fp32 on a CPU with this rank's threads, bf16 on a GPU.

    Args:
        device: where.
        seconds: how long.
        work: products for each one that is counted (fault injection).
    """
    on_gpu = device.type == "cuda"
    side, kind = (_GPU_SIDE, torch.bfloat16) if on_gpu else (_CPU_SIDE, torch.float32)
    a, b = (torch.randn(side, side, device=device, dtype=kind) for _ in range(2))
    out = torch.empty_like(a)

    def products() -> None:
        for _ in range(work * (_GPU_BATCH if on_gpu else 1)):
            torch.mm(a, b, out=out)

    counted = _GPU_BATCH if on_gpu else 1
    return 2.0 * side**3 * counted * _rate(products, seconds, device)


def triad(device: torch.device, seconds: float, mebibytes: int) -> float:
    """Bytes a second of a = b + s·c (McCalpin's STREAM, 1995), counting two arrays read and one written.

    Args:
        device: where.
        seconds: how long.
        mebibytes: size of each array.
    """
    elements = mebibytes * (1 << 20) // 8
    a, b, c = (torch.full((elements,), value, dtype=torch.float64, device=device) for value in (0.0, 1.0, 2.0))
    return 3.0 * 8 * elements * _rate(lambda: torch.add(b, c, alpha=3.0, out=a), seconds, device)


def _rate(act: Callable[[], Any], seconds: float, device: torch.device) -> float:
    """Acts a second in the fastest of the windows."""
    act()
    _wait(device)
    best = 0.0
    for _ in range(WINDOWS):
        count, start = 0, time.perf_counter()
        while (spent := time.perf_counter() - start) < seconds / WINDOWS or not count:
            act()
            _wait(device)
            count += 1
        spent = time.perf_counter() - start
        best = max(best, count / spent)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def file_system(folder: Path, mebibytes: int, files: int) -> dict[str, float]:
    """How a folder's file system does: `write_mb_s` (fsync included), `read_mb_s`, `metadata_ms`, `free_gb`.

    Reading asks the kernel to forget the file first; a file system that keeps it all the same shows its cache.

    Args:
        folder: where; what is written is removed.
        mebibytes: size of the file; 0: none.
        files: small files that are made, looked at and removed, one after another; 0: none.

    Raises:
        OSError: the folder can't be written to, or is full.
    """
    found = {"free_gb": shutil.disk_usage(folder).free / 2**30}
    with _folder_of_its_own(folder) as own:
        if mebibytes:
            found |= _large_file(own / "large", mebibytes)
        if files:
            found["metadata_ms"] = 1e3 * statistics.median(_small_file(own / f"small-{n}") for n in range(files))
    return found


def _large_file(path: Path, mebibytes: int) -> dict[str, float]:
    data = os.urandom(_CHUNK)
    chunks = max(1, mebibytes * (1 << 20) // _CHUNK)
    start = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for _ in range(chunks):
            file.write(data)
        os.fsync(file.fileno())
    written = time.perf_counter() - start
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        buffer = bytearray(_CHUNK)
        start = time.perf_counter()
        while file.readinto(buffer):
            pass
        read = time.perf_counter() - start
    size = chunks * _CHUNK / 1e6
    return {"write_mb_s": size / written, "read_mb_s": size / max(read, 1e-9)}


def _small_file(path: Path) -> float:
    start = time.perf_counter()
    path.touch()
    path.stat()
    path.unlink()
    return time.perf_counter() - start


@contextlib.contextmanager
def _folder_of_its_own(folder: Path) -> Iterator[Path]:
    made = tempfile.mkdtemp(prefix=".preflight-", dir=folder)
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)
