"""A control group for every node, which the node's slurmd takes for the root of the tree.

slurmd makes cgroups named after its node whatever the settings, so two clusters that both have a `node1` must not see
each other's. With a tree of its own per node, `down` also knows what to remove.
"""

import contextlib
import os
import time
from pathlib import Path

from .errors import MiniError
from .procs import checked

V2 = "cgroup2"


def hierarchies():
    """What is mounted here: (`cgroup`, controllers, mount point) of each v1 hierarchy, or the one of v2."""
    known = {line.split()[0] for line in Path("/proc/cgroups").read_text().splitlines()[1:]}
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    v1 = [
        ("cgroup", ",".join(controllers), Path(point))
        for _, point, kind, options, *_ in mounts
        if kind == "cgroup" and (controllers := [word for word in options.split(",") if word in known])
    ]
    # Where both are mounted, v1 has the controllers and v2 belongs to the service manager.
    return v1 or [(kind, "", Path(point)) for _, point, kind, *_ in mounts if kind == V2][:1]


def tree(name):
    """The name of the cluster's directory in every hierarchy."""
    return f"minicluster.{name}"


def create(name, nodes):
    """Make the nodes' groups; returns by node the lines `KIND CONTROLLERS MOUNTPOINT GROUP` for enter.sh."""
    found = hierarchies()
    if not found:
        raise MiniError("cgroup: none is mounted under /sys/fs/cgroup, and slurmd does not start without")
    try:
        for kind, controllers, point in found:
            for directory in (point / tree(name), *(root(point, name, node) for node in nodes)):
                directory.mkdir()
                if kind == V2:
                    delegate(directory.parent)
                elif "cpuset" in controllers:
                    inherit(directory)
        return {node: [line(name, node, *hierarchy) for hierarchy in found] for node in nodes}
    except OSError as error:
        raise MiniError(f"cgroup: {error}; in a container, start that with --privileged") from None


def root(point, name, node):
    """The group that the node takes for the root."""
    return point / tree(name) / node


def line(name, node, kind, controllers, point):
    """How a process gets into the node's groups."""
    group = root(point, name, node)
    if kind == V2:
        # v2 gives controllers only to children of a group without processes, and Slurm gives them to the root's.
        group = group / "system.slice" / "slurmd.service"
        group.mkdir(parents=True)
    return f"{kind} {controllers or '-'} {point} {group}"


def pin(name, node, file):
    """Make the node's cgroup namespace, in which its groups are the roots; it lasts as long as `file`."""
    file.touch()
    joins = [f"echo $$ >{root(point, name, node)}/cgroup.procs" for _, _, point in hierarchies()]
    checked(["/bin/sh", "-c", " && ".join([*joins, f"exec unshare --cgroup={file} true"])])


def delegate(parent):
    """v2: let the children of a group use the controllers that Slurm can constrain, as far as this machine allows."""
    for controller in ("cpuset", "cpu", "memory", "pids"):
        with contextlib.suppress(OSError):
            (parent / "cgroup.subtree_control").write_text(f"+{controller}")


def inherit(directory):
    """v1: a new cpuset is empty, and takes no process before it has processors and memory nodes."""
    for key in ("cpuset.cpus", "cpuset.mems"):
        (directory / key).write_text((directory.parent / key).read_text())


def groups(name):
    """Every group of the cluster, innermost first."""
    tops = [point / tree(name) for _, _, point in hierarchies()]
    return [path for top in tops if top.is_dir() for path in [*sorted(directories(top), reverse=True), top]]


def directories(top):
    """Every directory under `top`."""
    return [Path(path) for path, _, _ in os.walk(top) if path != str(top)]


def thaw(name):
    """Wake frozen processes: v1 keeps even SIGKILL from them."""
    for group in groups(name):
        state = group / "freezer.state"
        if state.exists():
            state.write_text("THAWED")


def remove(name, seconds=3):
    """Remove the cluster's groups, which no live process is in any more."""
    deadline = time.monotonic() + seconds
    while left := groups(name):
        for group in left:
            # A group stays busy for an instant after its last process has died.
            with contextlib.suppress(OSError):
                group.rmdir()
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
