"""`nvidia-smi -L` (GPUs and MIG instances), `nvidia-smi -q -x` (XML), and `nvidia-smi --query-gpu=… --format=csv`."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from xml.etree import ElementTree

from dthpc.placement.read.text import clean, refuse
from dthpc.placement.topology import Gpu, GpuPart, Source, Topology, bus_id

KIND_LIST = "nvidia-smi -L"
KIND_QUERY = "nvidia-smi -q -x"
KIND_CSV = "nvidia-smi csv"

_GPU = re.compile(r"^\s*GPU (\d+): ([^\n(]*?)\s*(?:\(UUID: ([^)\n]*)\)?)?\s*$", re.M)
_MIG = re.compile(r"^\s*MIG (\S+)\s+Device\s+(\d+):\s*\(UUID:\s*(MIG-[^)\s]+)\)", re.M)


def read_nvidia_list(text: str, where: str = "nvidia-smi -L") -> Topology:
    """The GPUs and their MIG instances.

    Raises:
        UserError: no GPU is listed.
    """
    text = clean(text)
    heads = list(_GPU.finditer(text))
    if not heads:
        raise refuse(where, "the text lists no GPU", text[:80], "save the output of `nvidia-smi -L`")
    ends = [*(match.start() for match in heads[1:]), len(text)]
    gpus, notes = [], []
    for match, end in zip(heads, ends, strict=True):
        body = text[match.end() : end]
        parts = tuple(GpuPart("mig", int(place), uuid, profile) for profile, place, uuid in _MIG.findall(body))
        if len(re.findall(r"^\s*MIG \S+\s+Device", body, re.M)) != len(parts):
            notes.append(f"an instance of GPU {match[1]} is cut, and is left out")
        gpus.append(_gpu(int(match[1]), uuid=match[3], model=match[2], parts=parts))
    gpus = _each_once(gpus, where)
    return Topology(
        gpus=tuple(gpus), complete=not notes, sources=(Source(KIND_LIST, where, ("gpus",)),), notes=tuple(notes)
    )


def _each_once(gpus: list[Gpu], where: str) -> list[Gpu]:
    """The GPUs without repetitions, as of a text that was pasted twice.

    Raises:
        UserError: one stands there twice and differs.
    """
    found: dict[str, Gpu] = {}
    for gpu in gpus:
        if found.setdefault(gpu.key, gpu) != gpu:
            raise refuse(where, f"{gpu.key} stands there twice and differs", gpu.key, "give the output of one node")
    return list(found.values())


def read_nvidia_query(text: str, where: str = "nvidia-smi -q -x") -> Topology:
    """The GPUs of nvidia-smi's XML, which lists them by bus id, as its numbers do.

    Raises:
        UserError: the XML is cut, or lists no GPU.
    """
    try:
        root = ElementTree.fromstring(clean(text).strip())
    except ElementTree.ParseError as error:
        raise refuse(where, f"the XML is cut or damaged ({error})", text[-80:], "save `nvidia-smi -q -x`") from error
    gpus = tuple(_queried(place, element) for place, element in enumerate(root.findall("gpu")))
    if not gpus:
        raise refuse(where, "the XML lists no GPU", text[:80], "save `nvidia-smi -q -x` on a node with GPUs")
    return Topology(gpus=gpus, sources=(Source(KIND_QUERY, where, ("gpus",)),))


def read_nvidia_csv(text: str, where: str = "nvidia-smi --query-gpu") -> Topology:
    """The GPUs of a query that has at least `index` or `pci.bus_id`, with its header.

    Raises:
        UserError: the header has neither, or a row has another number of cells.
    """
    lines = list(csv.reader(io.StringIO(clean(text).strip()), skipinitialspace=True))
    titles = [title.split(" [")[0].strip() for title in lines[0]] if lines else []
    if not {"index", "pci.bus_id", "gpu_bus_id"} & set(titles):
        advice = "use `nvidia-smi --query-gpu=index,pci.bus_id,uuid,name --format=csv`"
        raise refuse(where, "the header has neither index nor pci.bus_id", ", ".join(titles), advice)
    gpus = []
    for cells in (cells for cells in lines[1:] if cells):
        if len(cells) != len(titles):
            raise refuse(where, "a row has another number of cells than the header", ", ".join(cells), "save it again")
        known = dict(zip(titles, cells, strict=True))
        number = known.get("index", "")
        memory = re.match(r"(\d+) MiB", known.get("memory.total", ""))
        gpus.append(
            _gpu(
                int(number) if number.isdigit() else None,
                address=known.get("pci.bus_id") or known.get("gpu_bus_id"),
                uuid=known.get("uuid") or known.get("gpu_uuid"),
                model=known.get("name") or known.get("gpu_name"),
                memory_bytes=int(memory[1]) * 2**20 if memory else None,
            )
        )
    return Topology(gpus=tuple(gpus), sources=(Source(KIND_CSV, where, ("gpus",)),))


def _gpu(
    number: int | None,
    *,
    address: str | None = None,
    uuid: str | None = None,
    model: str | None = None,
    memory_bytes: int | None = None,
    parts: tuple[GpuPart, ...] | None = None,
) -> Gpu:
    place = bus_id(address) if address else None
    return Gpu(
        key=(place or "") if number is None else f"GPU{number}",
        index=number,
        bus_id=place,
        uuid=uuid or None,
        vendor="nvidia",
        model=model or None,
        compute=True,
        memory_bytes=memory_bytes,
        parts=parts,
    )


def _queried(place: int, element: ElementTree.Element) -> Gpu:
    parts = tuple(_instances(element))
    memory = re.match(r"(\d+) MiB", element.findtext("fb_memory_usage/total", ""))
    enabled = element.findtext("mig_mode/current_mig", "N/A")
    return _gpu(
        place,
        address=element.findtext("pci/pci_bus_id") or element.get("id"),
        uuid=element.findtext("uuid"),
        model=element.findtext("product_name"),
        memory_bytes=int(memory[1]) * 2**20 if memory else None,
        parts=parts if enabled == "Enabled" or parts else (),
    )


def _instances(element: ElementTree.Element) -> Iterator[GpuPart]:
    for place, instance in enumerate(element.findall("mig_devices/mig_device")):
        index = instance.findtext("index", str(place))
        # nvidia-smi's XML names instances by numbers alone; their UUIDs stand in `nvidia-smi -L`.
        yield GpuPart("mig", int(index) if index.isdigit() else place, instance.findtext("uuid"))
