"""What travels between neighbouring stages: activations forward, their gradients backward, as point-to-point messages.

Both ends derive from the schedule and the sizes of the micro-batches what comes when and how large it is, so a message
is the bare tensor. Only the form of a stage's output (number format, and all dimensions but the first) is told by a
message of its own, once for each kind of input. Stages on the same rank hand over without a message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor

from dthpc.errors import UserError
from dthpc.parallel.pipeline.schedule import Action, Kind, Schedule
from dthpc.parallel.pipeline.verify import made_by, needs
from dthpc.parallel.pipeline.wires import SHORT, Place, Wires, connect

AHEAD = 2
"""Receives that are posted before they are needed, at least: a message travels while the rank computes, and a posted
receive saves the sender a round trip. Each costs one activation of memory."""

AHEAD_BYTES = 1 << 22
"""On CPUs so many bytes of small messages are posted at once, while the rank waits anyway."""

FIRST_TAG = 1 << 20
"""Tags from here on are the links', so that they share a process group with others."""

MAX_DIMS = 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Size(NamedTuple):
    """What every rank of a pipeline knows of a micro-batch without being told."""

    rows: int
    """Samples."""

    signature: Hashable = ()
    """Whatever else decides the form of activations, such as the length of the sequences."""

    runs: bool = True
    """Whether it passes through the stages at all; one without rows may be left out."""


Boundary = tuple[int, Hashable, bool]


class Shape(NamedTuple):
    """How a message looks."""

    size: torch.Size
    """Its dimensions."""

    dtype: torch.dtype
    """Its number format."""

    short: bool
    """Whether it goes over a wire, where there is one."""


class Form(NamedTuple):
    """How a stage's output looks."""

    dtype: torch.dtype
    """Its number format."""

    factor: int
    """Its first dimension for each row of the micro-batch."""

    tail: tuple[int, ...]
    """Its other dimensions."""

    def shape(self, rows: int, short: int) -> Shape:
        """Of the output of a micro-batch of that many rows; up to how many bytes it counts as short."""
        size = torch.Size((rows * self.factor, *self.tail))
        return Shape(size, self.dtype, rows > 0 and size.numel() * self.dtype.itemsize <= short)


@dataclass(slots=True, eq=False)
class Message:
    """What travels between two stages; an object for each end of each message of a step, as steps are alike."""

    made: Action
    """What makes it, which is its name."""

    peer: int
    """The rank at the other end."""

    group: dist.ProcessGroup | None
    """Where it travels."""

    tag: int
    """Its tag there; the one after it is that of the message that tells its form."""

    near: bool
    """Whether a wire goes to the peer."""

    here: bool
    """Whether the peer is this rank, so that it does not travel."""

    shape: Shape | None = None
    """How it looks, once that is known."""

    place: Place | None = None
    """Where it lies when it goes over a wire, once that is known."""


class Pass(NamedTuple):
    """An action, and what it takes and gives: None at the ends of the pipeline, and where a micro-batch is left out."""

    action: Action
    need: Message | None
    made: Message | None


class Links:
    """The links of one rank, over any number of steps.

    Messages are named by the action that makes them, a gradient's as `B` also where `I` makes it.
    """

    def __init__(
        self, schedule: Schedule, group: dist.ProcessGroup | None, device: torch.device, short: int = SHORT
    ) -> None:
        """Take what stays the same over steps; collective over the group.

        Args:
            schedule: the one of training; evaluations may follow another of the same name, ranks and chunks.
            group: the pipeline's ranks, in order; None for a single rank.
            device: where activations are.
            short: bytes of the longest message that goes over a wire, where there is one; the same on all ranks, at
                most `SHORT`.
        """
        self._schedule, self._group, self._device, self._short = schedule, group, device, short
        self._rank = dist.get_rank(group) if group is not None else 0
        self._wires = _wires(schedule, group if short else None, self._rank, device)
        self._channels = _Channels(schedule, group, self._wires, self._rank)
        self._forms: dict[Boundary, Form] = {}
        self._sizes: Sequence[Size] = ()
        self._actions: Sequence[Action] = ()
        self._routes: list[Pass] = []
        self._passes: list[Pass] = []
        self._coming: deque[Message] = deque()
        self._posted: dict[Action, tuple[Any, Tensor]] = {}
        self._sent: dict[Action, list[tuple[Any, Tensor]]] = {}
        self._known = _receipts(schedule, self._rank)
        self._receipts = self._known
        self._arrived: list[Action] = []
        self._here: dict[Action, Tensor | None] = {}

    @property
    def unsettled(self) -> int:
        """Messages that were sent, of which it is not known yet that they have been taken; their memory is held."""
        return sum(map(len, self._sent.values()))

    def begin(self, actions: Sequence[Action], sizes: Sequence[Size]) -> Sequence[Pass]:
        """Learn what this rank will do, and with micro-batches of which sizes.

        Returns:
            For each action what `receive` and `send` want to know; made when actions or sizes change.
        """
        others = actions != self._actions
        if others:
            self._actions, self._routes = actions, [self._route(action) for action in actions]
        if others or sizes != self._sizes:
            self._sizes = sizes
            self._passes = [self._pass(route) for route in self._routes]
        self._receipts = self._known if len(sizes) == self._schedule.micro_batches else {}
        self._coming = deque(need for _, need, _ in self._passes if need is not None and not need.here)
        return self._passes

    def receive(self, need: Message | None) -> Tensor | None:
        """What an action takes from the stage before it or after it.

        Returns:
            A tensor that nobody else holds; None where the action takes nothing, or the micro-batch is left out.
        """
        if need is None:
            return None
        if need.place is not None:
            buffer = self._wires.receive(need.peer, need.tag, need.place)
        elif need.here:
            return self._here.pop(need.made)
        else:
            buffer = self._receive(need)
        if self._sent:
            self._arrived.append(need.made)
        return buffer

    def send(self, made: Message | None, tensor: Tensor | None) -> None:
        """Give what an action made to the stage after it or before it; it must not be changed any more.

        Raises:
            UserError: it is nothing that can travel.
        """
        if made is not None:
            assert tensor is not None
            place = made.place
            if place is not None and tensor.shape == place.size and tensor.dtype is place.dtype:
                self._wires.send(made.peer, made.tag, tensor, place)
            elif made.here:
                self._here[made.made] = tensor
            else:
                self._send(made, tensor)
        # The neighbour waits for the message, nobody for this.
        if self._arrived:
            self._settle()

    def _receive(self, need: Message) -> Tensor:
        """As `receive`, of a message that goes through the process group or whose form is not known yet."""
        made = need.made
        if need.shape is None:
            self._shape_of(need)
        if need.place is not None:
            return self._wires.receive(need.peer, need.tag, need.place)
        if self._coming and (len(self._posted) <= AHEAD or made not in self._posted):
            self._post_ahead(made)
        work, buffer = self._posted.pop(made)
        if work is not None:
            work.wait()
        return buffer

    def _send(self, message: Message, tensor: Tensor) -> None:
        shape = message.shape
        if shape is None or tensor.shape != shape.size or tensor.dtype is not shape.dtype:
            self._look_at(message, tensor)
        if message.place is not None:
            self._wires.send(message.peer, message.tag, tensor, message.place)
        elif self._sizes[message.made.micro_batch].rows:
            tensor = tensor.contiguous()
            self._sent.setdefault(message.made, []).append((_isend(message, tensor), tensor))

    def finish(self) -> None:
        """Wait until everything sent has been taken, or needs no memory of this rank's any more."""
        self._wires.finish()
        for sent in self._sent.values():
            for work, _ in sent:
                work.wait()
        self._sent.clear()
        self._arrived.clear()

    def abandon(self) -> None:
        """Forget a step that went wrong; neither the process group nor this object is of use after it."""
        self._wires.close()
        for held in (self._sent, self._posted, self._coming, self._arrived, self._here):
            held.clear()

    def _settle(self) -> None:
        """Let go of the memory of what was sent, as far as what has arrived since proves that it was taken."""
        for arrived in self._arrived:
            for taken in self._receipts.get(arrived, ()):
                for work, _ in self._sent.pop(taken, ()):
                    work.wait()
        self._arrived.clear()

    def _post_ahead(self, first: Action) -> None:
        """Post receives, that of `first` at least."""
        small = AHEAD_BYTES if self._device.type == "cpu" else 0
        while self._coming:
            needed = first not in self._posted
            if not needed and len(self._posted) > AHEAD and small <= 0:
                break
            message = self._coming[0]
            made = message.made
            shape = message.shape or self._shape_of(message, must=needed)
            if shape is None:
                break
            self._coming.popleft()
            if message.place is not None:
                continue
            buffer = torch.empty(shape.size, dtype=shape.dtype, device=self._device)
            self._posted[made] = _irecv(message, buffer) if self._sizes[made.micro_batch].rows else None, buffer
            small -= buffer.nbytes

    @overload
    def _shape_of(self, need: Message) -> Shape: ...

    @overload
    def _shape_of(self, need: Message, must: bool) -> Shape | None: ...

    def _shape_of(self, need: Message, must: bool = True) -> Shape | None:
        """The shape of a message that will come; None if that means waiting to learn its form, and it need not be."""
        size = self._sizes[need.made.micro_batch]
        form = self._forms.get(_boundary(need.made, size))
        if form is None:
            if not must:
                return None
            form = self._learn_form(need)
        return self._note(need, form)

    def _look_at(self, message: Message, tensor: Tensor) -> None:
        """Check a message's form, and tell it where the receiver does not know it."""
        made = message.made
        size = self._sizes[made.micro_batch]
        form = form_of(tensor, size.rows, made.stage)
        known = self._forms.get(_boundary(made, size))
        if known is not None and form != known:
            raise UserError(
                f"stage {made.stage} gave {_words(form)} for each row, and {_words(known)} before, for inputs that "
                "look alike: the next stage cannot know",
                key="model._target_",
                instead="a forward pass whose output's shape follows from its input's",
            )
        if known is None:
            dims = [*tensor.shape, *[0] * (MAX_DIMS - tensor.dim())]
            told = torch.tensor([DTYPES.index(tensor.dtype), tensor.dim(), *dims], device=self._device)
            self._sent.setdefault(made, []).append((_isend(message, told, about=True), told))
            self._forms[_boundary(made, size)] = form
        self._note(message, form)

    def _note(self, message: Message, form: Form) -> Shape:
        """Keep how a message looks, for steps of the same sizes."""
        shape = message.shape = form.shape(self._sizes[message.made.micro_batch].rows, self._short)
        if message.near and shape.short:
            message.place = self._wires.place(shape.size, shape.dtype)
        return shape

    def _learn_form(self, need: Message) -> Form:
        size = self._sizes[need.made.micro_batch]
        told = torch.empty(2 + MAX_DIMS, dtype=torch.int64, device=self._device)
        _irecv(need, told, about=True).wait()
        kind, dims, first, *tail = told.tolist()
        form = Form(DTYPES[kind], first // max(1, size.rows), tuple(tail[: dims - 1]))
        self._forms[_boundary(need.made, size)] = form
        return form

    def _route(self, action: Action) -> Pass:
        need, made = needs(self._schedule, action), made_by(action)
        taker = None if made is None else _taker(self._schedule, made)
        return Pass(
            action,
            None if need is None else self._channels.message(need, self._schedule.rank_of(need.stage)),
            None if made is None or taker is None else self._channels.message(made, taker),
        )

    def _pass(self, route: Pass) -> Pass:
        """An action on micro-batches of these sizes."""
        for message in (route.need, route.made):
            if message is not None:
                message.shape = message.place = None
        return route if self._sizes[route.action.micro_batch].runs else Pass(route.action, None, None)


def _isend(message: Message, tensor: Tensor, about: bool = False) -> Any:
    return cast(dist.ProcessGroup, message.group).send([tensor], message.peer, message.tag + about)


def _irecv(message: Message, tensor: Tensor, about: bool = False) -> Any:
    return cast(dist.ProcessGroup, message.group).recv([tensor], message.peer, message.tag + about)


class _Channels:
    """Sends and receives, each in a channel where both ends use the same order.

    Gloo tells messages apart by tags. NCCL has none, and carries out what it is given in order: there, each chunk and
    direction gets a communicator of its own, in which both ends follow the order of micro-batches, so that a receive
    that was posted ahead never stands before a send that its neighbour waits for.
    """

    def __init__(self, schedule: Schedule, group: dist.ProcessGroup | None, wires: Wires, rank: int) -> None:
        self._ranks, self._stages, self._group = schedule.ranks, schedule.stages, group
        self._wires, self._rank = wires, rank
        self._own: dict[tuple[Kind, int, bool], dist.ProcessGroup] = {}
        if group is not None and dist.get_backend(group) == "nccl":
            members = dist.get_process_group_ranks(group)
            for kind in (Kind.F, Kind.B):
                for stage in range(schedule.stages):
                    name = self._name(Action(kind, stage, 0))
                    if name not in self._own and _taker(schedule, Action(kind, stage, 0)) is not None:
                        self._own[name] = dist.new_group(members, backend="nccl", use_local_synchronization=True)

    def message(self, made: Action, peer: int) -> Message:
        """What an action makes, on its way to or from another rank."""
        group = self._own.get(self._name(made), self._group) if self._own else self._group
        return Message(made, peer, group, self._tag(made), near=peer in self._wires, here=peer == self._rank)

    def _name(self, made: Action) -> tuple[Kind, int, bool]:
        # From the last rank to the first, between chunks, is another direction: of two ranks it is the way back.
        chunk, place = divmod(made.stage, self._ranks)
        return made.kind, chunk, place == (self._ranks - 1 if made.kind is Kind.F else 0)

    def _tag(self, made: Action) -> int:
        number = made.micro_batch * self._stages + made.stage
        return FIRST_TAG + 4 * number + 2 * (made.kind is Kind.B)


def _taker(schedule: Schedule, made: Action) -> int | None:
    """The rank that takes what an action made; None for the ends of the pipeline."""
    stage = made.stage + (1 if made.kind is Kind.F else -1)
    return schedule.rank_of(stage) if 0 <= stage < schedule.stages else None


def _neighbours(schedule: Schedule, rank: int) -> set[int]:
    """The other ranks with which a rank exchanges messages."""
    stages = [stage + by for stage in schedule.stages_of(rank) for by in (-1, 1)]
    return {schedule.rank_of(stage) for stage in stages if 0 <= stage < schedule.stages} - {rank}


def _wires(schedule: Schedule, group: dist.ProcessGroup | None, rank: int, device: torch.device) -> Wires:
    """Wires to the neighbours on this host, for tensors on the CPU."""
    if group is None or device.type != "cpu":
        return Wires({}, 0.0)
    try:
        options: Any = group._get_backend(device).options
    except (AttributeError, RuntimeError):  # a backend that keeps none
        options = None
    timeout = getattr(options, "_timeout", None) or dist.default_pg_timeout
    return Wires(connect(group, _neighbours(schedule, rank)), timeout.total_seconds(), group)


def _receipts(schedule: Schedule, rank: int) -> dict[Action, list[Action]]:
    """For each message that comes to a rank in training, which of those that it sends its sender has taken by then.

    Gloo cannot be asked whether a message has been taken, and without knowing it a rank would hold everything that it
    sends until the end of the step.
    """
    known: dict[Action, list[Action]] = {}
    for neighbour in _neighbours(schedule, rank):
        taken: list[Action] = []
        for action in schedule.actions[neighbour]:
            need, made = needs(schedule, action), made_by(action)
            if need is not None and schedule.rank_of(need.stage) == rank:
                taken.append(need)
            if made is not None and _taker(schedule, made) == rank:
                known[made], taken = taken, []
    return known


def _boundary(made: Action, size: Size) -> Boundary:
    """Between which stages something travels (the earlier one's number), for inputs of what kind."""
    # Without rows a message cannot tell how the first dimension follows from them.
    return made.stage - (made.kind is not Kind.F), size.signature, size.rows > 0


def form_of(output: Any, rows: int, stage: int) -> Form:
    """How a stage's output looks, for a micro-batch of that many rows.

    Raises:
        UserError: it is nothing that can go to another stage.
    """
    why = None
    if not isinstance(output, Tensor):
        why = f"stage {stage} gave a {type(output).__name__}"
    elif output.dtype not in DTYPES or not 1 <= output.dim() <= MAX_DIMS:
        why = f"stage {stage} gave a {output.dtype} tensor of {output.dim()} dimensions"
    elif rows and output.shape[0] % rows:
        why = f"stage {stage} gave {output.shape[0]} rows for a micro-batch of {rows}"
    if why is not None:
        raise UserError(
            f"{why}; between pipeline stages goes one floating-point tensor with the batch in its first dimension",
            key="model._target_",
            instead="cut the model where one tensor passes, or parallel.pp=1",
        )
    return Form(output.dtype, output.shape[0] // max(1, rows), tuple(output.shape[1:]))


def _words(form: Form) -> str:
    return f"{form.dtype} {[form.factor, *form.tail]}"
