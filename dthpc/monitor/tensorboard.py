"""Curves for TensorBoard, written by tensorboardX, which is imported only when the first value comes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from dthpc.errors import UserError


class ScalarWriter:
    """Appends scalars to TensorBoard files in a folder."""

    def __init__(self, folder: Path, start_step: int = 0) -> None:
        """Prepare to write; neither a file nor an import is made yet.

        Args:
            folder: where the files lie; earlier attempts' files may lie there too.
            start_step: what earlier attempts wrote from this step on is hidden, since it will be made again.

        Raises:
            UserError: tensorboardX is not installed.
        """
        if importlib.util.find_spec("tensorboardX") is None:
            raise UserError(
                "the package tensorboardX is not installed",
                key="monitor.tensorboard",
                value=True,
                instead="monitor.tensorboard=false, or `pip install tensorboardX`",
            )
        self._folder = folder
        self._start_step = start_step
        self._writer: Any = None

    def write(self, step: int, values: dict[str, float]) -> None:
        """Append one value for each tag."""
        if self._writer is None:
            from tensorboardX import SummaryWriter

            purge = self._start_step if self._start_step else None
            self._writer = SummaryWriter(str(self._folder), purge_step=purge, flush_secs=30)
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
