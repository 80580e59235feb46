"""What ranks do in the tests of tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dthpc.models.dropout import DropoutStream, attach
from dthpc.models.gpt import GPT
from dthpc.models.init import init_parameters
from dthpc.models.losses import next_token
from dthpc.models.vit import ViT
from dthpc.parallel.layout import Layout
from dthpc.parallel.mesh import Mesh, make_mesh
from dthpc.parallel.parts import Part, Parts, whole_parts
from dthpc.parallel.tensor import functions
from dthpc.parallel.tensor.apply import split_tensors
from dthpc.parallel.tensor.axis import TensorAxis
from dthpc.parallel.tensor.loss import split_loss, vocab_parallel_cross_entropy

Gradients = dict[str, tuple[Part, Tensor | None]]


def mesh_of(tp: int, sequence_parallel: bool = False) -> Mesh:
    return make_mesh(Layout(tp=tp, sequence_parallel=sequence_parallel), "cpu")


def axis_of(tp: int, sequence_parallel: bool = False) -> TensorAxis:
    return TensorAxis.of(mesh_of(tp), sequence_parallel)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run_function(
    rank: int, tp: int, name: str, inputs: list[Tensor], weights: list[Tensor], extra: tuple[Any, ...] = ()
) -> tuple[Tensor, Tensor]:
    """Output and input's gradient of a function of `functions`, under the loss Σ weight · output."""
    x = inputs[rank].clone().requires_grad_()
    out = getattr(functions, name)(x, axis_of(tp), *extra)
    (out * weights[rank]).sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


def cross_entropy(rank: int, tp: int, logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The loss of a rank's share of logits, and the share's gradient."""
    axis = axis_of(tp)
    start, size = axis.share(logits.shape[1])
    mine = logits[:, start : start + size].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(mine, targets, axis, logits.shape[1])
    (loss * scale).backward()
    assert mine.grad is not None
    return loss.detach(), mine.grad


def cross_entropy_error(rank: int, tp: int, logits: Tensor, targets: Tensor) -> str:
    try:
        cross_entropy(rank, tp, logits, targets, 1.0)
    except IndexError as error:
        return str(error)
    return ""


def make_gpt(**fields: Any) -> GPT:
    model = GPT(**{"vocab_size": 37, "dim": 24, "layers": 2, "heads": 4, "max_seq_len": 16, "hidden": 37, **fields})
    init_parameters(model, 1)
    spread(model)
    return model


def make_vit(**fields: Any) -> ViT:
    model = ViT(**{"image_size": 8, "patch_size": 2, "dim": 24, "layers": 2, "heads": 4, "hidden": 37, **fields})
    init_parameters(model, 1)
    spread(model)
    return model


@torch.no_grad()
def spread(model: nn.Module) -> None:
    """Values of all sizes, so that no biases are zero and no norms one."""
    for number, parameter in enumerate(model.parameters()):
        parameter.add_(random(*parameter.shape, seed=number), alpha=0.2)


def batch_of(model: nn.Module, rows: int = 3, length: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    if isinstance(model, ViT):
        return random(rows, 1, 8, 8), torch.randint(10, (rows,), generator=generator)
    vocabulary = model.embed.num_embeddings if isinstance(model.embed, nn.Embedding) else model.embed.total
    tokens = torch.randint(vocabulary, (rows, length + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[:1, :3] = -100
    return tokens[:, :-1], targets


def other_loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A loss that needs all logits: their squares, weighted by the targets."""
    total = (outputs.float().square().mean(-1) * targets.clamp(min=0)).sum()
    return total, torch.tensor(targets.numel())


LOSSES: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {"next_token": next_token, "other": other_loss}
MODELS: dict[str, Callable[..., nn.Module]] = {"gpt": make_gpt, "vit": make_vit}


def train_pass(
    model: nn.Module, loss: Any, *, bf16: bool = False, rows: int = 3, steps: int = 1, recompute: bool = False
) -> float:
    """Loss of a forward and backward pass; with dropout by samples."""
    stream = DropoutStream(5)
    stream.samples = range(rows)
    attach(model, stream)
    inputs, targets = batch_of(model, rows)
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            outputs = recomputed(model, inputs) if recompute else model(inputs)
        total, _ = loss(outputs, targets)
        total.backward()
    return float(total.detach())


def recomputed(model: nn.Module, inputs: Tensor) -> Tensor:
    """The model's output with all blocks computed again in the backward pass."""
    from torch.utils.checkpoint import checkpoint

    for block in model.blocks.values():
        forward = type(block).forward
        block.forward = lambda *args, b=block, f=forward: checkpoint(f, b, *args, use_reentrant=False)
    return model(inputs)


def collect(model: nn.Module, parts: Parts) -> Gradients:
    return {parts[p].name: (parts[p], None if p.grad is None else p.grad.clone()) for p in model.parameters()}


def split_pass(
    rank: int, tp: int, sequence_parallel: bool, kind: str, fields: dict[str, Any], loss: str, how: dict[str, Any]
) -> tuple[float, Gradients]:
    """Loss and gradients of this rank's part of a model."""
    model = MODELS[kind](**fields)
    parts = whole_parts([model])
    mesh = mesh_of(tp, sequence_parallel)
    split_tensors([model], parts, mesh, sequence_parallel)
    assert set(parts) == set(model.parameters())
    for parameter, part in parts.items():
        assert tuple(parameter.shape) == part.local_shape
    value = train_pass(model, split_loss(LOSSES[loss], [model], mesh), **how)
    return value, collect(model, parts)


def parts_of_meta(rank: int, tp: int, fields: dict[str, Any]) -> tuple[list[Part], list[Part], list[bool]]:
    """Parts of a model on the meta device and of one with values, and which parameters stayed on it."""
    with torch.device("meta"):
        empty = GPT(**fields)
    real = GPT(**fields)
    found = []
    for model in (empty, real):
        parts = whole_parts([model])
        split_tensors([model], parts, mesh_of(tp), False)
        found.append(list(parts.values()))
    return found[0], found[1], [parameter.is_meta for parameter in empty.parameters()]


def refusal(rank: int, tp: int, sequence_parallel: bool, make: Callable[[], nn.Module]) -> str:
    """What a rank says to a model that cannot be split."""
    from dthpc.errors import UserError

    model = make()
    try:
        mesh = mesh_of(tp, sequence_parallel)
        split_tensors([model], whole_parts([model]), mesh, sequence_parallel)
        model(*([torch.zeros(2, 15, dtype=torch.int64)] if isinstance(model, GPT) else []))
    except UserError as error:
        return str(error)
    return ""
