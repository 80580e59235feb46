"""What this machine must offer: root, the distribution's packages, and a place for state."""

import contextlib
import fcntl
import os
import shutil
import subprocess
import time
from pathlib import Path

from .errors import MiniError
from .procs import search_path

STATE_ROOT = Path("/run/dthpc-minicluster")
POLICY = Path("/usr/sbin/policy-rc.d")
POLICY_MARK = "# temporary, by minicluster install: newly installed daemons must not start"

# Program (or plugin) → the Debian package that has it.
PACKAGES = {
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "sbatch": "slurm-wlm",
    "munged": "munge",
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "mount": "mount",
}
ACCOUNTING_PACKAGES = {
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
    "accounting_storage_mysql.so": "slurm-wlm-mysql-plugin",
}


def find(program):
    """The full path of a program or Slurm plugin, or None."""
    if program.endswith(".so"):
        patterns = ("lib/*/slurm*", "lib/slurm*", "lib64/slurm*", "local/lib/slurm*")
        found = (path for pattern in patterns for path in Path("/usr").glob(f"{pattern}/{program}"))
        return next((str(path) for path in found), None)
    return shutil.which(program, path=search_path())


def missing_packages(accounting=True):
    """The packages whose programs are not on this machine."""
    wanted = {**PACKAGES, **(ACCOUNTING_PACKAGES if accounting else {})}
    return sorted({package for program, package in wanted.items() if not find(program)})


def require(accounting=True):
    """Refuse in one message when this machine cannot host a cluster."""
    problems, remedies = [], []
    if missing := missing_packages(accounting):
        problems.append(f"packages {', '.join(missing)} are missing")
        remedies.append("slurm/minicluster install")
    if os.geteuid() != 0:
        problems.append("root is needed, for network namespaces and mounts")
    if problems:
        sudo = "sudo " if os.geteuid() else ""
        command = " && ".join(f"{sudo}{word}" for word in [*remedies, "slurm/minicluster up"])
        raise MiniError(f"cannot start a cluster here: {'; '.join(problems)}. Type: {command}")


def require_root(verb):
    """Refuse a verb that enters namespaces or ends processes."""
    if os.geteuid() != 0:
        raise MiniError(f"{verb}: needs root, for the cluster's namespaces. Type: sudo slurm/minicluster {verb} …")


def slurm_version():
    """Slurm's version as a tuple, (22, 5)."""
    words = subprocess.run([find("slurmctld"), "-V"], capture_output=True, text=True).stdout.split()
    major, minor = words[1].split(".")[:2]
    return int(major), int(minor)


def install(say):
    """Install what is missing, starting no service; does nothing when nothing is."""
    missing = missing_packages()
    names = ", ".join(missing)
    if not missing:
        say("everything is installed already")
        return
    if os.geteuid() != 0:
        raise MiniError(f"install: {names} are missing, and that needs root. Type: sudo slurm/minicluster install")
    if not shutil.which("apt-get"):
        raise MiniError(f"install: there is no apt-get; install what matches {names} with this system's own tools")
    units = {"munge", "slurmctld", "slurmd", "slurmdbd", "mariadb"} if shutil.which("systemctl") else set()
    fresh = [unit for unit in sorted(units) if not Path(f"/lib/systemd/system/{unit}.service").exists()]
    with services_held_back():
        apt("update")
        apt("install", "-y", "--no-install-recommends", *missing)
    for unit in fresh:
        # The packages enable their services for the next boot; the cluster starts its own daemons.
        subprocess.run(["systemctl", "disable", unit], capture_output=True)
    if still := missing_packages():
        raise MiniError(f"install: apt-get succeeded, but programs of {', '.join(still)} are still not found")
    say(f"installed {names}")


def apt(*words):
    """Run apt-get without questions."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    if subprocess.run(["apt-get", "-q", *words], env=environment).returncode:
        raise MiniError(f"apt-get {' '.join(words)}: failed, see its output above")


@contextlib.contextmanager
def services_held_back():
    """While this holds, Debian's packages start no service; a policy that the machine has already stays in force."""
    ours = not POLICY.exists() or POLICY_MARK in POLICY.read_text()
    if ours:
        POLICY.write_text(f"#!/bin/sh\n{POLICY_MARK}\nexit 101\n")
        POLICY.chmod(0o755)
    try:
        yield
    finally:
        if ours:
            POLICY.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(name, action, seconds=0.0):
    """Hold the lock `name` for `action`; gives its descriptor, with which children hold the lock until they end."""
    STATE_ROOT.mkdir(mode=0o755, exist_ok=True)
    path, deadline = STATE_ROOT / f"{name}.lock", time.monotonic() + seconds
    while (file := try_lock(path)) is None:
        if time.monotonic() > deadline:
            holder = path.read_text().strip() if path.exists() else "another command"
            raise MiniError(f"{action}: cluster '{name}' is busy with `{holder}`; wait for it to end")
        time.sleep(0.05)
    with file:
        file.write(f"{action}, pid {os.getpid()}")
        file.flush()
        try:
            yield file.fileno()
        finally:
            # While the lock is held: whoever waits on this file sees that it is no longer the one at `path`.
            path.unlink(missing_ok=True)


def try_lock(path):
    """The locked, emptied file, or None while somebody else holds it."""
    file = open(path, "a+")  # noqa: SIM115 - it stays open as long as the lock is held
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
            file.truncate(0)
            return file
    except BlockingIOError:
        pass
    file.close()
    return None
