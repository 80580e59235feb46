"""What data parallelism and ZeRO add to the time of a step, ours and the peers', in one run.

    python benchmarks/data_parallel.py [--ranks 2] [--repeats 12] [--only ddp,zero3] [--peers FOLDER]

Each rank is a process of one thread; they train a GPT of 10.8 M parameters on 512 tokens each, in fp32 with fused
AdamW, over Gloo. All contenders live in the same processes and take turns of one step, so that whatever else the
machine does hits all alike. `compute` is the same step in the same processes at the same time without any
communication, its update of all parameters included; a contender's overhead is its time less that of `compute`.

Ours run twice: as they do by default, over the memory that the ranks of a host share, and over Gloo
(`comm.shared_memory=false`), the wire that all peers use.

The peers are torch's DistributedDataParallel, ZeroRedundancyOptimizer and fully_shard (FSDP2), and, where they are
installed, DeepSpeed and FairScale. `--peers` names a folder that is searched for the latter two:

    pip install --no-deps --target FOLDER deepspeed==0.19.8 fairscale==0.4.13 \\
        hjson msgpack ninja py-cpuinfo psutil pydantic annotated-types pydantic-core typing-inspection einops tqdm

Prints medians and bests over the repeats, the overheads, and each of ours over the best peer of its kind, which it
names; the targets are 0.8 for ddp, zero1 and zero2, and 0.5 for zero3. ZeRO divides the update among the ranks, so an
overhead may be below zero.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dthpc.models.gpt import GPT
from dthpc.models.init import init_parameters
from dthpc.parallel.layout import Layout
from dthpc.parallel.mesh import make_mesh
from dthpc.parallel.parts import whole_parts
from dthpc.parallel.sharding import ShardOptions, Shards

SHAPE = {"vocab_size": 256, "dim": 384, "layers": 6, "heads": 6, "max_seq_len": 256, "tie_embeddings": False}
BATCH, LENGTH = 2, 256
TARGETS = {"ddp": 0.8, "zero1": 0.8, "zero2": 0.8, "zero3": 0.5}

Step = Callable[[Tensor, Tensor], None]


def build_model() -> GPT:
    model = GPT(**SHAPE)  # type: ignore[arg-type]
    init_parameters(model, seed=0)
    return model


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def adamw(tensors: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(tensors, lr=1e-4, weight_decay=0.1, fused=True)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(tokens: Tensor, targets: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(model, tokens, targets).backward()
        optimizer.step()

    return step


def compute() -> Step:
    model = build_model()
    return plain_step(model, adamw(model.parameters()))


def ours(zero: int, shared_memory: bool) -> Step:
    size = dist.get_world_size()
    layout = Layout(**{"shard" if zero else "replicate": size}, zero=zero)
    mesh = make_mesh(layout, "cpu", shared_memory=shared_memory)
    model = build_model()
    shards = Shards([model], whole_parts([model]), mesh, ShardOptions(zero=zero))
    optimizer = adamw([piece.tensor for piece in shards.pieces])

    def step(tokens: Tensor, targets: Tensor) -> None:
        shards.begin_step()
        with shards.forward(0):
            loss = loss_of(model, tokens, targets) / size
        with shards.backward(0, last=True):
            loss.backward()  # type: ignore[no-untyped-call]
        shards.finish_step()
        optimizer.step()
        shards.publish()

    return step


def ddp(view: bool) -> Step:
    model = nn.parallel.DistributedDataParallel(build_model(), gradient_as_bucket_view=view)
    return plain_step(model, adamw(model.parameters()))


def zero_redundancy() -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(build_model(), gradient_as_bucket_view=True)
    optimizer: Any = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=1e-4, weight_decay=0.1, fused=True
    )
    return plain_step(model, optimizer)


def fsdp2(reshard: bool) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build_model()
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return plain_step(model, adamw(model.parameters()))


def fairscale() -> Step:
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    model = build_model()
    optimizer: Any = OSS(model.parameters(), torch.optim.AdamW, lr=1e-4, weight_decay=0.1, fused=True)
    return plain_step(ShardedDataParallel(model, optimizer), optimizer)


def deepspeed(stage: int) -> Step:
    logging.disable(logging.CRITICAL)
    import deepspeed as package

    model = build_model()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    if not package.comm.is_initialized():
        package.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    engine, *_ = package.initialize(model=model, optimizer=adamw(model.parameters()), config=config)

    def step(tokens: Tensor, targets: Tensor) -> None:
        engine.backward(loss_of(engine, tokens, targets))
        engine.step()

    return step


CONTENDERS: dict[str, tuple[str, Callable[[], Step]]] = {
    "compute": ("", compute),
    "ours ddp": ("ddp", lambda: ours(0, True)),
    "ours ddp, Gloo": ("ddp", lambda: ours(0, False)),
    "torch DDP": ("ddp", lambda: ddp(False)),
    "torch DDP, views": ("ddp", lambda: ddp(True)),
    "ours zero1": ("zero1", lambda: ours(1, True)),
    "ours zero1, Gloo": ("zero1", lambda: ours(1, False)),
    "torch ZeroRedundancyOptimizer": ("zero1", zero_redundancy),
    "FairScale OSS+ShardedDDP": ("zero1 zero2", fairscale),
    "DeepSpeed 1": ("zero1", lambda: deepspeed(1)),
    "ours zero2": ("zero2", lambda: ours(2, True)),
    "ours zero2, Gloo": ("zero2", lambda: ours(2, False)),
    "torch FSDP2, zero-2 form": ("zero2", lambda: fsdp2(False)),
    "DeepSpeed 2": ("zero2", lambda: deepspeed(2)),
    "ours zero3": ("zero3", lambda: ours(3, True)),
    "ours zero3, Gloo": ("zero3", lambda: ours(3, False)),
    "torch FSDP2": ("zero3", lambda: fsdp2(True)),
    "DeepSpeed 3": ("zero3", lambda: deepspeed(3)),
}


def work(rank: int, size: int, folder: str, names: list[str], repeats: int, peers: str | None, answers: Any) -> None:
    """One rank of all contenders."""
    if peers:
        sys.path.append(peers)
    warnings.filterwarnings("ignore")
    os.environ.update(DS_ACCELERATOR="cpu", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    steps: dict[str, Step] = {}
    missing: dict[str, str] = {}
    for name in names:
        try:
            steps[name] = CONTENDERS[name][1]()
        except ImportError as error:
            missing[name] = str(error)
        except Exception:
            missing[name] = traceback.format_exc(limit=-2)
    generator = torch.Generator().manual_seed(rank)
    tokens, targets = torch.randint(0, SHAPE["vocab_size"], (2, BATCH, LENGTH), generator=generator)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(-2, repeats):
        for name, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            step(tokens, targets)
            took = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if turn >= 0:
                times[name].append(took.item() * 1e3)
    if rank == 0:
        answers.put((times, missing))
    dist.barrier()
    dist.destroy_process_group()


def report(times: dict[str, list[float]], missing: dict[str, str]) -> None:
    """Print the table, and the ratios for people and as JSON."""
    for name, why in missing.items():
        print(f"missing: {name}: {why}")
    base = times["compute"]
    overheads: dict[str, tuple[float, float]] = {}
    print(f"{'':32}{'best ms':>9}{'median':>9}{'overhead: of bests':>20}{'median':>9}")
    for name, taken in times.items():
        gap = min(taken) - min(base), statistics.median(a - b for a, b in zip(taken, base, strict=True))
        overheads[name] = gap
        print(f"{name:32}{min(taken):9.1f}{statistics.median(taken):9.1f}{gap[0]:20.1f}{gap[1]:9.1f}")
    result: dict[str, Any] = {}
    for kind, target in TARGETS.items():
        peers = {name: gap for name, gap in overheads.items() if is_peer(name, kind)}
        for way, name in (("shared memory", f"ours {kind}"), ("Gloo", f"ours {kind}, Gloo")):
            mine = overheads.get(name)
            if mine is None or not peers:
                continue
            best = [min(peers, key=lambda peer: peers[peer][clock]) for clock in (0, 1)]
            ratios = [mine[clock] / peers[best[clock]][clock] for clock in (0, 1)]
            result[f"{kind}, {way}"] = {
                "of_bests": round(ratios[0], 3),
                "of_medians": round(ratios[1], 3),
                "target": target,
            }
            print(
                f"{kind} over {way}: {ratios[0]:.2f} of {best[0]}'s (bests), {ratios[1]:.2f} of "
                f"{best[1]}'s (medians); target {target}"
            )
    print(json.dumps(result))


def is_peer(name: str, kind: str) -> bool:
    return kind in CONTENDERS[name][0].split() and not name.startswith("ours")


def main() -> None:
    parser = argparse.ArgumentParser(description="Overhead of data parallelism and ZeRO over pure compute.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--only", default="", help="kinds (ddp, zero1, zero2, zero3) or names, with commas")
    parser.add_argument("--peers", help="folder in which DeepSpeed and FairScale are installed")
    options = parser.parse_args()
    only = [word for word in options.only.split(",") if word]
    names = [
        name
        for name, (kinds, _) in CONTENDERS.items()
        if not only or name == "compute" or name in only or set(kinds.split()) & set(only)
    ]
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.ranks, folder, names, options.repeats, options.peers, answers)
        processes = [context.Process(target=work, args=(rank, *arguments)) for rank in range(options.ranks)]
        for process in processes:
            process.start()
        times, missing = answers.get()
        for process in processes:
            process.join()
    report(times, missing)


if __name__ == "__main__":
    main()
