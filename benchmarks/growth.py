"""Time and memory of layouts, meshes and pipeline schedules as the number of ranks grows to thousands.

    python benchmarks/growth.py                     8 … 4,096 ranks
    python benchmarks/growth.py --ranks 4096 16384

Each line comes from a process of its own, so that its peak memory belongs to it; what it had before the measured work
began (imports, above all torch) is taken off in the column `of it ours`. Parts:

    layout     checks and resolution of the degrees (as on the login node, without torch), and the groups of every rank
               on every axis
    mesh       one rank's mesh among that many simulated ones (torch's fake process group), and torch's own
               `init_device_mesh` of the same shape for comparison
    schedule   the actions of every rank of the layout's pipeline, and of one rank of a pipeline as long as all ranks,
               with 4 micro-batches for each of its stages
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

SIZES = (8, 64, 512, 4096)


def degrees(ranks: int) -> dict[str, Any]:
    """A usual layout: tensor parallel in the node, a pipeline of up to 16, optimizer state sharded over the rest."""
    tp = 8 if ranks >= 64 else 2
    pp = min(16, max(2, ranks // tp // 4))
    return {"tp": tp, "pp": pp, "zero": 1, "sequence_parallel": True}


def configuration(ranks: int) -> Any:
    """The default run with that layout and a model large enough for it."""
    from dthpc.config.compose import read_command_line

    words = [f"parallel.{key}={str(value).lower()}" for key, value in degrees(ranks).items()]
    words += [f"train.global_batch={8 * ranks}", "model.layers=96", "model.heads=64", "model.dim=8192"]
    words += ["+cluster=slurm", f"cluster.nodes={max(1, ranks // 8)}", "cluster.tasks_per_node=8"]
    ((config, _),), _ = read_command_line(words, "growth")
    return config


def measure_layout(ranks: int) -> dict[str, float]:
    """Seconds of the checks, of the resolution, and of placing every rank on every axis."""
    config = configuration(ranks)
    from dthpc.launch.checks import find_mistakes
    from dthpc.parallel.layout import AXES, Layout

    before = peak_mib()
    mistakes, checks_s = timed(lambda: find_mistakes(config))
    layout, resolve_s = timed(lambda: Layout.resolve(config, ranks))
    groups, groups_s = timed(lambda: {tuple(layout.ranks_along(r, axis)) for r in range(ranks) for axis in AXES})
    assert not mistakes
    assert {rank for group in groups for rank in group} == set(range(ranks))
    assert "torch" not in sys.modules
    return {"imports": before, "checks_s": checks_s, "resolve_s": resolve_s, "all_groups_s": groups_s}


def measure_mesh(ranks: int, ours: bool) -> dict[str, float]:
    """Seconds of one rank's mesh, ours or torch's."""
    layout = _layout(ranks)
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from dthpc.parallel.mesh import make_mesh

    dist.init_process_group("fake", store=FakeStore(), rank=ranks // 2, world_size=ranks)
    axes = [axis for axis in layout.order if layout.degree(axis) > 1]
    before = peak_mib()
    if ours:
        mesh, seconds = timed(lambda: make_mesh(layout, "cpu").device_mesh)
    else:
        shape = tuple(layout.degree(axis) for axis in axes)
        mesh, seconds = timed(lambda: init_device_mesh("cpu", shape, mesh_dim_names=tuple(axes)))
    assert mesh is not None
    for axis in axes:
        members = dist.get_process_group_ranks(mesh.get_group(axis))
        assert members == list(layout.ranks_along(ranks // 2, axis))
    return {"imports": before, "mesh_s": seconds}


def measure_schedule(ranks: int, name: str) -> dict[str, float]:
    """Seconds of the actions of every rank of the layout's pipeline, and of one rank of the longest pipeline."""
    layout = _layout(ranks)
    from dthpc.parallel.pipeline.names import chunks_of
    from dthpc.parallel.pipeline.schedule import actions_of, build
    from dthpc.parallel.pipeline.verify import verify

    chunks = chunks_of(name, None)
    before = peak_mib()
    schedule, build_s = timed(lambda: build(name, layout.pp, chunks, 4 * layout.pp))
    actions, each_s = timed(lambda: sum(len(schedule.actions[rank]) for rank in range(layout.pp)))
    _, verify_s = timed(lambda: verify(schedule))
    longest, longest_s = timed(lambda: actions_of(name, ranks // 2, ranks, chunks, 4 * ranks))
    assert actions >= 2 * layout.pp * chunks * 4 * layout.pp
    assert len(longest) >= 2 * chunks * 4 * ranks
    return {"imports": before, "all_ranks_s": build_s + each_s, "verify_s": verify_s, "one_of_all_s": longest_s}


PARTS: dict[str, Callable[[int], dict[str, float]]] = {
    "layout": measure_layout,
    "mesh": lambda ranks: measure_mesh(ranks, ours=True),
    "mesh (torch)": lambda ranks: measure_mesh(ranks, ours=False),
    **{
        f"schedule {name}": lambda ranks, name=name: measure_schedule(ranks, name)  # type: ignore[misc]
        for name in ("gpipe", "1f1b", "interleaved", "zb_h1", "zbv")
    },
}


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """What a function returns, and the seconds it took."""
    start = time.perf_counter()
    return function(), time.perf_counter() - start


def peak_mib() -> float:
    """Most memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _layout(ranks: int) -> Any:
    from dthpc.parallel.layout import Layout

    chosen = degrees(ranks)
    return Layout(**chosen, shard=ranks // chosen["tp"] // chosen["pp"])


def main() -> None:
    """Measure and print; with `--part`, one part in this process, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=SIZES, help="numbers of ranks; powers of two from 8")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        figures = PARTS[arguments.part](arguments.ranks[0])
        print(json.dumps({**figures, "peak": peak_mib()}))
        return
    print(f"{'part':22}{'ranks':>7}  {'peak MiB':>8} {'of it ours':>10}  seconds")
    for part in PARTS:
        for ranks in arguments.ranks:
            command = [sys.executable, __file__, "--part", part, "--ranks", str(ranks)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise SystemExit(f"{part} of {ranks} ranks failed:\n{done.stderr}")
            figures = json.loads(done.stdout)
            peak, imports = figures.pop("peak"), figures.pop("imports")
            seconds = "  ".join(f"{name.removesuffix('_s')} {value:.4f}" for name, value in figures.items())
            print(f"{part:22}{ranks:7}  {peak:8.0f} {peak - imports:10.1f}  {seconds}", flush=True)


if __name__ == "__main__":
    main()
