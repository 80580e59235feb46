"""What the tests of outer steps let real ranks do."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dthpc.models.gpt import GPT
from dthpc.models.init import init_parameters
from dthpc.parallel.layout import Layout
from dthpc.parallel.mesh import make_mesh
from dthpc.parallel.outer import OuterStep
from dthpc.parallel.parts import Part, Piece, whole_parts

VOCAB = 16


@dataclass(frozen=True)
class Outer:
    """Arguments of `OuterStep`."""

    every: int
    lr: float = 1.0
    momentum: float = 0.0
    delay: int = 0


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def loss(net: nn.Module, replica: int, step: int) -> Tensor:
    """Mean over the targets of one replica's share of a batch."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    x = torch.randn(8, 6, generator=generator)
    teacher = torch.randn(6, 3, generator=torch.Generator().manual_seed(5))
    return F.mse_loss(net(x), torch.tanh(x @ teacher))


def whole_pieces(net: nn.Module) -> list[Piece]:
    return [Piece(part, 0, p.numel(), p) for p, part in whole_parts([net]).items()]


def values(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def inner_update(net: nn.Module, optimizer: torch.optim.Optimizer, replica: int, step: int) -> None:
    optimizer.zero_grad()
    loss(net, replica, step).backward()
    optimizer.step()


def make_outer(net: nn.Module, size: int, outer: Outer) -> OuterStep:
    mesh = make_mesh(Layout(replicate=size), "cpu")
    return OuterStep(whole_pieces(net), mesh, outer.every, outer.lr, outer.momentum, outer.delay)


def trajectory(rank: int, size: int, outer: Outer, steps: int) -> list[tuple[list[Tensor], list[Tensor], int, bool]]:
    """After each step: parameters, anchor, the step at which an exchange is due, and whether one was applied."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    meeting = make_outer(net, size, outer)
    seen = []
    for step in range(1, steps + 1):
        inner_update(net, optimizer, rank, step)
        changed = meeting.after_update(step)
        anchor = [tensor.clone() for tensor in meeting.replica_state.shared["anchor"]]
        seen.append((values(net), anchor, meeting.due, changed))
    meeting.settle()
    return seen


def plain_sgd(rank: int, size: int, outer: Outer, steps: int) -> list[Tensor]:
    """Parameters after some steps of SGD without momentum."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    meeting = make_outer(net, size, outer)
    for step in range(1, steps + 1):
        inner_update(net, optimizer, rank, step)
        meeting.after_update(step)
    return values(net)


def resumed(rank: int, size: int, outer: Outer, steps: int, saved: int, extra: bool) -> list[list[Tensor]]:
    """Parameters after each step of a run that is saved after `saved` steps and goes on from what was saved."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    meeting = make_outer(net, size, outer)
    seen = []
    for step in range(1, steps + 1):
        inner_update(net, optimizer, rank, step)
        meeting.after_update(step)
        seen.append(values(net))
        if step == saved:
            meeting.settle()
            old, parameters, moments = meeting.replica_state, values(net), optimizer.state_dict()
            net = model()
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
            optimizer.load_state_dict(moments)
            meeting = make_outer(net, size, outer)
            fill(list(net.parameters()), parameters)
            new = meeting.replica_state
            for kind in old.shared:
                fill(new.shared[kind], old.shared[kind])
            if extra:
                fill([new.extra[name] for name in old.extra], list(old.extra.values()))
    meeting.settle()
    return seen


@torch.no_grad()
def fill(into: list[Tensor] | list[nn.Parameter], what: list[Tensor]) -> None:
    for target, value in zip(into, what, strict=True):
        target.copy_(value)


def goes_on_while_others_lag(rank: int, size: int) -> list[int]:
    """Rank 1 reaches the meeting only when it hears that rank 0 has long left it."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    meeting = make_outer(net, size, Outer(every=4, delay=2))
    word = torch.zeros(1)
    due = []
    for step in range(1, 8):
        inner_update(net, optimizer, rank, step)
        if rank == 1 and step == 4:
            dist.recv(word, 0)
        meeting.after_update(step)
        due.append(meeting.due)
        if rank == 0 and step == 5:
            dist.send(word, 1)
    return due


def tied_copies(rank: int, size: int) -> Tensor:
    """A tied tensor's values after a meeting of three replicas of two stages; its place differs between stages."""
    mesh = make_mesh(Layout(pp=2, replicate=size // 2), "cpu")
    stage, replica = mesh.index("pp"), mesh.index("replicate")
    torch.manual_seed(7)
    tied = nn.Parameter(torch.randn(40))
    other = nn.Parameter(torch.randn(64 if stage == 0 else 9))
    piece = Piece(Part("tied", (40,), tied_stage_rank=1 - stage), 0, 40, tied)
    beside = Piece(Part("other", tuple(other.shape)), 0, other.numel(), other)
    pieces = [beside, piece] if stage == 0 else [piece, beside]
    outer = OuterStep(pieces, mesh, every=1, lr=0.7, momentum=0.9)
    with torch.no_grad():
        tied.add_(torch.randn(40, generator=torch.Generator().manual_seed(replica)))
    outer.after_update(1)
    return tied.detach()


def sentences(replica: int, step: int) -> Tensor:
    """`[B, T + 1]` tokens of a language in which each word has a likely successor, and noise.

    Replicas see different words, even or odd ones, so that each of them knows half of the language at best.
    """
    generator = torch.Generator().manual_seed(100_000 * (replica + 1) + step)
    words = [2 * torch.randint(0, VOCAB // 2, (4,), generator=generator) + replica % 2]
    for _ in range(12):
        noise = torch.rand(4, generator=generator) < 0.1
        random = 2 * torch.randint(0, VOCAB // 2, (4,), generator=generator) + replica % 2
        words.append(torch.where(noise, random, (words[-1] + 6) % VOCAB))
    return torch.stack(words, dim=1)


def train_language(rank: int, size: int, outer: Outer | None, steps: int) -> float:
    """Train a small decoder; returns the loss of the replicas' mean model on sentences that it has not seen.

    Without `outer` gradients are averaged in every step.
    """
    net = GPT(vocab_size=VOCAB, dim=16, layers=1, heads=2, max_seq_len=16)
    init_parameters(net, seed=0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    meeting = None if outer is None else make_outer(net, size, outer)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        language_loss(net, sentences(rank, step)).backward()
        if meeting is None:
            average([p.grad for p in net.parameters() if p.grad is not None], size)
        optimizer.step()
        if meeting is not None:
            meeting.after_update(step)
    if meeting is not None:
        meeting.settle()
    with torch.no_grad():
        average([p.data for p in net.parameters()], size)
        return float(language_loss(net, torch.cat([sentences(1000 + n, n) for n in range(32)])))


def language_loss(net: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def average(tensors: list[Tensor], size: int) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor.div_(size)
