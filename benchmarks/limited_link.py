"""How much of a link of known rate large all-reduces use: two nodes of a minicluster, a rank each, with limited links.

Runs `job=collectives` by the real command. Algorithm bandwidth over the link's rate is printed for each backend (1 is
out of reach: of a full Ethernet frame of 1514 bytes TCP carries 1448, 0.956), and beside it over that of the raw
library: Gloo's process group called directly, mpi4py on NumPy buffers. Needs root, as `slurm/minicluster` does.

The nodes' processes are on one machine in truth: UCX_TLS keeps MPICH from finding out and using its memory. The shaper
lets bursts of a hundredth of a second pass, so that messages must take much longer than that to mean anything.

    python benchmarks/limited_link.py [--rate 500mbit] [--sizes 16M 32M] [--seconds 3] [--gloo] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "slurm"))

from mini import Cluster  # noqa: E402
from mini.network import bytes_per_second  # noqa: E402

NODES = ("node1", "node2")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rate", default="500mbit", help="of each node's link, in tc's notation")
    parser.add_argument("--sizes", nargs="+", default=["16M", "32M"], help="of the tensors")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each size and backend")
    parser.add_argument("--gloo", action="store_true", help="leave MPI out")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    # Nodes have a /tmp of their own, since MPI libraries meet there by names that nodes would otherwise share.
    with tempfile.TemporaryDirectory(prefix="limited-link-", dir="/var/tmp") as folder:
        found = measure(Path(folder), arguments)
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{'backend':<10} {'size':>10} {'of link':>8} {'of raw':>7}   (load average {found['load']:.1f})")
    for row in found["rows"]:
        raw = "" if row["of_raw"] is None else f"{row['of_raw']:.2f}"
        print(f"{row['backend']:<10} {row['size']:>10} {row['of_link']:>8.3f} {raw:>7}")


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Share of the link's rate for each backend and size: of the quickest form."""
    load = os.getloadavg()[0]
    with Cluster("limited", nodes=len(NODES), accounting=False, private_tmp=True) as cluster:
        for node in NODES:
            cluster.limit(node, arguments.rate)
        done = cluster.run(command(folder, arguments), cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode != 0:
        sys.exit(done.stdout + done.stderr)
    lines = json.loads((folder / "run" / "collectives.json").read_text())["lines"]
    best: dict[tuple[str, int], float] = {}
    for line in lines:
        if line["wrong"]:
            sys.exit(f"wrong result: {line}")
        key = line["backend"], line["size"]
        best[key] = max(best.get(key, 0.0), line["algbw"] * 1e9 / bytes_per_second(arguments.rate))
    rows = [
        {
            "backend": backend,
            "size": size,
            "of_link": share,
            "of_raw": share / best[f"raw_{backend}", size] if (f"raw_{backend}", size) in best else None,
        }
        for (backend, size), share in sorted(best.items())
    ]
    return {"rate": arguments.rate, "load": load, "rows": rows}


def command(folder: Path, arguments: argparse.Namespace) -> list[str]:
    """The words of the submission."""
    words = ["job=collectives", "+cluster=slurm", "cluster.nodes=2", "follow=true", "job.plots=false"]
    words += [f"run.root={folder}", "run.name=run", "resilience.restart_on_failure=false", "job.pairs=none"]
    words += [f"job.sizes=[{','.join(arguments.sizes)}]", f"job.seconds={arguments.seconds}", "job.warmup=1"]
    words += ["job.operations=[all_reduce]", f"job.link_gbps={bytes_per_second(arguments.rate) * 8 / 1e9:g}"]
    if not arguments.gloo:
        words += ["comm.backend=mpi", '+cluster.environment.UCX_TLS="tcp,self"']
    return [sys.executable, "-m", "dthpc.submit", *words]


if __name__ == "__main__":
    main()
