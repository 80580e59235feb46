from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.ranks import repository


def test_a_checkout_does_not_hide_the_package_from_the_folder_above_it(tmp_path: Path) -> None:
    """`git clone` calls the checkout `dthpc`, which holds folders that are called as rooms are."""
    checkout, installed = tmp_path / "dthpc", tmp_path / "site"
    for name in ("dthpc", "conf", "slurm"):
        shutil.copytree(repository() / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repository() / name, checkout)
    # What `pip install -e .` asks of setuptools; pip then unpacks the wheel.
    build = "from setuptools import build_meta; build_meta.build_editable('..')"
    subprocess.run([sys.executable, "-c", build], cwd=checkout, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(installed)
    # Without the packages of this environment, among which dthpc is installed as well.
    code = f"import site; site.addsitedir({str(installed)!r}); import dthpc.slurm.hostlist as it; print(it.__file__)"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == str(checkout / "dthpc/slurm/hostlist.py"), done.stderr
