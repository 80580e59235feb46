"""What Slurm knows of a node: `scontrol show node`, `slurmd -C`, and the lines of gres.conf and `slurmd -G`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dthpc.errors import UserError
from dthpc.placement.read.text import clean, refuse
from dthpc.placement.topology import Counts, Gpu, Link, Source, Topology
from dthpc.slurm.hostlist import expand
from dthpc.slurm.records import NodeRecord, parse_nodes
from dthpc.slurm.units import gpus_of_gres, parse_gres

KIND = "slurm node"
KIND_GRES = "slurm gres"
KIND_SLURMD = "slurmd"

_GRES = re.compile(r"^\s*(?:slurmd: )?(?:Gres )?((?:NodeName=\S+\s+)?(?:AutoDetect=\S+\s+)?Name=gpu\b.*)$", re.M | re.I)
_VENDORS = {"nvidia": "nvidia", "dri": "amd", "kfd": "amd"}


def read_slurm_node(text: str, where: str = "scontrol show node") -> Topology:
    """The counts of the first node; Slurm's own numbers of cores and GPUs do not tell which CPUs they are.

    Raises:
        UserError: the text holds no node.
    """
    text = clean(text)
    try:
        nodes = parse_nodes(text)
    except UserError as error:
        raise refuse(where, error.why, text[:80], "save the output of `scontrol show node NAME`") from error
    node = nodes[0]
    same = [other for other in nodes[1:] if _counts(other) == _counts(node)]
    notes = [f"the text holds {len(nodes)} nodes; {node.name} is read"] if len(nodes) > 1 else []
    if len(same) < len(nodes) - 1:
        notes.append("the nodes of the text differ")
    return Topology(
        host=node.name, counts=_counts(node), sources=(Source(KIND, where, ("counts",)),), notes=tuple(notes)
    )


def read_slurmd(text: str, where: str = "slurmd -C") -> Topology:
    """The counts that a node finds for itself (`slurmd -C`), or that slurm.conf gives.

    Raises:
        UserError: the text holds no node.
    """
    values = dict(re.findall(r"\b([A-Za-z]+)=(\S+)", clean(text)))
    if "CPUs" not in values and "CoresPerSocket" not in values:
        raise refuse(where, "there is no line `NodeName=… CPUs=…`", text[:80], "save the output of `slurmd -C`")
    number = {key: int(value) for key, value in values.items() if value.isdigit()}
    sockets = number.get("SocketsPerBoard")
    gpus = gpus_of_gres(parse_gres(values.get("Gres", "")))[0]
    return Topology(
        host=values.get("NodeName"),
        counts=Counts(
            cpus=number.get("CPUs"),
            packages=number.get("Sockets") or (sockets * number.get("Boards", 1) if sockets else None),
            cores_per_package=number.get("CoresPerSocket"),
            threads_per_core=number.get("ThreadsPerCore"),
            gpus=gpus or None,
            memory_bytes=number["RealMemory"] * 2**20 if "RealMemory" in number else None,
        ),
        sources=(Source(KIND_SLURMD, where, ("counts",)),),
    )


def read_gres(text: str, where: str = "gres.conf") -> Topology:
    """The GPUs of gres.conf or of `slurmd -G`, in the order of their files.

    `Cores` counts cores as Slurm does, which is not how Linux numbers CPUs: it is left out, with a note.

    Raises:
        UserError: there is no line of a GPU.
    """
    lines = [dict(re.findall(r"\b([A-Za-z]+)=(\S+)", line)) for line in _GRES.findall(clean(text))]
    if not lines:
        raise refuse(where, "there is no line `Name=gpu …`", text[:80], "give gres.conf, or the output of `slurmd -G`")
    files = [(path, values) for values in lines for path in _paths(values.get("File", ""))]
    counted = sum(int(values.get("Count", "1")) for values in lines if "File" not in values)
    gpus = tuple(_gpu(place, path, values) for place, (path, values) in enumerate(files))
    links = tuple(_links([values.get("Links", "") for _, values in files]))
    notes = (
        ("gres.conf names cores by Slurm's own numbers, which are not read",)
        if any("Cores" in v for v in lines)
        else ()
    )
    return Topology(
        gpus=gpus or None,
        links=links or None,
        counts=Counts(gpus=len(files) + counted),
        sources=(Source(KIND_GRES, where, ("gpus",)),),
        notes=notes,
    )


def _paths(text: str) -> list[str]:
    """`/dev/nvidia[0-3]` as the paths that it stands for."""
    folder, _, name = text.rpartition("/")
    return [f"{folder}/{each}" for each in expand(name)]


def _gpu(place: int, path: str, values: dict[str, str]) -> Gpu:
    vendor = next((vendor for word, vendor in _VENDORS.items() if f"/dev/{word}" in path), None)
    return Gpu(f"GPU{place}", place, vendor=vendor, model=values.get("Type"), compute=True, devices=(path,))


def _links(rows: list[str]) -> Iterator[Link]:
    """`Links=-1,4,4,0`: the number of links to each GPU, in order, -1 at its own place."""
    for a, row in enumerate(rows):
        for b, word in enumerate(row.split(",")):
            if a < b and word.isdigit() and int(word) > 0:
                yield Link(f"GPU{a}", f"GPU{b}", kind="nvlink", lanes=int(word))


def _counts(node: NodeRecord) -> Counts:
    return Counts(
        cpus=node.cpus or None,
        packages=node.sockets or None,
        cores_per_package=node.cores_per_socket or None,
        threads_per_core=node.threads_per_core or None,
        gpus=node.gpus,
        memory_bytes=node.real_memory_mb * 2**20 or None,
    )
