"""CPU time of a dry run on the login node, as a ratio to importing Hydra and submitit alone.

    python benchmarks/login_path.py                                    with the site's Slurm
    slurm/minicluster run -- python benchmarks/login_path.py           with a Slurm of one's own

The two commands alternate, and the CPU time (user + system) of each and of everything it started is what the kernel
accounts, so that a busy machine changes the ratio little. The dry run's own modules are listed too: torch, NumPy and
mpi4py must not be among them.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile

BASELINE = [sys.executable, "-c", "import hydra, submitit"]
DRY_RUN = [sys.executable, "-m", "dthpc.submit", "+cluster=slurm", "dry_run=true", "cluster.nodes=2"]
FORBIDDEN = ("torch", "numpy", "mpi4py", "tensorboardX")


def cpu_seconds(command: list[str]) -> float:
    """CPU seconds of one run of a command and of the processes it waited for.

    Raises:
        SystemExit: the command failed; its output is shown.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        if os.waitstatus_to_exitcode(status) != 0:
            output.seek(0)
            raise SystemExit(f"{' '.join(command)} failed:\n{output.read().decode(errors='replace')}")
    return usage.ru_utime + usage.ru_stime


def forbidden_imports(command: list[str]) -> list[str]:
    """Modules that the login path must not load, among those that a command loads."""
    traced = [command[0], "-X", "importtime", *command[1:]]
    listing = subprocess.run(traced, capture_output=True, text=True, check=True).stderr
    loaded = {line.rpartition("|")[2].strip() for line in listing.splitlines() if re.match(r"import time:", line)}
    return sorted(name for name in FORBIDDEN if name in loaded)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9, help="counted runs of each command")
    runs = parser.parse_args().runs
    # Else our modules alone would be compiled anew in every run: those that pip installed have their bytecode.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    cpu_seconds(BASELINE), cpu_seconds(DRY_RUN)
    pairs = [(cpu_seconds(DRY_RUN), cpu_seconds(BASELINE)) for _ in range(runs)]
    ratios = sorted(ours / base for ours, base in pairs)
    print(f"dry run          {statistics.median(ours for ours, _ in pairs):.3f} s of CPU (median of {runs})")
    print(f"imports alone    {statistics.median(base for _, base in pairs):.3f} s of CPU")
    spread = f"min {ratios[0]:.2f}, max {ratios[-1]:.2f}"
    print(f"ratio            {statistics.median(ratios):.2f} ({spread}; target at most 3)")
    print(f"forbidden        {', '.join(forbidden_imports(DRY_RUN)) or 'none loaded'}")


if __name__ == "__main__":
    main()
