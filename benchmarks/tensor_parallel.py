"""A step of a stack of transformer blocks, split over two ranks: ours against torch's DTensor, and against one rank.

    python benchmarks/tensor_parallel.py [--repeats 30] [--layers 6] [--dim 384] [--batch 8] [--length 128]
        [--mlp gelu|swiglu] [--norm layer|rms]

Every rank has one thread. The variants take turns in the same two processes, a step each (A B C A B C …), so that
whatever else the machine does hits all alike; in a turn of "one rank" the other process waits. A step is a forward and
a backward pass in fp32. All variants compute the same model from the same values: gradients are compared first.

Ours run twice: as they do by default, over the memory that the ranks of a host share, and over Gloo, as DTensor does.

Prints the least and the median time of each, wall-clock and CPU (of rank 0, with all its threads; other programs
disturb it less), and the ratio of ours to DTensor's; the target is at most 0.8.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torch.distributed.tensor.placement_types import Replicate, Shard

from dthpc.models.gpt import BLOCK_PLAN, Block
from dthpc.parallel.layout import Layout
from dthpc.parallel.mesh import make_mesh
from dthpc.parallel.parts import Parts, whole_parts
from dthpc.parallel.tensor.apply import split_tensors

Times = dict[str, list[tuple[float, float]]]
"""For each variant, wall-clock and CPU time of each turn, in ms."""


class Stack(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        hidden = 4 * args.dim if args.mlp == "gelu" else 1408 * args.dim // 512
        made = [
            Block(
                args.dim,
                args.dim // 64,
                args.dim // 64,
                hidden,
                norm=args.norm,
                mlp=args.mlp,
                bias=args.norm == "layer",
                dropout=0.0,
            )
            for _ in range(args.layers)
        ]
        self.blocks = nn.ModuleDict({str(number): block for number, block in enumerate(made)})

    def forward(self, x: Tensor) -> Tensor:
        """Map `[B, T, dim]` to itself."""
        for block in self.blocks.values():
            x = block(x, None)
        return x

    def tensor_plan(self) -> dict[str, str]:
        """The decoder's."""
        return BLOCK_PLAN


def with_dtensor(model: Stack, sequence_parallel: bool) -> Stack:
    """The usual plan of torch's tutorial on tensor parallelism."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks.values():
        row = RowwiseParallel(output_layouts=Shard(1)) if sequence_parallel else RowwiseParallel()
        plan = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        plan |= {f"mlp.{name}": ColwiseParallel() for name in ("gate", "up") if hasattr(block.mlp, name)}
        plan |= {"attention.out": row, "mlp.down": row}
        if sequence_parallel:
            whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
            with_rope = {"input_layouts": (Shard(1), None), "desired_input_layouts": (Replicate(), None)}
            plan |= {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
            plan |= {"attention": PrepareModuleInput(**with_rope), "mlp": PrepareModuleInput(**whole)}
        parallelize_module(block, mesh, plan)
    return model


def with_ours(model: Stack, sequence_parallel: bool, shared_memory: bool) -> tuple[Stack, Parts]:
    """What `split_tensors` makes of the model."""
    layout = Layout(tp=dist.get_world_size(), sequence_parallel=sequence_parallel)
    mesh = make_mesh(layout, "cpu", shared_memory=shared_memory)
    parts = whole_parts([model])
    split_tensors([model], parts, mesh, sequence_parallel)
    return model, parts


def step(model: nn.Module, x: Tensor) -> None:
    """A forward and a backward pass; gradients are kept where they are, as between optimizer steps."""
    for parameter in model.parameters():
        parameter.grad = None
    model(x).square().mean().backward()


def check_same(whole: Stack, ours: Stack, theirs: Stack, parts: Parts) -> None:
    """All variants have made the same gradients of the split matrices."""
    true, mine = dict(whole.named_parameters()), dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        expected, part = true[name].grad, parts[mine[name]]
        found = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        if part.dim is not None:
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-7)
            expected = expected.narrow(part.dim, part.start, part.size)
            torch.testing.assert_close(mine[name].grad, expected, rtol=1e-3, atol=1e-7)


def measure(rank: int, store: str, args: argparse.Namespace) -> None:
    """Take turns, and print on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, args.ranks), rank=rank, world_size=args.ranks)
    torch.manual_seed(0)
    whole = Stack(args)
    x = torch.randn(args.batch, args.length, args.dim)
    ours, parts = with_ours(copy.deepcopy(whole), False, True)
    ours_sp, _ = with_ours(copy.deepcopy(whole), True, True)
    ours_gloo, ours_sp_gloo = (with_ours(copy.deepcopy(whole), sequence, False)[0] for sequence in (False, True))
    theirs, theirs_sp = (with_dtensor(copy.deepcopy(whole), sequence) for sequence in (False, True))
    for model in (whole, ours, theirs):
        step(model, x)
    check_same(whole, ours, theirs, parts)
    short = x.chunk(args.ranks, 1)[rank].contiguous()
    variants: dict[str, Callable[[], None]] = {
        "one rank": lambda: step(whole, x) if rank == 0 else None,
        "DTensor": lambda: step(theirs, x),
        "ours": lambda: step(ours, x),
        "ours, Gloo": lambda: step(ours_gloo, x),
        "DTensor, sequence": lambda: step(theirs_sp, short),
        "ours, sequence": lambda: step(ours_sp, short),
        "ours, sequence, Gloo": lambda: step(ours_sp_gloo, short),
    }
    times: Times = {name: [] for name in variants}
    for turn in range(args.repeats + 2):
        for name, run in variants.items():
            dist.barrier()
            start = time.perf_counter(), time.process_time()
            run()
            end = time.perf_counter(), time.process_time()
            if turn >= 2:
                times[name].append(((end[0] - start[0]) * 1e3, (end[1] - start[1]) * 1e3))
    if rank == 0:
        report(times)
    dist.destroy_process_group()


def report(times: Times) -> None:
    """Print times and ratios."""
    for kind, which in (("wall-clock", 0), ("CPU", 1)):
        values = {name: [pair[which] for pair in pairs] for name, pairs in times.items()}
        print(f"{kind} time, ms          least   median")
        for name, found in values.items():
            print(f"    {name:20s} {min(found):8.1f} {statistics.median(found):8.1f}")
        print(f"    {'half of one rank':20s} {min(values['one rank']) / 2:8.1f}")
        for form in ("", ", sequence"):
            for way in ("", ", Gloo"):
                ours, theirs = values[f"ours{form}{way}"], values[f"DTensor{form}"]
                turns = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
                ratio = f"{min(ours) / min(theirs):.3f} of the least, {turns:.3f} median of turns"
                print(f"    ours{way} / DTensor{form}: {ratio}")


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description="Tensor parallelism: ours against DTensor.")
    sizes = {"repeats": 30, "ranks": 2, "layers": 6, "dim": 384, "batch": 8, "length": 128}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--mlp", choices=("gelu", "swiglu"), default="gelu")
    parser.add_argument("--norm", choices=("layer", "rms"), default="layer")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (str(Path(folder) / "store"), args), args.ranks)


if __name__ == "__main__":
    main()
