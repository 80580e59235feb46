"""Putting a placement into force: what a rank's environment, CPU mask and memory policy are to be, and setting them.

`settings_of` is pure and tells; `apply_settings` does, in the rank, before torch or any pool of threads is there:
threads and processes that start later inherit all of it. What the user exported stays and is reported.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dthpc.placement import kernel
from dthpc.placement.cpuset import CpuSet, format_cpus, format_mask, parse_cpus
from dthpc.placement.plan.places import NicChoice, NodePlan, RankPlace, Unit
from dthpc.placement.plan.wanted import MEMORY, OMP_BIND, demand
from dthpc.placement.topology import bus_id

HELPER_CPUS = "DTHPC_HELPER_CPUS"
"""Environment variable with the CPUs of a rank's data loading and communication threads."""


@dataclass(frozen=True)
class Settings:
    """What one rank is to run with."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables to set; none that the user exported."""

    kept: Mapping[str, str] = field(default_factory=dict)
    """Variables that the user exported, with what the placement would have set."""

    affinity: CpuSet | None = None
    """CPUs to run on; `None`: as they are."""

    memory: tuple[int, ...] | None = None
    """Memory nodes to take pages from; `None`: no policy."""

    strict_memory: bool = False
    """Whether pages may come from no other node, rather than end with an error."""

    def to_json(self) -> dict[str, Any]:
        """Plain values for the run's records."""
        return {
            "environment": dict(self.environment),
            "kept": dict(self.kept),
            "affinity": None if self.affinity is None else format_cpus(self.affinity),
            "memory": None if self.memory is None else list(self.memory),
            "strict_memory": self.strict_memory,
        }


def settings_of(
    plan: NodePlan,
    local_rank: int,
    env: Mapping[str, str],
    *,
    threads: int | None = None,
    bind: bool = True,
    memory: str = "prefer",
    omp_bind: str = "false",
) -> Settings:
    """What a rank of a planned node runs with.

    Args:
        plan: of its node.
        local_rank: its number there.
        env: the environment that it starts with.
        threads: numeric threads; as many as the CPUs it computes on if `None`.
        bind: whether CPUs and memory are bound here; not where `srun` does it.
        memory: one of `MEMORY`.
        omp_bind: one of `OMP_BIND`. Anything but `false` binds the main thread to one core, which every thread and
            process that it starts then inherits, data loaders among them.

    Raises:
        UserError: a policy is none of these.
    """
    demand("placement.memory", memory, MEMORY)
    demand("placement.omp_bind", omp_bind, OMP_BIND)
    place = plan.places[local_rank]
    wanted = {
        **_visibility(place.units, env),
        **_threads(place, threads, omp_bind),
        **_fabric(plan, place),
    }
    narrowed = {name for name in wanted if name in _VISIBLE}
    kept = {n: v for n, v in wanted.items() if env.get(n) not in (None, "", v) and n not in narrowed}
    bound = bind and place.cpus is not None
    return Settings(
        environment={name: value for name, value in wanted.items() if name not in kept},
        kept=kept,
        affinity=place.cpus if bound else None,
        memory=place.memory if bind and memory != "none" else None,
        strict_memory=memory == "bind",
    )


def apply_settings(settings: Settings, environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """Set all of it for this process, every thread that it has by now included.

    Returns:
        What could not be set, one sentence each; the rest holds.
    """
    environ.update(settings.environment)
    problems = []
    if settings.affinity is not None:
        try:
            _bind_threads(settings.affinity)
        except OSError as error:
            cpus = format_cpus(settings.affinity)
            may = format_cpus(os.sched_getaffinity(0))
            problems.append(f"CPUs {cpus} can't be bound to ({error.strerror}); this process runs on {may}")
    if settings.memory:
        try:
            kernel.set_memory_policy(kernel.BIND if settings.strict_memory else kernel.PREFERRED, settings.memory)
        except OSError as error:
            nodes = ", ".join(map(str, settings.memory))
            problems.append(f"memory node {nodes} can't be set as the memory policy ({error.strerror})")
    return problems


def bind_helper(env: Mapping[str, str] = os.environ) -> None:
    """Move the calling thread (or worker process) to the rank's helper CPUs; nothing where it has none.

    For the start of threads and processes that load data or communicate.
    """
    text = env.get(HELPER_CPUS)
    if text:
        # A helper on the wrong core is slower, never wrong.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, parse_cpus(text, HELPER_CPUS))


def srun_binding(plan: NodePlan, memory: str = "prefer") -> list[str]:
    """The options of `srun` that bind the ranks of nodes that the step owns whole and that are all alike.

    Args:
        plan: of each of the nodes.
        memory: one of `MEMORY`.
    """
    if any(place.cpus is None for place in plan.places):
        return []
    options = ["--cpu-bind=mask_cpu:" + ",".join(format_mask(place.cpus or ()) for place in plan.places)]
    nodes = [place.memory for place in plan.places]
    if memory != "none" and all(nodes):
        masks = ",".join(format_mask(each or ()) for each in nodes)
        options.append(f"--mem-bind={'prefer,' if memory == 'prefer' else ''}mask_mem:{masks}")
    return options


def _bind_threads(cpus: CpuSet) -> None:
    os.sched_setaffinity(0, cpus)
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cpus)


_AFTER_ROCR = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
"""What HIP and ROCm's OpenCL read too, counting within what `ROCR_VISIBLE_DEVICES` left (ROCm documentation, "GPU
isolation techniques"): a number from before it was narrowed would name a GPU that is no longer there."""

_VISIBLE = {"ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", *_AFTER_ROCR}
"""What restricts GPUs, by whomever set: units were chosen within it, so that it is narrowed further."""


def _visibility(units: tuple[Unit, ...], env: Mapping[str, str]) -> dict[str, str]:
    if not units:
        return {}
    vendor = units[0].gpu.vendor or "nvidia"
    names = [_device_name(unit) for unit in units]
    if None in names:
        return {}
    value = ",".join(name for name in names if name is not None)
    if vendor == "amd":
        within = ",".join(map(str, range(len(names))))
        return {"ROCR_VISIBLE_DEVICES": value, **{name: within for name in _AFTER_ROCR if env.get(name)}}
    if vendor == "intel":
        return {"ZE_AFFINITY_MASK": value}
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if value[:1].isdigit() else {}
    return {"CUDA_VISIBLE_DEVICES": value, **order}


def _device_name(unit: Unit) -> str | None:
    gpu, part = unit.gpu, unit.part
    if part is not None and part.kind == "mig":
        return part.uuid
    index = None if gpu.index is None else str(gpu.index)
    if part is not None:
        return index and f"{index}.{part.index}"
    # A UUID means the same GPU whatever numbering is in force; AMD's and Intel's variables take numbers.
    return gpu.uuid if gpu.uuid and gpu.vendor in (None, "nvidia") else index


def _threads(place: RankPlace, threads: int | None, omp_bind: str) -> dict[str, str]:
    found: dict[str, str] = {"OMP_PROC_BIND": omp_bind}
    if place.compute is not None or threads is not None:
        found["OMP_NUM_THREADS"] = str(threads or place.compute_cores)
    if omp_bind != "false" and place.compute:
        found["OMP_PLACES"] = ",".join(f"{{{cpu}}}" for cpu in sorted(place.compute))
    if place.helpers:
        found[HELPER_CPUS] = format_cpus(place.helpers)
    return found


def _fabric(plan: NodePlan, place: RankPlace) -> dict[str, str]:
    choices = [choice for choice in place.nics if _is_name(choice.nic.name)]
    if not choices or len(choices) < len(place.nics):
        return {}
    kinds = {choice.nic.kind for choice in choices}
    if kinds == {"slingshot"}:
        return _cray_nics(plan)
    found = {}
    if kinds <= {"infiniband", "roce", None} and all(choice.nic.rdma is not False for choice in choices):
        found["NCCL_IB_HCA"] = "=" + ",".join(_hca(choice, "") for choice in choices)
        found["UCX_NET_DEVICES"] = ",".join(_hca(choice, ":1") for choice in choices)
    return found


def _hca(choice: NicChoice, without_ports: str) -> str:
    name = choice.nic.name
    return ",".join(f"{name}:{port}" for port in choice.ports) or f"{name}{without_ports}"


def _is_name(name: str) -> bool:
    """Whether software knows the NIC by it: `NIC0` and bus ids are only names in a text."""
    return not re.fullmatch(r"NIC\d+", name) and bus_id(name) is None


def _cray_nics(plan: NodePlan) -> dict[str, str]:
    """Cray MPICH's map from NICs to local ranks; it numbers NICs as their interfaces. Where places do not tell the
    ranks, it takes the NIC of the memory node that a rank runs on."""
    if plan.by_gpu:
        return {"MPICH_OFI_NIC_POLICY": "NUMA"}
    ranks: dict[int, list[int]] = {}
    for place in plan.places:
        for choice in place.nics[:1]:
            number = re.fullmatch(r"(?:hsn|cxi)(\d+)", choice.nic.name)
            if number is None:
                return {"MPICH_OFI_NIC_POLICY": "NUMA"}
            ranks.setdefault(int(number[1]), []).append(place.local_rank)
    mapping = ";".join(f"{nic}:{format_cpus(held)}" for nic, held in sorted(ranks.items()))
    return {"MPICH_OFI_NIC_POLICY": "USER", "MPICH_OFI_NIC_MAPPING": mapping}
