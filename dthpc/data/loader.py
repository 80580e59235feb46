"""Steps of samples for one rank, loaded ahead by threads, and the uneven shards of an evaluation."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from dthpc.data.sampler import sample_indices, shard_for_evaluation, share
from dthpc.data.text import IGNORED
from dthpc.errors import UserError
from dthpc.placement.apply import bind_helper


class MapDataset(Protocol):
    """A map-style data set whose items are pairs (input, target)."""

    def __len__(self) -> int:
        """Number of items."""

    def __getitem__(self, index: int, /) -> Any:
        """One item, a pair of tensors, arrays, numbers or nests of those."""


class StepBatch(NamedTuple):
    """What one rank gets for one step."""

    inputs: Any
    """Inputs of this rank's samples, stacked, `[b, …]`; b is 0 where a last, short step leaves nothing for the rank."""

    targets: Any
    """Targets of the same samples, `[b, …]`."""

    consumed: int
    """Global samples consumed once this step is done: the sampler's whole state."""

    waited_s: float
    """Seconds that the caller waited for this batch."""

    first: int = 0
    """Global number of the first of this rank's samples, which follow one another: row r is sample first + r."""


class StepLoader(Iterator[StepBatch]):
    """Iterates over steps from any number of consumed samples on; close it, or use it as a context manager.

    Step k of this loader uses global samples [start + k B, start + (k + 1) B), cut at the total, of which each rank
    gets a contiguous share; see `dthpc.data.sampler` for which items those are. Batches run across the ends of epochs.
    """

    def __init__(
        self,
        dataset: MapDataset,
        seed: int,
        global_batch: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        start_sample: int = 0,
        total_samples: int | None = None,
        workers: int = 1,
        prefetch: int = 2,
        pin_memory: bool | None = None,
    ) -> None:
        """Start loading.

        Args:
            dataset: map-style data set of (input, target) pairs; it must be thread-safe if there are several workers.
            seed: of the order of the samples.
            global_batch: samples of a step over all ranks.
            dp_rank: data-parallel rank.
            dp_size: number of data-parallel ranks.
            start_sample: samples that were consumed before.
            total_samples: samples after which the iteration ends, counted from 0; `None` for never.
            workers: threads that load ahead; 0 loads in the caller.
            prefetch: steps that each worker loads ahead.
            pin_memory: whether batches lie in page-locked memory; `None` for where CUDA is available.

        Raises:
            UserError: the data set is empty.
        """
        if not len(dataset):
            raise UserError("the data set has no samples", key="data", instead="a data set that is not empty")
        self.consumed = start_sample
        """Global samples consumed by the steps that were handed out."""
        self.waited_s = 0.0
        """Seconds that the caller waited for batches so far."""
        self._dataset, self._seed, self._batch = dataset, seed, global_batch
        self._rank, self._size, self._total = dp_rank, dp_size, total_samples
        self._pin = torch.cuda.is_available() if pin_memory is None else pin_memory
        self._planned = start_sample
        self._closed = False
        self._ahead: deque[Future[tuple[Any, Any]]] = deque()
        self._pool = ThreadPoolExecutor(workers, "dthpc-loader", initializer=bind_helper) if workers else None
        self._depth = workers * max(prefetch, 1)
        self._plan_ahead()

    def __iter__(self) -> StepLoader:
        return self

    def __next__(self) -> StepBatch:
        """The next step's batch.

        Raises:
            ValueError: the loader is closed.
            Exception: whatever the data set raised; the loader is closed then.
        """
        began = time.perf_counter()
        if self._closed:
            raise ValueError("the loader is closed")
        start, stop = self.consumed, self._stop_after(self.consumed)
        if stop <= start:
            raise StopIteration
        try:
            inputs, targets = self._ahead.popleft().result() if self._pool else self._load(start, stop)
        except BaseException:
            # Going on would pass over the samples of this step.
            self.close()
            raise
        self._plan_ahead()
        waited = time.perf_counter() - began
        self.consumed = stop
        self.waited_s += waited
        return StepBatch(inputs, targets, stop, waited, share(start, stop, self._rank, self._size).start)

    def __enter__(self) -> StepLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop loading and end the threads; what was loaded ahead is dropped."""
        self._closed = True
        self._ahead.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _plan_ahead(self) -> None:
        while self._pool is not None and len(self._ahead) < self._depth:
            start, stop = self._planned, self._stop_after(self._planned)
            if stop <= start:
                return
            self._planned = stop
            self._ahead.append(self._pool.submit(self._load, start, stop))

    def _stop_after(self, start: int) -> int:
        stop = start + self._batch
        return stop if self._total is None else min(stop, self._total)

    def _load(self, start: int, stop: int) -> tuple[Any, Any]:
        mine = share(start, stop, self._rank, self._size)
        items = sample_indices(self._seed, len(self._dataset), np.arange(mine.start, mine.stop))
        inputs, targets = _collated(self._dataset, items.tolist())
        if self._pin:
            return _pinned(inputs), _pinned(targets)
        return inputs, targets


def evaluation_batches(
    dataset: MapDataset,
    batch: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    samples: int | None = None,
    same_count: bool = False,
) -> Iterator[tuple[Any, Any]]:
    """Batches of one rank's shard of an evaluation; over all ranks every chosen sample occurs exactly once.

    Args:
        dataset: map-style data set of (input, target) pairs.
        batch: samples of a batch, at most.
        dp_rank: data-parallel rank.
        dp_size: number of data-parallel ranks.
        samples: how many samples to use, spread evenly over the data set; `None` for all.
        same_count: give every rank the same number of batches, the last of which may be empty, for models whose forward
            pass is collective.

    Yields:
        Inputs and targets, `[b, …]` each.
    """
    items = shard_for_evaluation(len(dataset), dp_rank, dp_size, samples)
    longest = len(shard_for_evaluation(len(dataset), 0, dp_size, samples)) if same_count else len(items)
    for start in range(0, longest, batch):
        yield _collated(dataset, items[start : start + batch])


def _collated(dataset: MapDataset, items: Sequence[int]) -> tuple[Any, Any]:
    # With nothing to do a rank still gets the shapes and types of its batches, with no rows.
    pairs = [_pair(dataset[item]) for item in items or [0]]
    inputs = _stack([pair[0] for pair in pairs], 0)
    targets = _stack([pair[1] for pair in pairs], IGNORED)
    return (inputs, targets) if items else (_no_rows(inputs), _no_rows(targets))


def _pair(sample: Any) -> tuple[Any, Any]:
    if isinstance(sample, (tuple, list)) and len(sample) == 2:
        return sample[0], sample[1]
    raise UserError(
        f"an item of the data set is a {type(sample).__name__}, not a pair",
        key="data._target_",
        instead="a data set whose items are (input, target)",
    )


def _stack(values: list[Any], padding: int) -> Any:
    if all(isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim for value in values):
        # Arrays are copied, since torch cannot hold those that are read-only, such as memory maps.
        tensors = [torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value for value in values]
        if len({tensor.shape for tensor in tensors}) > 1:
            return pad_sequence(tensors, batch_first=True, padding_value=padding)
        return torch.stack(tensors)
    return default_collate(values)


def _no_rows(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _no_rows(inner) for key, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return [_no_rows(inner) for inner in value]
    return value[:0]


def _pinned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.pin_memory()
    if isinstance(value, dict):
        return {key: _pinned(inner) for key, inner in value.items()}
    if isinstance(value, (tuple, list)):
        return [_pinned(inner) for inner in value]
    return value
