"""Configurations and Slurm sites for tests of what surrounds a submission."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dthpc.config.schema import Config
from dthpc.launch.site import NodeShape, Site
from dthpc.slurm.client import SlurmClient
from dthpc.slurm.records import PartitionRecord, parse_partitions
from dthpc.slurm.units import parse_gres


def make_config(root: Path | str = "runs", **cluster: Any) -> DictConfig:
    """A configuration of a Slurm run; the keywords are fields of `cluster`."""
    config = OmegaConf.merge(OmegaConf.structured(Config), {"run": {"root": str(root)}, "cluster": {"kind": "slurm"}})
    config = OmegaConf.merge(config, {"cluster": cluster})
    assert isinstance(config, DictConfig)
    return config


def make_partition(name: str, **settings: Any) -> PartitionRecord:
    """A partition of three nodes `n[1-3]`."""
    fields = {"State": "UP", "TotalNodes": 3, "TotalCPUs": 24, "Nodes": "n[1-3]", "MaxTime": "UNLIMITED", **settings}
    return parse_partitions(f"PartitionName={name} " + " ".join(f"{key}={value}" for key, value in fields.items()))[0]


def make_shape(partition: str, **settings: Any) -> NodeShape:
    """Three idle nodes of 8 CPUs, 8 GB and 2 GPUs."""
    gres = parse_gres(settings.pop("gres", "gpu:2"))
    fields = {"count": 3, "cpus": 8, "memory_mb": 8192, "state": "idle", "usable": True, **settings}
    return NodeShape(partition=partition, gres=gres, **fields)


def make_site(**settings: Any) -> Site:
    """A site with the partitions `main` (default) and `grace`, preempted by partition priority."""
    fields: dict[str, Any] = {
        "version": (22, 5, 8),
        "kill_wait_s": 30.0,
        "preempt_type": "preempt/partition_prio",
        "preempt_mode": "REQUEUE",
        "user_signal_on_preemption": False,
        "job_requeue": True,
        "mpi_default": "none",
        "select_type": "select/cons_tres",
        "task_plugins": "task/none",
        "accounting": True,
        "max_array_size": 1001,
        "partitions": [
            make_partition("main", Default="YES"),
            make_partition("grace", GraceTime=20, MaxTime="02:00:00"),
        ],
        "shapes": [make_shape("main"), make_shape("grace")],
    }
    return Site(**{**fields, **settings})


def add_command(folder: Path, name: str, script: str) -> None:
    """A command of that name that runs a shell script."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def client_of(folder: Path, env: Mapping[str, str] | None = None) -> SlurmClient:
    """A client that finds the commands of a folder alone, and never waits."""
    return SlurmClient(environment={"PATH": str(folder), **(env or {})}, pause=lambda seconds: None)
