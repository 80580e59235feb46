from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_checkout_does_not_hide_the_package_from_the_folder_above_it(tmp_path: Path) -> None:
    """`git clone` calls the checkout `dthpc`, which holds folders that are called as rooms are."""
    (tmp_path / "dthpc/slurm").mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-c", "import dthpc.slurm.hostlist; print(dthpc.__version__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{done.stderr}\nInstalled before setup.cfg said how? Then: pip install --no-deps -e ."
