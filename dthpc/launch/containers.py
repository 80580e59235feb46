"""Ranks inside a container: `apptainer exec` around a rank's command, or pyxis options for the `srun` that starts it.

The image brings Python with torch and the other requirements. dthpc itself is mounted, so that the ranks run the same
code as the command that submitted them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dthpc
from dthpc.errors import UserError
from dthpc.rundir import RunDir

INSIDE = "/opt/dthpc"
"""Where the package's parent folder is inside the image."""


def package_folder() -> Path:
    """The folder of this package's code."""
    return Path(dthpc.__file__).resolve().parent


def rank_words(cfg: Any, run: RunDir, python: str) -> list[str]:
    """The words that start one rank, container included; the keeper adds the run's folder.

    Raises:
        UserError: the container's settings contradict each other.
    """
    container = cfg.cluster.container
    check(cfg)
    if container.runtime is None:
        return [python, "-u", "-m", "dthpc.attempt.rank"]
    inside = [container.python, "-u", "-m", "dthpc.attempt.rank"]
    if container.runtime == "pyxis":
        return inside
    binds = [word for mount in mounts(cfg, run) for word in ("--bind", mount)]
    gpus = ["--nv"] if _gpus(cfg) and "--rocm" not in container.arguments else []
    # The path must lead to dthpc and to nothing of the host's: a variable for the inside alone.
    path = ["--env", f"PYTHONPATH={INSIDE}"]
    return ["apptainer", "exec", *gpus, *binds, *path, *map(str, container.arguments), str(container.image), *inside]


def srun_words(cfg: Any, run: RunDir) -> list[str]:
    """The pyxis options of the ranks' `srun`; none for other runtimes."""
    container = cfg.cluster.container
    if container.runtime != "pyxis":
        return []
    mounted = ",".join(mounts(cfg, run))
    given = [f"--container-image={container.image}", f"--container-mounts={mounted}"]
    return [*given, "--no-container-mount-home", *map(str, container.arguments)]


def rank_environment(cfg: Any) -> dict[str, str]:
    """Variables that a rank in a container needs on top of the inherited ones."""
    return {"PYTHONPATH": INSIDE} if cfg.cluster.container.runtime == "pyxis" else {}


def mounts(cfg: Any, run: RunDir) -> list[str]:
    """What is mounted, as `SRC:DST`: the run's folder, dthpc, and what the configuration names."""
    own = [f"{run.path}:{run.path}", f"{package_folder()}:{INSIDE}/dthpc"]
    return own + [mount if ":" in mount else f"{mount}:{mount}" for mount in map(str, cfg.cluster.container.mounts)]


def check(cfg: Any) -> None:
    """Refuse settings that contradict each other.

    Raises:
        UserError: no image, or an image without a runtime, or pyxis without Slurm.
    """
    container = cfg.cluster.container
    if container.runtime is None:
        if container.image is not None:
            why = "is given, but cluster.container.runtime is not, so that it would be ignored"
            instead = "cluster.container.runtime=apptainer or pyxis"
            raise UserError(why, key="cluster.container.image", value=container.image, instead=instead)
        return
    if not container.image:
        instead = "cluster.container.image=/path/to/image.sif, or docker://…"
        raise UserError("a container needs an image", key="cluster.container.image", instead=instead)
    if container.runtime == "pyxis" and cfg.cluster.kind == "local":
        why = "is a plugin of srun, and a local run has none"
        raise UserError(why, key="cluster.container.runtime", value="pyxis", instead="apptainer")
    for mount in (str(run) for run in container.mounts):
        if "," in mount or not mount.startswith(("/", "~", "$")):
            instead = "an absolute path, or SRC:DST"
            raise UserError("is no mount", key="cluster.container.mounts", value=mount, instead=instead)


def _gpus(cfg: Any) -> bool:
    return bool(cfg.cluster.gpus_per_node or cfg.cluster.gpus_per_task)
