"""Ranks inside containers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dthpc.errors import UserError
from dthpc.launch import containers
from dthpc.rundir import RunDir
from tests.launch.sites import make_config

RUN = RunDir(Path("/runs/r"))


def test_no_container() -> None:
    assert containers.rank_words(make_config(), RUN, "py") == ["py", "-u", "-m", "dthpc.attempt.rank"]
    assert containers.srun_words(make_config(), RUN) == []
    assert containers.rank_environment(make_config()) == {}


def test_apptainer_wraps_the_rank() -> None:
    settings = {"runtime": "apptainer", "image": "i.sif", "mounts": ["/data", "/a:/b"], "arguments": ["--cleanenv"]}
    words = containers.rank_words(make_config(gpus_per_node=1, container=settings), RUN, "py")
    package = containers.package_folder()
    assert words[:3] == ["apptainer", "exec", "--nv"]
    binds = [words[index + 1] for index, word in enumerate(words) if word == "--bind"]
    assert binds == ["/runs/r:/runs/r", f"{package}:/opt/dthpc/dthpc", "/data:/data", "/a:/b"]
    assert words[-8:] == [
        "--env",
        "PYTHONPATH=/opt/dthpc",
        "--cleanenv",
        "i.sif",
        "python3",
        "-u",
        "-m",
        "dthpc.attempt.rank",
    ]
    assert "--nv" not in containers.rank_words(make_config(container=settings), RUN, "py")


def test_pyxis_is_options_of_srun() -> None:
    config = make_config(container={"runtime": "pyxis", "image": "nvcr.io#x", "python": "/usr/bin/python"})
    assert containers.rank_words(config, RUN, "py") == ["/usr/bin/python", "-u", "-m", "dthpc.attempt.rank"]
    words = containers.srun_words(config, RUN)
    assert words[0] == "--container-image=nvcr.io#x"
    assert words[1].startswith("--container-mounts=/runs/r:/runs/r,")
    assert containers.rank_environment(config) == {"PYTHONPATH": "/opt/dthpc"}


@pytest.mark.parametrize(
    ("cluster", "key"),
    [
        ({"container": {"image": "x"}}, "cluster.container.image"),
        ({"container": {"runtime": "apptainer"}}, "cluster.container.image"),
        ({"kind": "local", "container": {"runtime": "pyxis", "image": "x"}}, "cluster.container.runtime"),
        ({"container": {"runtime": "pyxis", "image": "x", "mounts": ["a,b"]}}, "cluster.container.mounts"),
    ],
)
def test_contradictions(cluster: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError) as caught:
        containers.check(make_config(**cluster))
    assert caught.value.key == key
