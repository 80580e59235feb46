"""The presets of `conf/comm`: variables that pin each fabric's transport, so that a missing plugin is an error.

The files are the only source; `comm=infiniband` composes one, and `comm=auto` reads that of the fabric it found.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from dthpc.comm.fabric.devices import FABRICS
from dthpc.config.compose import config_folder

_BY_LIBRARY = {
    "nccl": ("NCCL_", "OFI_NCCL_", "FI_"),
    "gloo": ("GLOO_", "TP_"),
    "mpi": ("UCX_", "FI_", "OMPI_MCA_", "MPICH_", "MPIR_CVAR_"),
}
"""Beginnings of the variables that each library reads. Where NCCL and MPI are absent, theirs are not set: other
programs of the job would read them."""

_PLUGINS = ("libnccl-net-ofi.so", "libnccl-net.so", "libnccl-net-aws-ofi.so", "librccl-net-ofi.so", "librccl-net.so")


def preset(fabric: str) -> dict[str, str]:
    """The variables of a fabric's preset; none where there is no preset for it."""
    if fabric not in FABRICS:
        return {}
    from omegaconf import OmegaConf

    file = config_folder() / "comm" / f"{fabric}.yaml"
    content = OmegaConf.to_container(OmegaConf.load(file))
    return environment_of(content.get("environment") if isinstance(content, dict) else None)


def environment_of(node: object) -> dict[str, str]:
    """`comm.environment` as variables: empty ones are those that were taken out by `null`."""
    items = node.items() if isinstance(node, Mapping) else ()
    return {str(name): str(value) for name, value in items if value is not None}


def needed(environment: Mapping[str, str], libraries: set[str]) -> dict[str, str]:
    """Those of the variables that libraries in use read.

    Args:
        environment: variables.
        libraries: some of `nccl`, `gloo` and `mpi`.
    """
    begins = tuple(begin for library in libraries for begin in _BY_LIBRARY[library]) + _BY_LIBRARY["gloo"]
    return {name: value for name, value in environment.items() if name.startswith(begins)}


def unpinned(environment: Mapping[str, str], env: Mapping[str, str] = os.environ) -> tuple[dict[str, str], str | None]:
    """A preset that nobody asked for, without a plugin of NCCL that is not there, and what to say of it.

    Only a preset that was asked for makes a missing plugin an error.

    Args:
        environment: of the preset.
        env: where libraries are looked for (`LD_LIBRARY_PATH`).
    """
    if environment.get("NCCL_NET") != "AWS Libfabric" or find_plugin(env) is not None:
        return dict(environment), None
    left = {name: value for name, value in environment.items() if name not in ("NCCL_NET", "NCCL_NET_PLUGIN")}
    return left, (
        "NCCL's plugin for libfabric (aws-ofi-nccl) is not found in LD_LIBRARY_PATH: NCCL will send over TCP sockets. "
        "Load it (module load aws-ofi-nccl); the fabric's own preset (comm=slingshot, comm=efa) makes that an error"
    )


def find_plugin(env: Mapping[str, str]) -> Path | None:
    """NCCL's network plugin in the folders of the dynamic loader."""
    folders = [*env.get("LD_LIBRARY_PATH", "").split(":"), "/opt/amazon/ofi-nccl/lib", "/opt/amazon/ofi-nccl/lib64"]
    folders += ["/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"]
    for folder in filter(None, folders):
        for name in _PLUGINS:
            if (path := Path(folder) / name).exists():
                return path
    return None
