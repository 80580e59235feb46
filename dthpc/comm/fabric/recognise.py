"""What a recorded text tells of a network, whatever kind of text it is."""

from __future__ import annotations

import html
import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from dthpc.comm.fabric.lines import settings_of
from dthpc.comm.fabric.model import NodeNetwork
from dthpc.comm.fabric.read_devices import looks_like_devices, of_topology, read_devices
from dthpc.comm.fabric.read_facts import hosts_notes, read_facts
from dthpc.comm.fabric.read_ifconfig import looks_like_ifconfig, read_ifconfig
from dthpc.comm.fabric.read_ip import looks_like_ip, read_ip
from dthpc.comm.fabric.read_log import looks_like_log, read_log
from dthpc.comm.fabric.read_tables import looks_like_table, read_tables
from dthpc.errors import UserError
from dthpc.placement.read.recognise import LARGEST, read_path
from dthpc.placement.read.text import clean, refuse, without_endless_lines

_PROMPT = re.compile(
    r"^[ \t]*(?:\([^)\n]*\)[ \t]*)?\[?(?:[\w.-]+@)?([A-Za-z][\w-]*)[^\n]{0,60}?[$#>%][ \t]+"
    r"(?:sudo )?(?:/\S*/)?(?:ip|ifconfig|ibdev2netdev|ibstat|route)\b[^\n]*$",
    re.M,
)
_TYPED = re.compile(r"^[ \t]*(?:[^\n{}\[\]]|\[[^\n{}\[\]]*\]){0,80}?[$#>%][ \t]+(?:sudo )?(?:/\S*/)?ip[ \t]+-[^\n]*$")
"""A prompt with a command of iproute2 that prints JSON, among other forms."""

_HEADING = re.compile(
    r"^[ \t]*[*#=>_-]*[ \t]*((?:\w+[ -])?(?:node|host|machine|server|master|worker|head)[ _-]?\w{0,12})"
    r"(?:[ \t]*\([^)\n]*\))?[ \t]*(?::|\*\*|=|-)[*#=_ :-]*$",
    re.M | re.I,
)
"""A line that says whose network follows: `node1:`, `**master:**`, `== host 2 ==`."""

_HOSTS = re.compile(r"^[ \t]*(?:127\.\d+\.\d+\.\d+|::1)[ \t]+[A-Za-z]", re.M)
_INSTEAD = (
    "give the output of ip addr, ip -j addr, ifconfig, ibdev2netdev, ibstat, a log of NCCL (NCCL_DEBUG=INFO), "
    "settings as NAME=VALUE, or a JSON object of interfaces"
)


def from_text(text: str, name: str) -> list[NodeNetwork]:
    """The nodes that a text tells of: one, unless it is a log or an object of several, or shows several prompts.

    Args:
        text: output of `ip`, `ifconfig`, `ibstat`, `ibv_devinfo`, `ibdev2netdev`, `cxi_stat`, `fi_info`, a log of NCCL
            or Gloo, settings, or JSON.
        name: of the node where the text has none.

    Raises:
        UserError: nothing is recognised.
    """
    if "&lt;" in text:
        text = html.unescape(text)
    value = _json(text)
    if value is not None:
        return read_facts(value, name)
    if entries := _whole_entries(text):
        note = "the text is cut within an entry"
        return [replace(node, complete=False, notes=(*node.notes, note)) for node in read_facts(entries, name)]
    if printed := _below_prompts(text):
        return [node for value in printed for node in read_facts(value, name)]
    shorter = without_endless_lines(clean(text))
    sections = list(_sections(shorter, name))
    found: dict[str, NodeNetwork] = {}
    for host, part in sections:
        for node in _read(part, host):
            found[node.name] = found[node.name].merged(node) if node.name in found else node
    if not found:
        raise refuse(name, "the text tells of no network", "\n".join(text.strip().split("\n")[:2]), _INSTEAD)
    return list(found.values())


def from_path(path: Path) -> list[NodeNetwork]:
    """The nodes of a file of any such kind; of a directory or archive with a recording of `/sys`, its devices.

    Raises:
        UserError: it can't be opened, or nothing is recognised.
    """
    try:
        if path.is_file() and path.stat().st_size > LARGEST and not tarfile.is_tarfile(path):
            raise refuse(str(path), f"a text of more than {LARGEST >> 20} MiB tells of no network", "", _INSTEAD)
        content = path.read_bytes() if path.is_file() else None
    except OSError as error:
        raise refuse(str(path), f"the file cannot be read ({error.strerror})", "", "give the path of a file") from error
    wide = content is not None and content.startswith((b"\xff\xfe", b"\xfe\xff"))  # as Windows' shells redirect
    if content is None or (b"\0" in content[:4096] and not wide):
        if content is not None and not tarfile.is_tarfile(path):
            raise refuse(str(path), "the file is neither a text nor an archive of /sys", "", _INSTEAD)
        return [of_topology(read_path(path), path.name)]
    text = content.decode("utf-16" if wide else "utf-8", errors="replace")
    if text.lstrip().startswith("<"):
        return [of_topology(read_path(path), path.name)]
    return from_text(text, path.name)


def _json(text: str) -> object:
    stripped = clean(text).strip().strip("`").removeprefix("json").strip()
    if stripped[:1] not in ("{", "["):
        return None
    try:
        return json.loads(stripped)
    except (ValueError, RecursionError):
        return None


def _below_prompts(text: str) -> list[object]:
    """JSON that commands printed below the lines on which they were typed; none where there are other lines too."""
    if "ip -" not in text:
        return []
    lines = clean(text).split("\n")
    typed = [bool(_TYPED.match(line)) for line in lines]
    if not any(typed):
        return []
    printed = "\n".join("\f" if prompt else line for prompt, line in zip(typed, lines, strict=True)).split("\f")
    values = [_json(part) for part in printed if part.strip()]
    return [] if any(value is None for value in values) else values


def _whole_entries(text: str) -> list[object]:
    """The objects at the beginning of a JSON list that is cut within a later one."""
    text = clean(text).strip().strip("`").removeprefix("json").strip()
    found: list[object] = []
    place = 1
    while text.startswith("[") and (begin := re.compile(r"[\s,]*(?=\{)").match(text, place)):
        try:
            entry, place = json.JSONDecoder().raw_decode(text, begin.end())
        except (ValueError, RecursionError):
            break
        found.append(entry)
    return found


def _sections(text: str, name: str) -> Iterator[tuple[str, str]]:
    """The text, or its parts where prompts or headings of several hosts show whose they are."""
    prompts = list(_PROMPT.finditer(text))
    if len({prompt[1] for prompt in prompts}) < 2:
        prompts = list(_HEADING.finditer(text))
    if len({prompt[1] for prompt in prompts}) < 2:
        yield name, text
        return
    ends = [*(prompt.start() for prompt in prompts[1:]), len(text)]
    for prompt, end in zip(prompts, ends, strict=True):
        yield prompt[1], text[prompt.end() : end]


def _read(text: str, name: str) -> Iterator[NodeNetwork]:
    interfaces = None
    if looks_like_ifconfig(text):
        interfaces = read_ifconfig(text, name)
    elif looks_like_ip(text):
        interfaces = read_ip(text, name)
    elif looks_like_table(text):
        interfaces = read_tables(text, name)
    devices = read_devices(text, name) if looks_like_devices(text) else None
    if interfaces or devices:
        found = interfaces.merged(devices) if interfaces and devices else interfaces or devices
        assert found is not None
        yield replace(found, settings={**found.settings, **settings_of(text)})
    elif looks_like_log(text):
        yield from read_log(text, name)
    elif settings := settings_of(text):
        yield NodeNetwork(name, settings=settings, complete=False, notes=("no interfaces are listed",))
    elif _HOSTS.search(text):
        yield NodeNetwork(name, complete=False, notes=(*hosts_notes(text), "no interfaces are listed"))


def must_tell(nodes: list[NodeNetwork]) -> None:
    """Refuse nodes of which nothing at all is known.

    Raises:
        UserError: there are none.
    """
    if not nodes:
        raise UserError("there is no node to decide for", key="--network", instead=_INSTEAD)
