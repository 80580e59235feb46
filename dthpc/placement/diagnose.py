"""What is wrong with a node as its topology shows it, each with the fix; works for a machine one is not on too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from dthpc.placement.cpuset import format_cpus
from dthpc.placement.plan.nics import rate_of
from dthpc.placement.plan.places import NodePlan
from dthpc.placement.plan.units import compute_gpus
from dthpc.placement.problem import Problem, gravest_first
from dthpc.placement.topology import Nic, Topology


def diagnose(topology: Topology, plan: NodePlan | None = None) -> list[Problem]:
    """Problems of a node, the gravest first.

    Args:
        topology: of the node.
        plan: its placement, which tells which GPUs matter.
    """
    found = [
        *_ports(topology),
        *_rates(topology),
        *_far_gpus(topology, plan),
        *_memory(topology),
        *_distances(topology),
        *_gpu_links(topology),
        *_gpu_count(topology),
        *_gpu_locality(topology),
        *_limits(topology),
        *_doubts(topology),
    ]
    return gravest_first(found)


def _ports(topology: Topology) -> Iterator[Problem]:
    for nic in _fabric_like(topology):
        for port in nic.ports or ():
            if port.up is False:
                state = f" ({port.physical})" if port.physical else ""
                name = nic.name if len(nic.ports or ()) == 1 else f"{nic.name} port {port.number}"
                fix = f"check its cable and the switch's port (`ibstat {nic.name}`), or leave the node out"
                others = any(other.up for other in _fabric_like(topology))
                severity = "warning" if others else "error"
                yield Problem(severity, f"{name} is {port.state}{state}", "no rank can send over it", fix)


def _rates(topology: Topology) -> Iterator[Problem]:
    """NICs slower than their like: a link that came up at half its lanes or an older rate."""
    groups: dict[tuple[str | None, str | None], list[Nic]] = {}
    for nic in _fabric_like(topology):
        if nic.up and rate_of(nic):
            groups.setdefault((nic.kind, nic.model), []).append(nic)
    for alike in groups.values():
        rates = {nic.name: rate_of(nic) or 0.0 for nic in alike}
        fastest = max(rates.values())
        for name, rate in rates.items():
            # Half or a quarter is a link that came up wrong; far less is another network's card.
            if fastest / 8 <= rate <= fastest / 2:
                yield Problem(
                    "warning",
                    f"{name} runs at {rate:g} Gbit/s, others of its kind at {fastest:g}",
                    "ranks on it wait for it in every collective",
                    f"reseat or change its cable, and reset the port (`mlxlink -d {name}` shows lanes and errors)",
                )


def _far_gpus(topology: Topology, plan: NodePlan | None) -> Iterator[Problem]:
    nics = [nic for nic in _fabric_like(topology) if nic.up is not False]
    used = {unit.gpu.key for place in plan.places for unit in place.units} if plan is not None else None
    gpus = [gpu for gpu in compute_gpus(topology) if used is None or gpu.key in used]
    levels = {gpu.key: [topology.level(gpu, nic) for nic in nics] for gpu in gpus}
    far = [key for key, found in levels.items() if found and set(found) == {"SYS"}]
    if far:
        yield Problem(
            "warning",
            f"{', '.join(far)} {'is' if len(far) == 1 else 'are'} on another memory node than any NIC",
            "what they send between nodes crosses the processors' interconnect",
            "move the NIC to a slot of that processor, or keep ranks that talk across nodes on the other GPUs",
        )


def _memory(topology: Topology) -> Iterator[Problem]:
    for node in topology.numa or ():
        if node.cpus and node.memory_bytes == 0:
            yield Problem(
                "warning",
                f"memory node {node.index} has CPUs ({format_cpus(node.cpus)}) and no memory",
                "all memory of ranks there is remote",
                "fit memory modules to that processor's channels, or leave its cores out (placement.reserve)",
            )
    sizes = [node.memory_bytes for node in topology.numa or () if node.cpus and node.memory_bytes]
    if sizes and max(sizes) > 1.5 * min(sizes):
        yield Problem(
            "note",
            f"memory nodes differ in size ({min(sizes) / 2**30:.0f} to {max(sizes) / 2**30:.0f} GiB)",
            "ranks on the smaller ones run out of near memory first",
            "check for failed memory modules (`dmidecode -t memory`, `ras-mc-ctl --errors`)",
        )


def _distances(topology: Topology) -> Iterator[Problem]:
    told = {node.index: node.distances or {} for node in topology.numa or ()}
    for a, row in told.items():
        uneven = {b: far for b, far in row.items() if a < b and told.get(b, {}).get(a, far) != far}
        for b, far in list(uneven.items())[:1]:
            yield Problem(
                "note",
                f"memory node {b} is {far} from node {a}, and {told[b][a]} the other way",
                "the firmware's table of distances is not symmetric, and the nearest memory is chosen by it",
                "compare with `cat /sys/devices/system/node/node*/distance`; if it is so there, ask for new firmware",
            )


def _gpu_links(topology: Topology) -> Iterator[Problem]:
    gpus = [gpu.key for gpu in compute_gpus(topology)]
    lanes: dict[str, list[int]] = {key: [] for key in gpus}
    for link in topology.links or ():
        if link.kind == "nvlink" and link.lanes and link.a in lanes and link.b in lanes:
            lanes[link.a].append(link.lanes)
            lanes[link.b].append(link.lanes)
    sums = {key: sum(found) for key, found in lanes.items()}
    usual, count = Counter(sums.values()).most_common(1)[0] if sums else (0, 0)
    few = [key for key, total in sums.items() if total < usual]
    if few and count > len(sums) / 2:
        yield Problem(
            "error",
            f"{', '.join(few)} {'has' if len(few) == 1 else 'have'} fewer NVLinks than the others",
            "every collective runs at the speed of its slowest link",
            "look for inactive links with `nvidia-smi nvlink -s`, then reset the GPU or drain the node",
        )


def _gpu_count(topology: Topology) -> Iterator[Problem]:
    count = len(compute_gpus(topology))
    if topology.complete and count in (3, 7, 15):
        yield Problem(
            "warning",
            f"{count} GPUs",
            "nodes are built with an even number: one may have fallen off the bus",
            "compare with `lspci | grep -i -e nvidia -e amd`, and look for Xid 79 in `dmesg`",
        )


def _gpu_locality(topology: Topology) -> Iterator[Problem]:
    if len(topology.numa or ()) < 2:
        return
    lost = [gpu.key for gpu in compute_gpus(topology) if not gpu.numa and not gpu.cpus]
    if lost:
        yield Problem(
            "note",
            f"of {', '.join(lost)} no memory node is told",
            "ranks get cores without regard to them",
            "enable ACPI SRAT/NUMA in the firmware, or pass the host's topology into the virtual machine",
        )


def _limits(topology: Topology) -> Iterator[Problem]:
    if topology.offline:
        yield Problem(
            "note",
            f"CPUs {format_cpus(topology.offline)} are switched off",
            "no rank can use them",
            "`chcpu -e` switches them on, if it is not on purpose",
        )


def _doubts(topology: Topology) -> Iterator[Problem]:
    for conflict in topology.conflicts:
        yield Problem("warning", str(conflict), "one of the two is wrong", "look at the machine, or leave one text out")
    if not topology.complete:
        yield Problem("warning", "the text was cut", "devices may be missing", "record it again, whole")


def _fabric_like(topology: Topology) -> Sequence[Nic]:
    """NICs that ranks might send over: RDMA devices that are neither software nor virtual."""
    return [
        nic
        for nic in topology.nics or ()
        if nic.rdma is not False and not nic.virtual and nic.kind not in ("software", "iwarp", "usnic", "ethernet")
    ]
