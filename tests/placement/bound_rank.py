"""A process that binds itself as a rank does, starts threads and a child, and prints what the kernel says of all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

from dthpc.placement import kernel
from dthpc.placement.apply import apply_settings, bind_helper, settings_of
from dthpc.placement.cpuset import format_cpus
from dthpc.placement.decide import decide
from dthpc.placement.plan.wish import Wish
from dthpc.placement.read.sysfs import read_sysfs
from dthpc.placement.read.tree import open_tree
from dthpc.placement.verify import thread_masks, verify


def main() -> None:
    ranks, rank = int(sys.argv[1]), int(sys.argv[2])
    plan = decide(read_sysfs(open_tree("/")), Wish(ranks))
    go, early = threading.Event(), []
    early.append(threading.Thread(target=go.wait))
    early[0].start()
    settings = settings_of(plan, rank, os.environ)
    problems = apply_settings(settings)
    late = threading.Thread(target=go.wait)
    late.start()
    helper: list[set[int]] = []
    loader = threading.Thread(target=lambda: (bind_helper(), helper.append(os.sched_getaffinity(0))))
    loader.start()
    loader.join()
    code = "import os; print(sorted(os.sched_getaffinity(0)))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told = {
        "problems": problems,
        "place": format_cpus(plan.places[rank].cpus or ()),
        "threads": sorted(format_cpus(mask) for mask in thread_masks().values()),
        "helper": sorted(helper[0]),
        "child": json.loads(child.stdout),
        "policy": list(kernel.memory_policy()[1]),
        "omp": os.environ.get("OMP_NUM_THREADS"),
        "verified": verify(plan.places[rank], settings).to_json(),
    }
    go.set()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
