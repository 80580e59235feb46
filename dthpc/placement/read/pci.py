"""What a PCI function is, from its class and maker."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

VENDORS = {"10de": "nvidia", "1002": "amd", "8086": "intel", "1da3": "habana"}

_MELLANOX = "15b3"
_INTEL = "8086"
_CORNELIS = "434e"
_AMAZON = "1d0f"
_CRAY = "17db"

BRIDGE_CLASS = "0604"
IB_STATES = {1: "down", 2: "init", 3: "armed", 4: "active", 5: "active_defer"}
"""States of an InfiniBand port by the number that libibverbs gives them (ibv_port_state)."""


def is_gpu(kind: str, vendor: str, compute: bool = False) -> bool:
    """Whether a function is a GPU that could compute, not the display of a management controller.

    Args:
        kind: PCI class and subclass, four hexadecimal digits, lower case.
        vendor: PCI number of the maker, likewise.
        compute: whether a compute driver showed it.
    """
    if kind[:2] not in ("03", "12"):
        return False
    if compute or vendor in ("10de", "1002", "1da3"):
        return True
    # Intel's data-centre GPUs are display controllers without VGA; what has VGA sits in the processor.
    return vendor == _INTEL and kind == "0380"


def is_nic(kind: str, rdma: Sequence[str], interfaces: Sequence[str]) -> bool:
    """Whether a function is a network adapter that software can use."""
    return bool(rdma) or (bool(interfaces) and kind[:2] in ("02", "0c", "08", "ff"))


def nic_kind(
    kind: str, vendor: str, device: str, rdma: Sequence[str], interfaces: Sequence[str], layers: Iterable[str] = ()
) -> str | None:
    """The kind of an adapter, one of those that `Nic.kind` may hold.

    Args:
        kind: PCI class and subclass.
        vendor: PCI number of the maker.
        device: PCI number of the model.
        rdma: names of its RDMA devices.
        interfaces: names of its network interfaces.
        layers: link layers of its ports, where they are known.
    """
    known = named_kind([*rdma, *interfaces])
    if known is not None:
        return known
    if vendor == _AMAZON:
        return "efa" if device.startswith("efa") else "ethernet"
    if vendor == _CRAY and device == "0501":
        return "slingshot"
    if kind == "0208" or vendor == _CORNELIS:
        return "omnipath"
    layers = {layer.lower() for layer in layers}
    if rdma and len(layers) == 1:
        return "infiniband" if layers == {"infiniband"} else "roce"
    if kind in ("0207", "0c06"):
        return "infiniband"
    if kind[:2] == "02":
        return "roce" if rdma else "ethernet"
    return None


def named_kind(names: Iterable[str]) -> str | None:
    """The kind that a device's name alone tells for certain."""
    for name in names:
        for pattern, kind in _NAMES:
            if re.match(pattern, name):
                return kind
    return None


_NAMES = [
    (r"siw|rxe", "software"),
    (r"usnic_", "usnic"),
    (r"hfi1_|hfi\d+_\d|opa\d", "omnipath"),
    (r"hsn\d|cxi\d", "slingshot"),
    (r"efa_|rdmap\d+s\d+(?:f\d+)?$", "efa"),
    (r"cxgb\d|iw_cxgb|i40iw", "iwarp"),
    (r"rocep|bnxt_re", "roce"),
    (r"ibp\d", "infiniband"),
    (r"qib\d|ib_qib", "infiniband"),
]
