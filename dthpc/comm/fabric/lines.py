"""What all readers of network texts share: lines as a shell showed them, addresses, settings."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from dthpc.comm.fabric.model import IfAddress, IPAddress
from dthpc.placement.read.text import clean

NAME = r"[A-Za-z_][\w.+-]{0,31}"
"""An interface's name as Linux allows it, less what no driver or tool makes."""

_DECORATION = re.compile(r"^[ \t]*(?:(?://+|#+|\*+|>+|;+|`+|\|)[ \t]*)*")
_HIDDEN = re.compile(
    r"(?:[\w*#?]{1,4}|<\w+>)(?:\.(?:[\w*#?]{1,4}|<\w+>)){3}|<[\w -]*(?:ip|addr)[\w -]*>|"
    r"[\[<]?(?:redacted|masked)[\]>]?",
    re.I,
)
_ELLIPSIS = re.compile(r"^\W*(?:\.{3,}|…|\[\.\.\.\]|\(?(?:snip|cut|truncated|omitted)\b.*)\W*$", re.I)
_VARIABLE = r"(?:NCCL|RCCL|GLOO|TP|UCX|FI|MPICH|OMPI_MCA|PRTE_MCA|MPIR_CVAR|OFI_NCCL|MASTER)_[A-Z0-9_a-z]+"
_SETTING = re.compile(
    rf"""(?<![\w$])({_VARIABLE})\b["'\]]*(?:[ \t]*=[ \t]*|:[ \t]+)"""
    r"""(?:"([^"\n]*)"|'([^'\n]*)'|([^\s;"'`,|&)]+(?:,[^\s;"'`|&)]+)*))"""
)
_LOGGED = re.compile(rf"\b({_VARIABLE}) (?:is )?set (?:by environment )?to ['\"]?([^\s'\"]+?)['\"]?\.?(?:\s|$)")
_LISTED = re.compile(rf"\bname:[ \t]*[\"']?({_VARIABLE})[\"']?[ \t]*\n[\s#-]*value:[ \t]*[\"']?([^\s\"']+)")


def plain_lines(text: str) -> list[str]:
    """Lines without colours, marks of comments and quotation, and indents; `\\` of one-line output splits them."""
    text = re.sub(r"\\[ \t]+", "\n", clean(text))
    return [_DECORATION.sub("", line).rstrip(" \t`") for line in text.split("\n")]


def is_gap(line: str) -> bool:
    """Whether a line stands for others that were left out (`...`)."""
    return bool(_ELLIPSIS.match(line))


def address(text: str, prefix: int | str | None = None, label: str | None = None) -> IfAddress | None:
    """An address with its prefix (`10.0.0.1/24`, or with a netmask apart, decimal or hexadecimal); `None`: none."""
    text, _, told = text.strip().partition("/")
    try:
        ip = ipaddress.ip_address(text.split("%")[0])
        length = told or prefix
        return IfAddress(ip, None if length in (None, "") else _length(ip, str(length)), label)
    except ValueError:
        return None


def is_hidden(text: str) -> bool:
    """Whether a word stands for an address that was blotted out before it was shown: `10.x.x.12`, `*.*.*.*`."""
    host = text.partition("/")[0]
    return bool(_HIDDEN.fullmatch(host)) and not re.fullmatch(r"[\d.]+", host)


def _length(ip: IPAddress, text: str) -> int:
    if text.startswith("0x"):
        text = str(ipaddress.IPv4Address(int(text, 16)))
    if text.isdigit() and int(text) <= ip.max_prefixlen:
        return int(text)
    return ipaddress.ip_network(f"{'::' if ip.version == 6 else '0.0.0.0'}/{text}").prefixlen


def settings_of(text: str) -> dict[str, str]:
    """Environment variables of communication libraries that a text sets, in a shell, a table or a log."""
    return settings_in(clean(text))


def settings_in(text: str) -> dict[str, str]:
    """The same of a text that is clean already."""
    return {name: value for name, value in _pairs(text) if "$" not in value} if "_" in text else {}


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for match in _LISTED.finditer(text):
        yield match[1], match[2]
    for match in _LOGGED.finditer(text):
        yield match[1], match[2]
    for match in _SETTING.finditer(text):
        yield match[1], next(value for value in match.groups()[1:] if value is not None)
