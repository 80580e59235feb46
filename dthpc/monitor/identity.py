"""What exactly ran: code, packages, machine and environment, for the records. Nothing secret is written."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from dthpc import __version__
from dthpc.rundir import AttemptDir, write_json

PACKAGES = ("torch", "numpy", "submitit", "hydra-core", "omegaconf", "mpi4py", "tensorboardX", "triton", "safetensors")
"""Packages whose versions are recorded, where they are installed."""

_SECRET_NAME = re.compile(
    r"TOKEN|KEY|SECRET|PASS(WORD|WD|PHRASE)?($|_)|PASSWORD|CREDENTIAL|AUTH|COOKIE|SESSION|BEARER|JWT|PRIVATE|SIGNATURE"
    r"|DSN|CONNECTION_STRING|_PAT$|_PW$",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(
    r"[a-z][a-z0-9+.-]*://[^/\s@]*:[^/\s@]*@"  # URL with a password
    r"|\b(?:gh[pousr]_|github_pat_|glpat-|hf_|sk-|xox[abprs]-|AKIA|ASIA|AIza|ya29\.|eyJ[\w-]+\.eyJ)[\w-]{8,}"
    r"|-----BEGIN|\bBearer\s+\S{8,}|[?&](?:token|key|sig|signature|password|secret)=",
    re.IGNORECASE,
)
_GIT_TIMEOUT_S = 10.0


def scrub(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that hold nothing secret, by their names and by their values.

    Exported shell functions are left out too: they are code, not settings.
    """
    return {
        name: value
        for name, value in sorted(env.items())
        if not _SECRET_NAME.search(name) and not _SECRET_VALUE.search(value) and not name.startswith("BASH_FUNC_")
    }


def write_environment(attempt: AttemptDir, env: Mapping[str, str]) -> None:
    """Record the environment of an attempt in `environment.json`, and uncommitted changes of the code beside it."""
    write_json(attempt.environment, environment_identity(env))
    code = code_identity(attempt.path)
    write_json(attempt.environment, {**environment_identity(env), "code": code})


def environment_identity(env: Mapping[str, str]) -> dict[str, Any]:
    """Versions, machine and variables. Takes a few milliseconds: no package is imported, no command is run."""
    return {
        "dthpc": __version__,
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "packages": package_versions(),
        "host": socket.gethostname(),
        "kernel": f"{platform.system()} {platform.release()}",
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "cpus_allowed": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "modules": [name for name in env.get("LOADEDMODULES", "").split(":") if name],
        "container": container(env),
        "folder": str(Path.cwd()),
        "time": round(time.time(), 3),
        "variables": scrub(env),
    }


def package_versions() -> dict[str, str]:
    """Versions of the packages that matter, read from their metadata."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def cpu_model() -> str | None:
    """Name of the processor, or `None` where the system does not tell."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip() in ("model name", "Processor", "cpu model", "cpu"):
                    return value.strip()
    except OSError:
        pass
    return platform.processor() or None


def container(env: Mapping[str, str]) -> str | None:
    """The container that this process runs in, as far as it can be told; `None` for none."""
    for name in ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", "APPTAINER_NAME", "SINGULARITY_NAME"):
        if env.get(name):
            return env[name]
    for name in ("ENROOT_ROOTFS", "SLURM_CONTAINER", "container"):
        if env.get(name):
            return f"{name}={env[name]}"
    if Path("/run/.containerenv").exists():
        return "podman"
    return "docker" if Path("/.dockerenv").exists() else None


def code_identity(folder: Path) -> dict[str, Any]:
    """Commits of the checkouts that the code comes from: this package's, and that of the working folder.

    Args:
        folder: where uncommitted changes are saved, as `NAME.diff`.
    """
    places = {"dthpc": Path(__file__).resolve().parents[2], "project": Path.cwd()}
    found: dict[str, Any] = {}
    tops: set[str] = set()
    for name, place in places.items():
        top = _git(place, "rev-parse", "--show-toplevel")
        if top is None or top in tops:
            continue
        if name == "dthpc" and not _tracked(place):
            continue  # installed into an environment that happens to lie inside somebody's checkout
        tops.add(top)
        found[name] = _checkout(name, Path(top), folder)
    return found


def _tracked(package_parent: Path) -> bool:
    return bool(_git(package_parent, "ls-files", "dthpc/__init__.py"))


def _checkout(name: str, top: Path, folder: Path) -> dict[str, Any]:
    diff = _git(top, "diff", "HEAD", "--no-color", "--no-ext-diff")
    untracked = _git(top, "ls-files", "--others", "--exclude-standard") or ""
    identity: dict[str, Any] = {
        "top": str(top),
        "commit": _git(top, "rev-parse", "HEAD"),
        "branch": _git(top, "rev-parse", "--abbrev-ref", "HEAD"),
        "dirty": bool(diff),
        "untracked": untracked.splitlines()[:200],
    }
    if diff:
        path = folder / f"{name}.diff"
        path.write_text(diff + "\n", encoding="utf-8", errors="surrogateescape")
        identity["diff"] = path.name
    return identity


def _git(place: Path, *words: str) -> str | None:
    """Output of a git command; `None` where there is no git, no checkout, or no answer."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            ["git", "-C", str(place), *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
