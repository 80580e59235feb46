"""What kind of text a file holds, told from its content, and reading it with the reader of that kind."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable
from pathlib import Path

from dthpc.placement.read import (
    amd_smi,
    hwloc,
    infiniband,
    lscpu,
    nccl_xml,
    numactl,
    nvidia_list,
    nvidia_topo,
    slurm_node,
    sysfs,
)
from dthpc.placement.read.combine import combine
from dthpc.placement.read.text import clean, refuse, without_endless_lines
from dthpc.placement.read.tree import open_tree
from dthpc.placement.read.wrapping import labelled, unwrap
from dthpc.placement.topology import Topology

Reader = Callable[[str, str], Topology]

_XML = {"topology": hwloc.KIND, "system": nccl_xml.KIND, "nvidia_smi_log": nvidia_list.KIND_QUERY}
_SIGNS = [
    (nvidia_topo.KIND, r"^[^\n=]*\b(?:GPU|NPU|DCU)\d+[ \t|]*(?:\x1b\S*)?[ \t|]*X\b"),
    (nvidia_topo.KIND, r"^[^\n=:]{0,200}\bGPU0\b[^\n]*\bCPU Affinity"),
    (amd_smi.KIND, r"^\s*GPU ?\[?\d+\]?\s*:\s*\((?:Topology|XGMI)\)|(?:Weight|Hops|Link Type) between two GPUs"),
    (amd_smi.KIND, r"^\s*GPU\[\d+\]\s*: PCI Bus:"),
    (amd_smi.KIND_AMD, r"^(?:ACCESS|WEIGHT|HOPS|LINK TYPE|NUMA BW) TABLE:|^GPU: \d+\n\s+BDF:"),
    (nvidia_list.KIND_LIST, r"^\s*GPU \d+: [^(\n]+(?:\(UUID:|\n\s*MIG )"),
    (
        nvidia_list.KIND_CSV,
        r"^(?:[\w.]+(?: \[\w+\])?, ?)*(?:index|pci\.bus_id|gpu_bus_id)(?:, ?[\w.]+(?: \[\w+\])?)*\s*$",
    ),
    (lscpu.KIND, r"^\s*NUMA node\d+ CPU\(s\):|^\s*CPU\(s\):\s+\d|^# ?CPU,|^\s*CPU[ \t]+(?:NODE|SOCKET|CORE)\b"),
    (numactl.KIND, r"^\s*node \d+ cpus:"),
    (infiniband.KIND_IBSTAT, r"^\s*CA '[^']+'"),
    (infiniband.KIND_IBSTATUS, r"^Infiniband device '"),
    (infiniband.KIND_DEVINFO, r"^\s*hca_id:"),
    (infiniband.KIND_NETDEV, r"\bport\s+\d+\s*(?:\(\w+\s*\))?\s*==>"),
    (slurm_node.KIND_GRES, r"^\s*(?:slurmd: )?(?:Gres |NodeName=\S+ )?(?:AutoDetect=\S+ )?Name=gpu\b"),
    (slurm_node.KIND, r"^\s*NodeName=\S+ +(?:Arch=|CoresPerSocket=|\S+ .*CPUTot=)"),
    (slurm_node.KIND_SLURMD, r"^\s*NodeName=\S+ .*\bCPUs=\d"),
]
_READERS: dict[str, Reader] = {
    hwloc.KIND: hwloc.read_hwloc,
    nccl_xml.KIND: nccl_xml.read_nccl_xml,
    nvidia_list.KIND_QUERY: nvidia_list.read_nvidia_query,
    nvidia_topo.KIND: nvidia_topo.read_nvidia_topo,
    amd_smi.KIND: amd_smi.read_rocm_smi,
    amd_smi.KIND_AMD: amd_smi.read_amd_smi,
    nvidia_list.KIND_LIST: nvidia_list.read_nvidia_list,
    nvidia_list.KIND_CSV: nvidia_list.read_nvidia_csv,
    lscpu.KIND: lscpu.read_lscpu,
    numactl.KIND: numactl.read_numactl,
    infiniband.KIND_IBSTAT: infiniband.read_ibstat,
    infiniband.KIND_IBSTATUS: infiniband.read_ibstatus,
    infiniband.KIND_DEVINFO: infiniband.read_ibv_devinfo,
    infiniband.KIND_NETDEV: infiniband.read_ibdev2netdev,
    slurm_node.KIND: slurm_node.read_slurm_node,
    slurm_node.KIND_GRES: slurm_node.read_gres,
    slurm_node.KIND_SLURMD: slurm_node.read_slurmd,
}
LARGEST = 64 << 20
"""Bytes; the largest nodes take a few megabytes of XML."""

_INSTEAD = (
    "give the output of lstopo --of xml, nvidia-smi topo -m, rocm-smi --showtopo, lscpu, numactl -H, ibstat, "
    "scontrol show node, a topology file of NCCL, or a recording of /sys"
)


def kinds_of(text: str) -> list[str]:
    """The kinds of outputs in a text, most telling first; none where nothing is recognised."""
    text = clean(text)
    start = text.lstrip()
    if start.startswith("<"):
        tag = re.search(r"<(topology|system|nvidia_smi_log|graphs)\b", start)
        return [_XML[tag[1]]] if tag and tag[1] in _XML else []
    if start.startswith("{"):
        if re.match(r'\{\s*"(?:lscpu|cpus)"\s*:', start):
            return [lscpu.KIND]
        return [amd_smi.KIND] if re.search(r'"\(Topology\)|"PCI Bus"', start) else []
    return list(dict.fromkeys(kind for kind, sign in _SIGNS if re.search(sign, text, re.M)))


def read_text(text: str, where: str) -> Topology:
    """The topology of a text of any known kind; of several kinds in one text, put together.

    Raises:
        UserError: nothing is recognised, or what is recognised cannot be read without guessing.
    """
    whole = text = unwrap(text)
    if not text.lstrip().startswith(("<", "{")):
        text = without_endless_lines(text)
    kinds = kinds_of(text)
    if not kinds:
        text = text if text.strip() else whole[:80]
        raise refuse(where, _why_unknown(text), "\n".join(text.strip().split("\n")[:2]), _INSTEAD)
    return combine([_READERS[kind](text, where) for kind in kinds])


def read_path(path: str | Path) -> Topology:
    """The topology of a file of any known kind, an archive of `/sys`, or a directory with a recording of it.

    Raises:
        UserError: the file cannot be opened, or as `read_text`.
    """
    path = Path(path)
    if path.is_dir() or (path.is_file() and tarfile.is_tarfile(path)):
        return sysfs.read_sysfs(open_tree(path))
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
    except OSError as error:
        raise refuse(str(path), f"the file cannot be read ({error.strerror})", "", "give the path of a file") from error
    if len(content) > LARGEST:
        raise refuse(str(path), f"a text of more than {LARGEST >> 20} MiB tells of no node", "", _INSTEAD)
    if b"\0" in content[:4096] and not content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise refuse(str(path), "the file is neither a text nor an archive of /sys", "", _INSTEAD)
    # Windows' shells write redirected output so.
    code = "utf-16" if content.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8"
    return read_text(content.decode(code, errors="replace"), str(path))


def _why_unknown(text: str) -> str:
    if not text.strip():
        return "the text is empty"
    names = [
        name for name, part in labelled([line for line in text.split("\n") if line.strip()]).items() if kinds_of(part)
    ]
    if len(names) > 1:
        shown = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
        return f"the lines are of several nodes or tasks ({shown}), which say different things: give those of one"
    said = re.search(
        r"command not found|No NUMA available on this system|No devices were found"
        r"|couldn't communicate with the NVIDIA driver|NVML: .*",
        text,
    )
    if said:
        return f"the tool failed: {said.group()}"
    if re.search(r"^\s*(?:Machine|Package) (?:L#\d+ )?\(", text, re.M):
        return "this is lstopo's picture, which leaves much out; its XML is needed"
    if re.search(r"^\w[\w ]* ?:[ \t]+(?:x86_64|aarch64|ppc64le|riscv64|s390x)\s*$", text, re.M):
        return "these are lscpu's words in another language: give the output of LC_ALL=C lscpu"
    return "the text is no output that is known"
