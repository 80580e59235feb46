from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dthpc.monitor.tensorboard import ScalarWriter


def test_nothing_is_imported_or_written_before_the_first_value(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    code = (
        "import sys; from pathlib import Path; from dthpc.monitor.tensorboard import ScalarWriter;"
        f"w = ScalarWriter(Path({str(tmp_path)!r})); assert 'tensorboardX' not in sys.modules; w.close()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert list(tmp_path.iterdir()) == []


def test_values_are_in_the_file(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    writer = ScalarWriter(tmp_path, start_step=3)
    writer.write(3, {"train/loss": 1.5})
    writer.close()
    (file,) = tmp_path.iterdir()
    assert b"train/loss" in file.read_bytes()
