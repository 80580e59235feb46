"""The one place that knows where everything of a run lies on disk."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunDir:
    """Names every path of a run; reads and writes nothing by itself."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(os.path.abspath(self.path)))

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def launch(self) -> Path:
        return self.path / "launch.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def submissions(self) -> Path:
        return self.path / "submissions"

    @property
    def stages(self) -> Path:
        return self.path / "stages.json"

    @property
    def preflight(self) -> Path:
        return self.path / "preflight.json"

    @property
    def levels(self) -> Path:
        return self.path / "levels.json"

    @property
    def collectives(self) -> Path:
        return self.path / "collectives.json"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self.attempts / str(number))

    def attempt_numbers(self) -> list[int]:
        """Numbers of the attempts made so far, in order."""
        if not self.attempts.is_dir():
            return []
        return sorted(int(entry.name) for entry in self.attempts.iterdir() if entry.name.isdigit())


@dataclass(frozen=True)
class AttemptDir:
    """Names every path of one attempt."""

    path: Path

    @property
    def number(self) -> int:
        return int(self.path.name)

    @property
    def start(self) -> Path:
        return self.path / "attempt.json"

    @property
    def end(self) -> Path:
        return self.path / "end.json"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def setup(self) -> Path:
        return self.path / "setup.json"

    @property
    def placement(self) -> Path:
        return self.path / "placement.json"

    @property
    def preflight(self) -> Path:
        return self.path / "preflight.json"

    @property
    def rendezvous(self) -> Path:
        return self.path / "rendezvous.json"

    @property
    def verdict(self) -> Path:
        return self.path / "verdict.json"

    @property
    def flight(self) -> Path:
        return self.path / "flight"

    def rank_log(self, rank: int) -> Path:
        return self.path / f"rank-{rank:05d}.log"

    def rank_exit(self, rank: int) -> Path:
        return self.path / f"rank-{rank:05d}.json"


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of either, even after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with open(partial, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def read_json(path: Path) -> Any | None:
    """The JSON value of a file, or `None` where the file is absent or not whole."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError):
        return None
