from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpi_installations import python_of
from tests.ranks import repository

MPIEXEC = str(Path(sys.executable).parent / "mpiexec")
LOAD = r"""
import os, sys
from dthpc.errors import UserError
from dthpc.comm.mpi.runtime import load
try:
    load(*eval(sys.argv[1], {"own": int(os.environ.get("PMI_RANK", "0"))}))
except UserError as error:
    said = str(error)
else:
    said = "loaded"
os.write(1, f"{said}\n".encode())  # at once, or the launcher mixes two ranks' lines
"""


def loaded(arguments: str, ranks: int = 0, before: str = "", **environment: str) -> list[str]:
    """What each of some ranks says; 0: no launcher."""
    launcher = [MPIEXEC, "-n", str(ranks)] if ranks else []
    done = subprocess.run(
        [*launcher, sys.executable, "-c", f"{before}\n{LOAD}", arguments],
        cwd=repository(),
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    return done.stdout.splitlines() or [done.stderr]


def test_ranks_without_a_launcher_are_refused() -> None:
    (said,) = loaded("(0, 2)")
    assert said.startswith("comm.backend=mpi: every rank is rank 0 of 1 to MPI, and there are 2 ranks")
    assert "mpiexec" in said


def test_one_rank_needs_no_launcher() -> None:
    assert loaded("(0, 1)") == ["loaded"]


def test_a_launcher_gives_every_rank_its_place() -> None:
    assert loaded("(own, 2)", 2) == ["loaded"] * 2


def test_other_numbers_of_ranks_and_other_orders_are_refused() -> None:
    assert all("MPI's world has 2 ranks, and this run has 3" in said for said in loaded("(own, 3)", 2))
    assert sorted(said.split(",")[0] for said in loaded("(1 - own, 2)", 2)) == [
        "comm.backend=mpi: rank 0 is rank 1 to MPI",
        "comm.backend=mpi: rank 1 is rank 0 to MPI",
    ]


def test_an_order_of_its_own_may_be_given() -> None:
    assert loaded("(1 - own, 2, (1, 0))", 2) == ["loaded"] * 2


def test_without_mpi4py() -> None:
    (said,) = loaded("(0, 2)", before="import sys; sys.modules['mpi4py'] = None")
    assert (
        said
        == "comm.backend=mpi: mpi4py is not installed. Instead: pip install 'dthpc[mpi]', on a site against its MPI"
    )


def test_without_a_library() -> None:
    (said,) = loaded("(0, 2)", MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert "mpi4py finds no MPI library that it can load" in said
    assert "load the site's MPI module" in said


@pytest.mark.parametrize("level", ["single", "funneled", "serialized"])
def test_a_library_of_one_thread_is_refused(level: str) -> None:
    (said,) = loaded("(0, 1)", before=f"import mpi4py; mpi4py.rc.thread_level = '{level}'\nfrom mpi4py import MPI")
    assert f"gave thread level {level}" in said


ORDERED = r"""
import os, sys, torch, torch.distributed as dist
from dthpc.comm.mpi import BACKEND, register
from dthpc.comm.mpi.runtime import load
own, order = int(os.environ["PMI_RANK"]), (2, 0)
if own in order:
    rank = order.index(own)
    register(load(rank, 2, order))
    for turn in range(2):
        store = dist.FileStore(f"{sys.argv[1]}-{turn}", 2)
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=2)
        tensors = [torch.empty(1, dtype=torch.int64) for _ in order]
        dist.all_gather(tensors, torch.tensor([own]))
        assert [int(tensor) for tensor in tensors] == [2, 0], tensors
        dist.destroy_process_group()
    os.write(1, b"agreed\n")
else:
    from mpi4py import MPI
"""


def test_mpi_may_have_more_ranks_in_another_order_and_groups_begin_again(tmp_path: Path) -> None:
    done = subprocess.run(
        [MPIEXEC, "-n", "3", sys.executable, "-c", ORDERED, str(tmp_path / "store")],
        cwd=repository(),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.stdout.splitlines() == ["agreed"] * 2, done.stderr
    assert done.returncode == 0


FAILS = """
import os, sys, torch, torch.distributed as dist
from dthpc.comm.mpi import BACKEND, register
from dthpc.comm.mpi.runtime import load
rank = int(os.environ["PMI_RANK"])
register(load(rank, 2))
dist.init_process_group(BACKEND, store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
if rank == 1:
    raise SystemError("this rank has enough")
dist.all_reduce(torch.ones(3))
"""


def test_an_exception_on_one_rank_ends_the_job_and_not_a_time_out(tmp_path: Path) -> None:
    done = subprocess.run(
        [MPIEXEC, "-n", "2", sys.executable, "-c", FAILS, str(tmp_path / "store")],
        cwd=repository(),
        capture_output=True,
        text=True,
        timeout=180,  # the group's own is half an hour
        check=False,
    )
    assert done.returncode != 0
    assert "this rank has enough" in done.stderr


FORKS = """
import os, sys
from dthpc.comm.mpi.runtime import load
load(int(os.environ["PMI_RANK"]), 2)
child = os.fork() if os.environ["PMI_RANK"] == "0" else 0
if child:
    os.waitpid(child, 0)
    os.write(1, b"alone\\n")
elif os.environ["PMI_RANK"] == "0":
    sys.exit()
"""


def test_a_forked_process_leaves_mpi_alone_at_its_end() -> None:
    done = subprocess.run(
        [MPIEXEC, "-n", "2", sys.executable, "-c", FORKS],
        cwd=repository(),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.stdout.splitlines() == ["alone"], done.stderr
    assert done.returncode == 0


WINDOW = """
import os, sys
from dthpc.comm.mpi.runtime import load
runtime = load(int(os.environ["OMPI_COMM_WORLD_RANK"]), 2)
assert runtime.windows.take(runtime.mpi.COMM_WORLD, (0, 1)) is not None
"""


def test_open_mpi_makes_windows_without_a_word() -> None:
    python = python_of("Open MPI")
    done = subprocess.run(
        [python.parent / "mpiexec", "--allow-run-as-root", "--oversubscribe", "-n", "2", python, "-c", WINDOW],
        cwd=repository(),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "OSC UCX" not in done.stdout + done.stderr
