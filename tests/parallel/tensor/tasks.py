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


class CountingAxis(TensorAxis):
    """Writes down the exchanges that it makes, and the size of what is sent."""

    def __init__(self, axis: TensorAxis) -> None:
        super().__init__(axis.channel, axis.pool, axis.index, axis.size, axis.sequence_parallel)
        object.__setattr__(self, "made", [])

    def start_all_reduce(self, x: Tensor) -> Any:
        self.made.append(("all_reduce", x.numel(), x.dtype))  # type: ignore[attr-defined]
        return super().start_all_reduce(x)

    def start_gather(self, x: Tensor) -> Any:
        self.made.append(("gather", x.numel(), x.dtype))  # type: ignore[attr-defined]
        return super().start_gather(x)

    def start_reduce_scatter(self, x: Tensor) -> Any:
        self.made.append(("reduce_scatter", x.numel(), x.dtype))  # type: ignore[attr-defined]
        return super().start_reduce_scatter(x)


class Gated(nn.Module):
    """Two matrices that read one input, and one that reads their product."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(6, 7)
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.gate(x).sigmoid() * self.up(x))
        return out


class User(nn.Module):
    """A user's model: a gated layer with a norm of its own inside, or plain columns side by side."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.body = Gated()
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out

    def tensor_plan(self) -> dict[str, str]:
        plan = {"body.gate": "column", "body.up": "column", "body.down": "row"}
        return plan | ({"body": "shared_input"} if self.shared else {})


def user_input() -> Tensor:
    return random(2, 4, 6, seed=3)


def user_model(tp: int, sequence_parallel: bool, shared: bool) -> tuple[User, Parts, CountingAxis, Tensor]:
    """A split `User`, its parts, the axis it exchanges over, and this rank's input."""
    model = User(shared)
    parts = whole_parts([model])
    split_tensors([model], parts, mesh_of(tp, sequence_parallel), sequence_parallel)
    axis = CountingAxis(axis_of(tp, sequence_parallel))
    for module in model.modules():
        if hasattr(module, "axis"):
            module.axis = axis
    x = user_input()
    if sequence_parallel:
        x = axis.slice_sequence(x).clone()
    return model, parts, axis, x.requires_grad_()


def user_pass(
    rank: int, tp: int, sequence_parallel: bool, shared: bool, bf16: bool
) -> tuple[list[tuple[str, int, torch.dtype]], Tensor, Gradients, list[torch.dtype]]:
    """Exchanges, input's gradient, gradients, and dtypes of output, input's gradient and first weight's gradient."""
    model, parts, axis, x = user_model(tp, sequence_parallel, shared)
    with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
        out = model(x)
    out.square().sum().backward()
    assert x.grad is not None
    weight = model.body.gate.weight.grad
    return axis.made, x.grad, collect(model, parts), [out.dtype, x.grad.dtype, weight.dtype]  # type: ignore[attr-defined]


def deferred_pass(rank: int, tp: int, sequence_parallel: bool) -> tuple[list[str], bool]:
    """Which parameters got their gradient before weights were computed, and whether all are as without deferring."""
    from dthpc.parallel.pipeline.weights import WeightStore, defer_weights

    plain, _, _, x = user_model(tp, sequence_parallel, True)
    plain(x).square().sum().backward()
    model, _, _, y = user_model(tp, sequence_parallel, True)
    store = WeightStore()
    defer_weights([model], store)
    out = model(y).square().sum()
    with store.defer("pass"):
        out.backward()
    early = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    for parameter, gradient in store.compute("pass"):
        parameter.grad = gradient
    same = [torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)]
    return early, all(same) and torch.equal(x.grad, y.grad)


def frozen_pass(rank: int, tp: int) -> tuple[list[str], list[str]]:
    """Exchanges of a pass whose input needs no gradient and whose first weight is frozen; who got a gradient."""
    model, _, axis, x = user_model(tp, False, True)
    model.body.gate.weight.requires_grad_(False)
    model(x.detach()).square().sum().backward()
    got = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    return [kind for kind, _, _ in axis.made], got  # type: ignore[attr-defined]


def saved_for_backward(rank: int, tp: int, sequence_parallel: bool) -> int:
    """Elements that column layers keep of their input."""
    from dthpc.parallel.tensor.linear import column_linear

    model, _, axis, x = user_model(tp, sequence_parallel, True)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
        column_linear(x, [model.body.gate], axis)
    return sum(sizes) - model.body.gate.weight.numel()


def called_out_of_turn(rank: int, tp: int) -> bool:
    """Whether columns that share their input are right when they are called with different ones, twice, or alone."""
    model, _, _, _ = user_model(tp, False, True)
    gate, up = model.body.gate, model.body.up
    a, b = random(1, 2, 6, seed=1), random(1, 2, 6, seed=2)

    def right(layer: Any, x: Tensor) -> bool:
        return torch.allclose(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))

    return all([right(gate, a), right(up, b), right(up, b), right(gate, b), right(gate, a), right(up, a)])
