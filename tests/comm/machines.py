"""Machines for tests of addresses: network namespaces with interfaces, a cable between them and a hosts file."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
_numbers = itertools.count()


def why_not() -> str | None:
    """Why no network namespaces can be made here, or `None` when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in ("ip", "unshare", "mount") if not shutil.which(tool)]
    if absent:
        return f"not installed: {', '.join(absent)}"
    probe = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, check=False)
    return "this machine allows no network namespaces" if probe.returncode else None


class Machine:
    """One namespace, gone at the end of the `with`."""

    def __init__(self, host: str, folder: Path) -> None:
        self.host = host
        self.name = f"dthpc-{os.getpid()}-{next(_numbers)}"
        self.hosts = folder / f"hosts-{self.name}"
        self.hosts.write_text(f"127.0.0.1 localhost {host}\n")

    def __enter__(self) -> Machine:
        _run("ip", "netns", "add", self.name)
        self.ip("link", "set", "lo", "up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _run("ip", "netns", "delete", self.name)

    def ip(self, *words: str) -> None:
        """An `ip` command on this machine."""
        _run("ip", "-n", self.name, *words)

    def add(self, interface: str, address: str) -> None:
        """An interface that leads nowhere: a cable from this machine to itself."""
        self.ip("link", "add", interface, "type", "veth", "peer", "name", f"{interface}-end")
        self.ip("link", "set", f"{interface}-end", "up")
        self._address(interface, address)

    def add_bridge(self, interface: str, address: str) -> None:
        """A bridge as container engines make them."""
        self.ip("link", "add", interface, "type", "bridge")
        self._address(interface, address)

    def cable(self, interface: str, address: str, other: Machine, other_interface: str, other_address: str) -> None:
        """A cable to another machine."""
        peer = ["peer", "name", other_interface, "netns", other.name]
        self.ip("link", "add", interface, "type", "veth", *peer)
        self._address(interface, address)
        other._address(other_interface, other_address)

    def _address(self, interface: str, address: str) -> None:
        # nodad: an IPv6 address would be tentative, and unusable, for a second.
        extra = ["nodad"] if ":" in address else []
        self.ip("address", "add", address, "dev", interface, *extra)
        self.ip("link", "set", interface, "up")

    def command(self, *words: str) -> list[str]:
        """A command as it runs on this machine."""
        inside = f'hostname {self.host}; mount --bind {self.hosts} /etc/hosts; exec "$@"'
        return ["ip", "netns", "exec", self.name, "unshare", "--mount", "--uts", "sh", "-c", inside, "sh", *words]

    def popen(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """A process on this machine."""
        return subprocess.Popen(
            self.command(*words), cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
        )


def rank(machine: Machine | None, folder: Path, number: int, size: int, **request: Any) -> subprocess.Popen[str]:
    """A rank of a meeting, on a machine or here."""
    host = machine.host if machine else "here"
    asked = json.dumps({"rank": number, "world_size": size, "host": host, **request})
    words = [sys.executable, "-m", "tests.comm.meeting", str(folder), asked]
    if machine:
        return machine.popen(*words)
    return subprocess.Popen(words, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What a rank printed."""
    output, errors = process.communicate(timeout=120)
    assert output, errors
    found = json.loads(output.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
