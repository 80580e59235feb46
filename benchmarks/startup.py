"""From typing the command to the end of the first training step, against a bare `torchrun` script.

    python benchmarks/startup.py [--repeats 5] [--ranks 2]

Both build the same model on the same packed text (a warm cache), on as many local ranks of one thread each, and make
one step. They alternate, and the median of each is compared; the target is a ratio of at most 1.5.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from dthpc.monitor.events import read_events  # noqa: E402

BARE_SCRIPT = """
import sys, time
import numpy, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from dthpc.models.gpt import GPT

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
tokens = numpy.memmap(sys.argv[1], dtype=numpy.uint16, mode="r")
vocab, dim, layers, heads, seq_len, batch = map(int, sys.argv[2:8])
torch.manual_seed(0)
model = DistributedDataParallel(GPT(vocab_size=vocab, dim=dim, layers=layers, heads=heads, max_seq_len=seq_len))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
starts = torch.randint(0, len(tokens) - seq_len - 1, (batch // size,)).tolist()
rows = torch.stack([torch.from_numpy(tokens[s : s + seq_len + 1].astype(numpy.int64)) for s in starts])
logits = model(rows[:, :-1])
loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
loss.item()
if rank == 0:
    print("done", time.time(), flush=True)
dist.destroy_process_group()
"""


def environment() -> dict[str, str]:
    """One thread a rank, and the checkout first."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def time_submit(folder: Path, name: str, ranks: int) -> float:
    """Seconds until the record of the first step of a run of one step."""
    words = [f"run.name={name}", f"run.root={folder}", f"cluster.tasks_per_node={ranks}", "train.steps=1"]
    words += ["train.eval_every=-1", "optim.schedule.warmup_steps=0", "monitor.log_every=1", "follow=true"]
    began = time.time()
    subprocess.run([sys.executable, "-m", "dthpc.submit", *words], env=environment(), check=True, capture_output=True)
    events, _ = read_events(folder / name / "events.jsonl")
    return float(next(event["time"] for event in events if event["kind"] == "step")) - began


def time_bare(folder: Path, script: Path, ranks: int, facts: list[str]) -> float:
    """Seconds until the bare script's first step is done."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    began = time.time()
    done = subprocess.run(
        [*launcher, str(script), *facts], env=environment(), check=True, capture_output=True, text=True, cwd=folder
    )
    return float(next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("done"))) - began


def facts_of(run: Path) -> list[str]:
    """What the bare script needs to know: where the packed text lies, and the sizes of the model and of the batch."""
    from omegaconf import OmegaConf

    from dthpc.jobs.build import build_data

    config = OmegaConf.load(run / "config.yaml")
    data = build_data(config.data)
    shard = next(Path(data.describe()["cache"]).glob("train-*.bin"))
    model, train = config.model, config.train
    sizes = [data.vocab_size, model.dim, model.layers, model.heads, train.seq_len, train.global_batch]
    return [str(shard), *map(str, sizes)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to the first step, against a bare torchrun script.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    ours, bare = [], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        script = folder / "bare.py"
        script.write_text(BARE_SCRIPT, encoding="utf-8")
        # The first run packs the text if it must, and fills the file caches; it does not count.
        time_submit(folder, "warm-up", options.ranks)
        facts = facts_of(folder / "warm-up")
        time_bare(folder, script, options.ranks, facts)
        for number in range(options.repeats):
            ours.append(time_submit(folder, f"run-{number}", options.ranks))
            bare.append(time_bare(folder, script, options.ranks, facts))
            print(f"{number}: dthpc.submit {ours[-1]:.2f} s, torchrun {bare[-1]:.2f} s", flush=True)
    mine, other = statistics.median(ours), statistics.median(bare)
    ratio = statistics.median(a / b for a, b in zip(ours, bare, strict=True))
    print(f"median: dthpc.submit {mine:.2f} s, torchrun {other:.2f} s, ratio {ratio:.2f}")
    print(json.dumps({"submit_s": round(mine, 3), "torchrun_s": round(other, 3), "ratio": round(ratio, 3)}))


if __name__ == "__main__":
    main()
