"""Whether a placement holds, asked from inside the rank: of the kernel and the drivers, not of what was set."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dthpc.errors import UserError
from dthpc.placement import kernel
from dthpc.placement.apply import Settings
from dthpc.placement.cpuset import CpuSet, format_cpus, parse_cpus
from dthpc.placement.plan.places import RankPlace
from dthpc.placement.topology import Nic, bus_id


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    """`threads`, `memory`, `gpu` or `nic`."""

    expected: str
    found: str
    holds: bool | None
    """`None`: it could not be seen here."""

    def __str__(self) -> str:
        return f"{self.what}: expected {self.expected}, found {self.found}"

    def to_json(self) -> dict[str, Any]:
        return {"what": self.what, "expected": self.expected, "found": self.found, "holds": self.holds}


@dataclass(frozen=True)
class Verification:
    """What a rank found about its own placement."""

    findings: tuple[Finding, ...]

    @property
    def mismatches(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.holds is False]

    def to_json(self) -> dict[str, Any]:
        """For the run's records."""
        return {"holds": not self.mismatches, "findings": [finding.to_json() for finding in self.findings]}

    def demand(self) -> None:
        """Raise what does not hold (`placement.strict=true`).

        Raises:
            UserError: something does not hold.
        """
        if self.mismatches:
            raise UserError(
                "this rank does not run where it was placed: " + "; ".join(map(str, self.mismatches)),
                key="placement.strict",
                value=True,
                instead="see what else binds processes here (srun options, wrappers, exported variables), or "
                "placement.strict=false",
            )


def verify(place: RankPlace, settings: Settings, env: Mapping[str, str] = os.environ) -> Verification:
    """Look at this process.

    Args:
        place: where it should be.
        settings: what was set; memory is looked at only where a policy was.
        env: its environment.
    """
    findings = []
    if place.cpus is not None:
        findings.append(_threads(place.cpus))
    if settings.memory:
        findings.append(_memory(settings.memory))
    if place.units:
        findings.append(_gpus(place))
    findings += [_nic(choice.nic) for choice in place.nics]
    findings += [
        Finding("environment", f"{name}={value}", f"{name}={env.get(name)} (exported before the start)", None)
        for name, value in settings.kept.items()
    ]
    return Verification(tuple(findings))


def thread_masks(process: int | str = "self") -> dict[int, CpuSet]:
    """CPUs that each thread of a process may run on, as the kernel says; threads that end meanwhile are left out."""
    masks = {}
    for task in Path(f"/proc/{process}/task").iterdir():
        try:
            lines = (task / "status").read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:
            continue
        text = next(line.split(":", 1)[1] for line in lines if line.startswith("Cpus_allowed_list"))
        masks[int(task.name)] = parse_cpus(text)
    return masks


def _threads(expected: CpuSet) -> Finding:
    masks = thread_masks()
    outside = {thread: mask for thread, mask in masks.items() if not mask <= expected}
    if outside:
        thread, mask = next(iter(outside.items()))
        found = f"{len(outside)} of {len(masks)} threads elsewhere (thread {thread} may run on {format_cpus(mask)})"
    else:
        found = f"all {len(masks)} threads within"
    return Finding("threads", format_cpus(expected), found, not outside)


def _memory(expected: tuple[int, ...]) -> Finding:
    wanted = ", ".join(map(str, expected))
    try:
        nodes = kernel.nodes_of_fresh_pages()
    except OSError as error:
        return Finding("memory", f"node {wanted}", f"can't be seen ({error.strerror})", None)
    found = ", ".join(f"{count} pages of node {node}" for node, count in sorted(nodes.items()))
    return Finding("memory", f"node {wanted}", found or "no pages", set(nodes) <= set(expected) if nodes else None)


def _gpus(place: RankPlace) -> Finding:
    expected = [unit.gpu.bus_id for unit in place.units]
    wanted = ", ".join(bus or unit.name for bus, unit in zip(expected, place.units, strict=True))
    if None in expected:
        return Finding("gpu", wanted, "its bus id is not told", None)
    shown = visible_bus_ids()
    if shown is None:
        return Finding("gpu", wanted, "no driver here shows bus ids", None)
    held = shown == list(dict.fromkeys(expected))
    return Finding("gpu", wanted, ", ".join(shown) or "none", held)


def visible_bus_ids() -> list[str] | None:
    """Bus ids of the GPUs that this process sees, in the order of CUDA's devices; `None` where no driver tells."""
    return _of_torch() or _of_driver()


def _of_torch() -> list[str] | None:
    # Only where the rank has loaded torch already: this room does without.
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    found = []
    for index in range(torch.cuda.device_count()):
        told = torch.cuda.get_device_properties(index)
        if not hasattr(told, "pci_bus_id"):
            return None
        found.append(f"{told.pci_domain_id:04x}:{told.pci_bus_id:02x}:{told.pci_device_id:02x}.0")
    return found


def _of_driver() -> list[str] | None:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return None
    found = []
    for index in range(count.value):
        device = ctypes.c_int()
        text = ctypes.create_string_buffer(32)
        if cuda.cuDeviceGet(ctypes.byref(device), index) or cuda.cuDeviceGetPCIBusId(text, 32, device):
            return None
        found.append(bus_id(text.value.decode()) or text.value.decode())
    return found


def _nic(nic: Nic, root: Path = Path("/sys/class")) -> Finding:
    expected = f"{nic.name} up"
    device = root / "infiniband" / nic.name
    if device.is_dir():
        states = [_word(port / "state") for port in sorted((device / "ports").glob("*"))]
        return Finding("nic", expected, ", ".join(states) or "no port", any("ACTIVE" in state for state in states))
    interface = root / "net" / (nic.interfaces or (nic.name,))[0]
    if interface.is_dir():
        state = _word(interface / "operstate")
        return Finding("nic", expected, state, state in ("up", "unknown"))
    return Finding("nic", expected, "no such device", False)


def _word(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return "unreadable"
