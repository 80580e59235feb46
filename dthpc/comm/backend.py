"""Which library carries the collectives: NCCL between GPUs, Gloo between CPUs, or MPI. Free of torch.

The choice is a pure function of what is wanted and of facts that every rank finds alike, so that all ranks decide the
same without asking each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dthpc.errors import UserError, nearest, raise_together

LIBRARIES = ("nccl", "gloo", "mpi")
BACKENDS = ("auto", *LIBRARIES)
DEVICES = ("cpu", "cuda")
AXES = ("pp", "replicate", "shard", "cp", "tp")
"""Axes of the mesh that may have a backend of their own (`comm.axes`)."""

_TORCH_NAMES = {"nccl": "nccl", "gloo": "gloo", "mpi": "mpi4py"}
"""Names for `init_process_group`; `mpi` is torch's own, which its wheels lack (see `dthpc.comm.mpi`)."""

_GPUS = "cluster.gpus_per_node=N (ranks then compute on GPUs)"


@dataclass(frozen=True)
class Wanted:
    """What `comm.backend` and `comm.axes` ask for."""

    devices: Mapping[str, str]
    """Device type to one of `BACKENDS`; all device types have an entry."""

    axes: Mapping[str, str] = field(default_factory=dict)
    """Mesh axis to one of `LIBRARIES`."""

    by_device: bool = False
    """Whether the user spoke of each device type by itself."""

    def libraries(self) -> set[str]:
        """All that is asked for by name."""
        return {*self.devices.values(), *self.axes.values()} - {"auto"}


@dataclass(frozen=True)
class Facts:
    """What a rank knows when it chooses."""

    device: str
    """Where ranks compute: `cpu` or `cuda`."""

    nccl: bool = False
    """Whether torch was built with NCCL."""

    world_size: int = 1
    nodes: int = 1
    launcher: str | None = None
    """The MPI launcher that started the ranks, in words; `None`: none did."""

    no_mpi: str | None = "it was not looked for"
    """Why MPI can't be used here; `None`: nothing known speaks against it."""

    mpi_library: str | None = None
    """Name of the MPI library that mpi4py would load."""


@dataclass(frozen=True)
class Decision:
    """Which library serves what, and why."""

    devices: Mapping[str, str]
    """Device type to one of `LIBRARIES`; `cuda` only where ranks compute there."""

    reason: str
    axes: Mapping[str, str] = field(default_factory=dict)
    """Mesh axis to one of `LIBRARIES`, where it differs from `devices`."""

    tentative: bool = False
    """Whether MPI was taken because of evidence, not because it was asked for: if it does not start, Gloo serves."""

    @property
    def spec(self) -> str:
        """The name for `init_process_group`, such as `gloo` or `cpu:gloo,cuda:nccl`."""
        return _spec(self.devices)

    def axis_specs(self) -> dict[str, str]:
        """The names for `new_group` of the axes that have a library of their own."""
        device = "cuda" if "cuda" in self.devices else "cpu"
        return {axis: _spec({**self.devices, device: library}) for axis, library in self.axes.items()}

    @property
    def uses_mpi(self) -> bool:
        """Whether MPI must be started in this process."""
        return "mpi" in {*self.devices.values(), *self.axes.values()}

    def libraries(self) -> set[str]:
        """All that will be in use."""
        return {*self.devices.values(), *self.axes.values()}


def wanted_of(comm: Any) -> Wanted:
    """Read `comm.backend` and `comm.axes`.

    `comm.backend` is one word, a mapping (`{cpu: gloo, cuda: nccl}`), or that in torch's form (`cpu:gloo,cuda:nccl`).

    Raises:
        UserError: there is no such backend, device type or axis.
    """
    backend = comm.backend
    errors: list[UserError] = []
    pairs = _pairs(backend)
    if pairs is None:
        errors += _check_word("comm.backend", _shown(backend), BACKENDS)
        devices = dict.fromkeys(DEVICES, str(backend))
    else:
        for device, word in pairs.items():
            if device not in DEVICES:
                instead = nearest(device, DEVICES)
                errors.append(UserError("no such device type", key="comm.backend", value=device, instead=instead))
            errors += _check_word(f"comm.backend.{device}", word, BACKENDS)
        devices = {**dict.fromkeys(DEVICES, "auto"), **pairs}
    axes = {str(axis): str(word) for axis, word in _items(getattr(comm, "axes", None)) if word not in (None, "auto")}
    for axis, word in axes.items():
        errors += _check_word(f"comm.axes.{axis}", word, LIBRARIES)
        if axis not in AXES:
            errors.append(UserError("no such axis", key=f"comm.axes.{axis}", value=word, instead=nearest(axis, AXES)))
    raise_together(errors)
    return Wanted(devices, axes, by_device=pairs is not None)


def wants_mpi(comm: Any) -> bool:
    """Whether the `comm` group asks for MPI by name, so that its launcher has to start the ranks."""
    return "mpi" in wanted_of(comm).libraries()


def check_choice(comm: Any, gpus: bool) -> list[UserError]:
    """What can be told before anything is submitted.

    Args:
        comm: the `comm` group.
        gpus: whether ranks will have GPUs.
    """
    try:
        wanted = wanted_of(comm)
    except UserError as error:
        return list(getattr(error, "errors", [error]))
    facts = Facts("cuda" if gpus else "cpu", nccl=True, no_mpi=None, launcher="to be")
    return list(_refusals(wanted, facts))


def choose(wanted: Wanted, facts: Facts) -> Decision:
    """Decide.

    What is asked for by name is taken or refused. `auto` takes NCCL where ranks compute on GPUs and Gloo where they
    compute on CPUs; MPI only between CPUs, and only where its launcher started the ranks and mpi4py has a library of
    its kind. A thing that is absent is never an error of `auto`.

    Raises:
        UserError: what is asked for can't work here; the message says how to mend it.
    """
    raise_together(_refusals(wanted, facts))
    on_gpu = facts.device == "cuda"
    devices: dict[str, str] = {}
    reasons: list[str] = []
    word = wanted.devices["cpu"]
    if word == "auto":
        devices["cpu"], why = _auto_cpu(facts)
    elif word == "nccl":  # comm.backend=nccl: of GPU tensors; others still need a way
        devices["cpu"], why = "gloo", "NCCL moves GPU memory only"
    else:
        devices["cpu"], why = word, _asked(wanted, "cpu")
    if not on_gpu:
        reasons.append(f"ranks compute on the CPU; {devices['cpu']}: {why}")
    else:
        devices["cuda"], gpu_why = _cuda(wanted, facts)
        reasons += [f"ranks compute on GPUs; {devices['cuda']}: {gpu_why}", f"CPU tensors by {devices['cpu']}: {why}"]
    main = devices["cuda" if on_gpu else "cpu"]
    axes = {axis: library for axis, library in wanted.axes.items() if library != main}
    reasons += [f"{axis} by {library}: asked by comm.axes.{axis}" for axis, library in axes.items()]
    tentative = devices["cpu"] == "mpi" and word == "auto" and "mpi" not in wanted.libraries()
    return Decision(devices, "; ".join(reasons), axes, tentative)


def without_mpi(decision: Decision, why: str) -> Decision:
    """The decision where MPI that was taken on evidence does not start after all."""
    devices = {device: "gloo" if library == "mpi" else library for device, library in decision.devices.items()}
    return Decision(devices, f"MPI was tried and does not work here ({why}); Gloo serves", decision.axes)


def candidates(wanted: Wanted, facts: Facts) -> list[str]:
    """The libraries that could serve the compute device's tensors, the default choice first (for `comm.tune`)."""
    default = choose(wanted, facts).devices[facts.device]
    asked = wanted.devices[facts.device]
    if asked != "auto" and wanted.by_device:
        return [default]
    able = {"nccl": facts.device == "cuda" and facts.nccl, "gloo": True, "mpi": facts.no_mpi is None}
    return [default, *(library for library in LIBRARIES if able[library] and library != default)]


def _auto_cpu(facts: Facts) -> tuple[str, str]:
    if facts.device == "cuda":
        return "gloo", "enough for what is not on the GPU"
    if facts.world_size == 1:
        return "gloo", "there is one rank"
    if facts.no_mpi is None and facts.launcher is not None:
        return "mpi", f"{facts.launcher} started the ranks, and mpi4py has {facts.mpi_library}"
    return "gloo", f"MPI is not taken: {facts.no_mpi or 'no MPI launcher started the ranks'}"


def _cuda(wanted: Wanted, facts: Facts) -> tuple[str, str]:
    asked = wanted.devices["cuda"]
    if asked != "auto":
        return asked, _asked(wanted, "cuda")
    if facts.nccl:
        return "nccl", "it is the fastest between GPUs, and this torch has it"
    return "gloo", "this build of torch has no NCCL, so that tensors are staged through host memory"


def _asked(wanted: Wanted, device: str) -> str:
    word = wanted.devices[device]
    return f"asked by comm.backend.{device}={word}" if wanted.by_device else f"asked by comm.backend={word}"


def _refusals(wanted: Wanted, facts: Facts) -> Iterator[UserError]:
    asked: list[tuple[str, str, str]] = []
    if wanted.by_device:
        # What is said of a device type that the ranks do not compute on does not matter to this run.
        kinds = ("cpu", "cuda") if facts.device == "cuda" else ("cpu",)
        asked += [(f"comm.backend.{device}", wanted.devices[device], device) for device in kinds]
    else:
        asked.append(("comm.backend", wanted.devices["cpu"], facts.device))
    asked += [(f"comm.axes.{axis}", library, facts.device) for axis, library in wanted.axes.items()]
    for key, library, device in asked:
        if library == "nccl" and device != "cuda":
            why = "NCCL moves GPU memory, and this rank computes on the CPU"
            if facts.device == "cuda":
                why = "NCCL moves GPU memory only"
            yield UserError(why, key=key, value="nccl", instead=f"{key}=gloo, or ask for GPUs with {_GPUS}")
        elif library == "nccl" and not facts.nccl:
            yield UserError(
                "this build of torch has no NCCL",
                key=key,
                value="nccl",
                instead=f"{key}=gloo, or install a CUDA build of torch",
            )
        elif library == "mpi" and facts.no_mpi is not None:
            yield UserError(facts.no_mpi, key=key, value="mpi", instead=_mend_mpi(key, facts))


def _mend_mpi(key: str, facts: Facts) -> str:
    if "not installed" in (facts.no_mpi or ""):
        return f"pip install 'dthpc[mpi]' mpich, or the site's MPI with an mpi4py built against it; or {key}=gloo"
    how = f"{key}=mpi and comm.mpi_plugin=auto, so that mpiexec or srun --mpi=… starts the ranks in its way"
    return f"submit with {how}; or {key}=gloo"


def _spec(devices: Mapping[str, str]) -> str:
    # Gloo alone serves all devices under its bare name.
    if set(devices.values()) == {"gloo"}:
        return "gloo"
    return ",".join(f"{device}:{_TORCH_NAMES[library]}" for device, library in sorted(devices.items()))


def _shown(backend: Any) -> str:
    """As one writes it."""
    listed = not isinstance(backend, str) and hasattr(backend, "__iter__")
    return f"[{','.join(map(str, backend))}]" if listed else "null" if backend is None else str(backend)


def _pairs(backend: Any) -> dict[str, str] | None:
    """`comm.backend` by device type; `None` where it is one word for all."""
    if hasattr(backend, "items"):
        return {str(device): str(word) for device, word in backend.items()}
    text = str(backend)
    if ":" not in text:
        return None
    words = [part.strip() for part in re.split(r"[,;]", text) if part.strip()]
    return {device.strip(): word.strip() for device, _, word in (each.partition(":") for each in words)}


def _items(node: Any) -> list[tuple[Any, Any]]:
    if node is None:
        return []
    return list(node.items()) if hasattr(node, "items") else list(vars(node).items())


def _check_word(key: str, word: str, valid: tuple[str, ...]) -> Iterator[UserError]:
    if word not in valid:
        yield UserError("there is no such backend", key=key, value=word, instead=nearest(word, valid))
