"""The rate of the link that this rank's traffic takes, as the kernel tells it; free of torch."""

from __future__ import annotations

from pathlib import Path

NET = Path("/sys/class/net")


def interface_rate(interface: str | None, net: Path = NET) -> float | None:
    """Gbit/s of a network interface.

    Args:
        interface: its name.
        net: the folder of interfaces.

    Returns:
        None where it is not known, and for devices without hardware (loopback, veth, bridges), whose drivers make
        their rate up.
    """
    if not interface:
        return None
    device = net / interface
    if not (device / "device").exists() and not (device / "bonding").exists():
        return None
    try:
        speed = int((device / "speed").read_text(encoding="ascii"))
    except (OSError, ValueError):  # a link that is down answers with an error
        return None
    return speed / 1000 if speed > 0 else None
