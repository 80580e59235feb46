"""Asynchronous data parallelism: replicas train by themselves, and meet now and then.

Each replica (a place on the mesh's `replicate` axis) makes its own optimizer steps; gradients are not reduced over the
axis. Every H steps the replicas exchange how far each has come from the anchor, the parameters that they share:

    step t = k·H     Δ = mean over replicas m of (anchor - θ_m);   s_m = θ_m        (one all-reduce, on its way until …)
    step t + d       v ← μ v + Δ;   anchor ← anchor - η (Δ + μ v)                   (Nesterov, as in torch.optim.SGD)
                     θ_m ← anchor + (θ_m - s_m)

With d = 0 the last line is θ_m ← anchor, and this is DiLoCo (Douillard et al. 2023, algorithm 1); with η = 1 and μ = 0
as well, it is local SGD, the plain averaging of parameters (Stich 2018, algorithm 1), and with H = 1 and plain SGD the
synchronous method. With d > 0 the replicas make d further steps while the exchange travels, as in Streaming DiLoCo
(Douillard et al. 2025, section 2.3). There a replica then mixes its parameters with the anchor; here it keeps all that
it learned meanwhile, as in CoCoD-SGD (Shen et al. 2019, algorithm 1, where d = H, η = 1 and μ = 0). So nothing is lost
and nothing counted twice: what came after s_m is part of the next Δ.

Staleness is bounded by construction, not by timing: an exchange is applied exactly d steps after it began, on all
replicas, however early it arrived; a replica that would run ahead waits for it there. A replica never lacks as many as
H + d steps of the others' work. The same run twice gives the same bits.

Gradients: each replica trains on its own share of the global batch, so its gradient must be the mean over its own
targets: the global batch's mean loss times the number of replicas, if shares are equally large. The mean of such
replicas then moves as far in a step as the synchronous method.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dthpc.comm.collectives import Channel, Pending
from dthpc.parallel.mesh import Mesh
from dthpc.parallel.parts import Piece


@dataclass(frozen=True)
class ReplicaState:
    """What a checkpoint needs to know about replicas beside their parameters and optimizers; filled in place."""

    index: int
    """Which replica this rank belongs to. Its parameters and optimizer state are its own."""

    count: int
    """How many there are."""

    shared: dict[str, list[Tensor]]
    """Equal on all replicas; by kind a tensor for each piece, of its shape, fp32: `anchor`; with momentum `momentum`;
    with a delay `arriving`, the sum over replicas of an exchange that is not applied yet, and else zeros."""

    extra: dict[str, Tensor]
    """This rank's alone: `outer.due` (int64 `[1]`), the step at which the exchange under way is applied, 0 without one,
    and `outer.sent.<n>` (fp32), the parameters s_m when it began. Empty without a delay. Where it cannot be restored,
    the exchange is as if it had not begun, and its steps are part of the next one."""


class OuterStep:
    """Takes the replicas' outer steps."""

    def __init__(
        self, pieces: list[Piece], mesh: Mesh, every: int, lr: float = 0.7, momentum: float = 0.9, delay: int = 0
    ) -> None:
        """Take the pieces' values, which must be equal on all replicas, as the first anchor.

        Args:
            pieces: what this rank's optimizer updates; fp32.
            mesh: with the `replicate` axis.
            every: steps between two meetings, H.
            lr: learning rate of the outer step, η.
            momentum: its momentum, μ.
            delay: steps that an exchange travels, d; less than `every`.

        Raises:
            ValueError: `every` is not at least 1, or `delay` does not lie in [0, every).
        """
        if every < 1 or not 0 <= delay < every:
            raise ValueError(f"every={every} must be at least 1, and delay={delay} from 0 to less than it")
        self.every, self.lr, self.momentum, self.delay = every, lr, momentum, delay
        self._mesh = mesh
        self._group = mesh.group("replicate")
        self._pieces = pieces
        self._flats = [_Flat(mine, copied, self, mesh) for mine, copied in _by_kind(pieces, mesh)]
        self._works: list[Pending] = []
        self._due = torch.zeros(1, dtype=torch.int64)

    @property
    def due(self) -> int:
        """The step after which the exchange under way is applied; 0 without one."""
        return int(self._due)

    @torch.no_grad()
    def after_update(self, step: int, last: bool = False) -> bool:
        """Meet the other replicas if it is time; collective over `replicate`, at the same steps on all ranks.

        Call it after the optimizer's update, and before the pieces' values are published.

        Args:
            step: updates made so far, this one included.
            last: whether it is the run's last: then replicas meet in any case, without a delay, and end as one model.

        Returns:
            Whether the pieces' values have changed.
        """
        if last and self.due:
            self._apply()
        if step % self.every == 0 or last:
            self._works = [flat.send(self._group) for flat in self._flats]
            self._due.fill_(step if last else step + self.delay)
        if self.due != step:
            return False
        self._apply()
        return True

    def _apply(self) -> None:
        self.settle()
        for flat in self._flats:
            flat.apply()
        self._due.zero_()

    def settle(self) -> None:
        """Wait for the exchange under way, which stays to be applied when it is due.

        Before the state is saved; training goes on as if it had not been called.
        """
        for work in self._works:
            work.wait()
        self._works = []

    @property
    def replica_state(self) -> ReplicaState:
        """What to save, after `settle`, and to restore in place."""
        count, index = self._mesh.size("replicate"), self._mesh.index("replicate")
        views: dict[str, dict[int, Tensor]] = {}
        for flat in self._flats:
            for kind, tensor in flat.shared():
                mine = ((id(piece), view.view_as(piece.tensor)) for piece, view in flat.views(tensor))
                views.setdefault(kind, {}).update(mine)
        shared = {kind: [of[id(piece)] for piece in self._pieces] for kind, of in views.items()}
        extra = {f"outer.sent.{n}": flat.sent for n, flat in enumerate(self._flats) if flat.sent is not None}
        if self.delay:
            extra["outer.due"] = self._due
        return ReplicaState(index, count, shared, extra)


class _Flat:
    """The anchor of some pieces, and what travels for them, each in one storage `[elements]`, fp32."""

    def __init__(self, pieces: list[Piece], copied: bool, step: OuterStep, mesh: Mesh) -> None:
        self._pieces, self._copied, self._step = pieces, copied, step
        self._replicas = mesh.size("replicate")
        self.anchor = torch.cat([piece.tensor.detach().flatten() for piece in pieces])
        self.velocity = torch.zeros_like(self.anchor) if step.momentum else None
        self.sent = torch.zeros_like(self.anchor) if step.delay else None
        # Beside the group's device, also where the pieces are kept in host memory.
        self.arriving = torch.zeros_like(self.anchor, device=mesh.device_type)

    def shared(self) -> Iterator[tuple[str, Tensor]]:
        """What is equal on all replicas between two steps."""
        yield "anchor", self.anchor
        if self.velocity is not None:
            yield "momentum", self.velocity
        if self.sent is not None:
            yield "arriving", self.arriving

    def views(self, flat: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """For each piece its range of a storage of all of them."""
        return zip(self._pieces, torch.split(flat, [piece.tensor.numel() for piece in self._pieces]), strict=True)

    def send(self, group: dist.ProcessGroup | None) -> Pending:
        """Start the sum over replicas of how far each has come, into `arriving`."""
        for piece, view in self.views(self.arriving):
            view.copy_(piece.tensor.flatten())
        if self.sent is not None:
            self.sent.copy_(self.arriving)
        torch.sub(self.anchor.to(self.arriving.device), self.arriving, out=self.arriving)
        if group is None:
            return Pending([])
        return self._sum_in_order(group) if self._copied else Channel(group).all_reduce(self.arriving)

    def _sum_in_order(self, group: dist.ProcessGroup) -> Pending:
        gathered = self.arriving.new_empty(self._replicas * self.arriving.numel())
        pending = Channel(group).all_gather(gathered, self.arriving)

        def add() -> None:
            first, *others = gathered.chunk(self._replicas)
            self.arriving.copy_(first)
            for other in others:
                self.arriving.add_(other)

        return Pending([pending], add)

    def apply(self) -> None:
        """Take the outer step with what has arrived, and move the pieces along."""
        gradient = self.arriving.div_(self._replicas).to(self.anchor.device)
        if self.velocity is not None:
            self.velocity.mul_(self._step.momentum).add_(gradient)
            gradient.add_(self.velocity, alpha=self._step.momentum)
        self.anchor.sub_(gradient, alpha=self._step.lr)
        anchors = self.views(self.anchor)
        if self.sent is None:
            for piece, anchor in anchors:
                piece.tensor.copy_(anchor.view_as(piece.tensor))
            return
        for (piece, anchor), (_, sent) in zip(anchors, self.views(self.sent), strict=True):
            piece.tensor.sub_(sent.view_as(piece.tensor)).add_(anchor.view_as(piece.tensor))
        self.sent.zero_()
        self.arriving.zero_()


def _by_kind(pieces: list[Piece], mesh: Mesh) -> Iterator[tuple[list[Piece], bool]]:
    """Pieces that travel together, and whether other ranks of the replica hold copies of them.

    Copies must stay equal to the last bit. An all-reduce adds each element in an order that depends on its place, and
    copies stand in different places on ranks with other layers; so those are added in the order of the replicas.
    """
    kinds: dict[tuple[torch.device, bool], list[Piece]] = {}
    for piece in pieces:
        part = piece.part
        copied = part.tied_stage_rank is not None or (part.dim is None and mesh.size("tp") > 1)
        kinds.setdefault((piece.tensor.device, copied), []).append(piece)
    return ((mine, copied) for (_, copied), mine in kinds.items())
