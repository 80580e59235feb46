"""Where calls are seen: the methods of process groups, which every caller in Python ends up in.

That is what `torch.distributed`'s functions, code that calls the methods itself, and user code have in common. Callers
in C++ (DDP's reducer, functional collectives) do not pass here; torch's own recorder tells of theirs (`torch_record`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from dthpc.comm.shared import Exchange, Ticket
from dthpc.comm.watchdog.recorder import Recorder

OPERATIONS = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
"""Methods that communicate, over the versions of torch; those that a class lacks are passed over."""


class Hooks:
    """The wrapped methods of some classes, until `remove`."""

    def __init__(self, recorder: Recorder) -> None:
        """Wrap the methods of torch's process group and of its `Work`, and those of the exchange over memory."""
        self._recorder = recorder
        self._replaced: list[tuple[type, str, Any]] = []
        self._known: set[type] = set()
        self.add(dist.ProcessGroup)
        self._add_work(dist.Work)
        for operation in ("all_gather", "all_reduce", "barrier", "reduce_scatter"):
            self._replace(Exchange, operation, self._recorded(operation, Exchange.__dict__[operation], within=True))
        self._known.add(Ticket)
        self._replace(Ticket, "wait", self._waited(Ticket.__dict__["wait"]))

    def add(self, cls: type) -> None:
        """Wrap the communicating methods that a class defines itself, as a group written in Python does."""
        if cls in self._known or not issubclass(cls, dist.ProcessGroup):
            return
        self._known.add(cls)
        for base in cls.__mro__[1:]:
            self.add(base)
        for operation in OPERATIONS:
            if operation in cls.__dict__:
                self._replace(cls, operation, self._recorded(operation, cls.__dict__[operation]))

    def remove(self) -> None:
        """Put the original methods back."""
        while self._replaced:
            cls, name, original = self._replaced.pop()
            setattr(cls, name, original)
        self._known.clear()

    def _add_work(self, cls: type) -> None:
        for base in cls.__mro__:
            if base not in self._known and issubclass(base, dist.Work):
                self._known.add(base)
                if "wait" in base.__dict__:
                    self._replace(base, "wait", self._waited(base.__dict__["wait"]))

    def _replace(self, cls: type, name: str, wrapper: Any) -> None:
        self._replaced.append((cls, name, cls.__dict__[name]))
        # A class written in Python is found by C++ through the name of the running function: a wrapper of another name
        # would be called again and again where it stands for a method that the class inherits.
        wrapper.__code__ = wrapper.__code__.replace(co_name=name)
        wrapper.__name__ = wrapper.__qualname__ = name
        setattr(cls, name, wrapper)

    def _recorded(self, operation: str, original: Callable[..., Any], within: bool = False) -> Callable[..., Any]:
        """A method that records its calls; `within`: its object may say that they are parts of recorded ones."""
        recorder, known = self._recorder, self._known

        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            if within and not self.recorded:
                return original(self, *arguments, **options)
            entry = recorder.begin(self, operation, arguments or tuple(options.values()))
            try:
                work = original(self, *arguments, **options)
            except BaseException:
                recorder.fail(entry)
                raise
            recorder.end(entry, work)
            if work is not None and type(work) not in known:
                add_work(type(work))
            return work

        add_work = self._add_work
        return call

    def _waited(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._recorder

        def wait(self: Any, *arguments: Any, **options: Any) -> Any:
            before = recorder.begin_wait(self)
            try:
                return original(self, *arguments, **options)
            except BaseException:
                recorder.fail_wait(self)
                raise
            finally:
                recorder.end_wait(before)

        return wait
