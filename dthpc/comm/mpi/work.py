"""Operations as `torch.distributed` knows them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.futures import Future

from dthpc.comm.mpi.operation import Operation


class MPIWork(dist.Work):
    """An operation of an MPI group on its way."""

    def __init__(self, operation: Operation, result: Any) -> None:
        """Take an operation, and the tensors that it fills."""
        super().__init__()
        self._operation = operation
        self._result = result
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return when the result is there; the waiting thread drives the operation.

        Raises:
            CommunicationError: it failed, or did not end within the group's time-out, or within `timeout` if not 0.
        """
        seconds = timeout.total_seconds()
        self._operation.wait(seconds if seconds > 0 else None)
        return True

    def get_future(self) -> Future[Any]:
        """A future of the tensors."""
        if self._future is None:
            self._future = Future()
            self._operation.then(_fulfil(self._future, self._result))
        return self._future

    def result(self) -> Any:
        """The tensors."""
        return self._result

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return self._operation.poll()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._operation.poll() and self._operation.failure is None

    def exception(self) -> BaseException | None:
        """What went wrong."""
        return self._operation.failure

    def source_rank(self) -> int:
        """The group's rank that sent what was received."""
        return int(self._operation.result)

    def _source_rank(self) -> int:
        return self.source_rank()

    def synchronize(self) -> None:
        """Return when the result is there."""
        self._operation.wait()

    def block_current_stream(self) -> None:
        """Return when the result is there: it needs no stream."""
        self._operation.wait()


def _fulfil(future: Future[Any], result: Any) -> Callable[[Operation], None]:
    def call(operation: Operation) -> None:
        if operation.failure is None:
            future.set_result(result)
        else:
            future.set_exception(operation.failure)

    return call
