"""Gradients on their way from backward passes to sums, and the moment at which each bucket is sent off.

A bucket is sent when every gradient that the reducing pass brings has come; every rank must send the buckets in the
same order, so a complete one waits for those before it. How many gradients a parameter gets in such a pass (several,
if its layer is computed again in parts; none, if only weights of matrices come in it) is seen in the first one, at
whose end all buckets are sent. When a bucket is sent has no influence on its sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from dthpc.comm.collectives import BufferPool, Pending
from dthpc.parallel.sharding.bucket import Bucket, Slot
from dthpc.parallel.sharding.reduction import Reduction

IN_FLIGHT = 2
"""Reductions of transient buffers that may be on their way before the oldest is waited for (stages 2 and 3)."""


class Gradients:
    """Receives every gradient of a step, and sends the buckets off."""

    def __init__(self, buckets: Sequence[Bucket], reduction: Reduction, pool: BufferPool, every_pass: bool) -> None:
        """Attach to the parameters.

        Args:
            buckets: in the order in which they are sent.
            reduction: how they are summed.
            pool: room for transient gradients.
            every_pass: whether each pass is reduced (ZeRO 2 and 3) or only the last of a step.
        """
        self._buckets = buckets
        self._reduction = reduction
        self._pool = pool
        self._every_pass = every_pass
        self._chunk: int | None = None
        self._learned: set[int] = set()
        self._hooks = self._calls = 0
        self._queue: Sequence[Bucket] = buckets
        self._next = 0
        self._pending: list[Pending] = []
        self._slots = {slot.parameter: slot for bucket in buckets for slot in bucket.slots}
        for slot in self._slots.values():
            hook = partial(self._on_gradient, slot)
            slot.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Start a step."""
        for bucket in self._buckets:
            bucket.drop(self._pool)
            bucket.launched = bucket.summed = False
            bucket.missing = len(bucket.kind.chunks)
            for slot in bucket.slots:
                slot.used = slot.hooked = False
                slot.seen.clear()
                bucket.missing += sum(slot.expected.get(chunk, 1) for chunk in bucket.kind.chunks)
        self._next = 0

    @contextmanager
    def reducing(self, chunk: int) -> Iterator[None]:
        """Around a pass after which the gradients that it brings to a chunk are complete."""
        self._open(chunk)
        try:
            yield
            self._close(chunk)
        finally:
            self._chunk = None

    def ready(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Take a gradient that autograd does not know of."""
        slot = self._slots.get(parameter)
        if slot is not None:
            self._calls += 1
            self._arrive(slot, gradient)

    def finish(self) -> None:
        """Send what was not sent, wait, and make all sums."""
        if self._every_pass:
            left = [slot.part.name for slot in self._slots.values() if slot.filled]
            if left:
                raise RuntimeError(f"gradients came outside of a pass that reduces them: {', '.join(left[:5])}")
        else:
            while self._next < len(self._buckets):
                self._launch(self._buckets[self._next])
                self._next += 1
        self._wait(0)
        if self._every_pass:
            for bucket in self._buckets:
                if not bucket.summed:
                    bucket.share.zero_()
        self._reduction.rest(self._buckets)
        for bucket in self._buckets:
            bucket.present()

    def abandon(self) -> None:
        """Drop everything since the step began."""
        self._wait(0)
        for bucket in self._buckets:
            bucket.dismiss()
        self.begin()

    def _on_gradient(self, slot: Slot, parameter: nn.Parameter) -> None:
        # The hook runs also where a layer has left its weight's gradient for later.
        if parameter.grad is None:
            return
        slot.hooked = True
        self._hooks += 1
        self._arrive(slot, parameter.grad)

    def _arrive(self, slot: Slot, gradient: Tensor) -> None:
        bucket = slot.bucket
        if bucket.launched:
            raise RuntimeError(
                f"parameter {slot.part.name} got a gradient after the gradients of its bucket were complete: "
                "in earlier steps fewer gradients came to it in the last backward pass"
            )
        bucket.receive(slot, gradient, self._pool)
        slot.used = True
        chunk = self._chunk
        if chunk is None:
            return
        seen = slot.seen[chunk] = slot.seen.get(chunk, 0) + 1
        if chunk in self._learned and seen <= slot.expected[chunk]:
            bucket.missing -= 1
            self._advance()

    def _open(self, chunk: int) -> None:
        self._chunk = chunk
        self._hooks = self._calls = 0
        mine = [bucket for bucket in self._buckets if chunk in bucket.kind.chunks]
        if self._every_pass:
            self._queue, self._next = mine, 0
            for bucket in mine:
                bucket.missing = sum(slot.expected.get(chunk, 1) for slot in bucket.slots)
                for slot in bucket.slots:
                    slot.seen.clear()
        else:
            for bucket in mine:
                bucket.missing -= 1
        self._advance()

    def _advance(self) -> None:
        while self._next < len(self._queue):
            bucket = self._queue[self._next]
            if bucket.missing or not self._knows(bucket):
                return
            self._launch(bucket)
            self._next += 1

    def _knows(self, bucket: Bucket) -> bool:
        if self._every_pass:
            return self._chunk in self._learned
        return self._learned.issuperset(bucket.kind.chunks)

    def _close(self, chunk: int) -> None:
        if chunk not in self._learned and self._hooks + self._calls:
            self._learn(chunk)
        if self._every_pass:
            for bucket in self._queue[self._next :]:
                self._launch(bucket)
            for bucket in self._queue:
                bucket.launched = False
            self._queue, self._next = (), 0

    def _learn(self, chunk: int) -> None:
        """Note what the pass brought; one for the weights of matrices alone brings other parameters nothing more."""
        weights_alone = self._calls > 0 and self._hooks == 0
        for slot in self._slots.values():
            if chunk in slot.bucket.kind.chunks:
                least = 0 if weights_alone and slot.hooked else 1
                slot.expected[chunk] = max(slot.seen.get(chunk, 0), least)
        self._learned.add(chunk)

    def _launch(self, bucket: Bucket) -> None:
        bucket.complete(self._pool)
        bucket.launched = True
        pending = self._reduction.first(bucket)
        if pending is not None:
            self._pending.append(pending)
        if self._every_pass:
            bucket.detach()
            self._wait(IN_FLIGHT)

    def _wait(self, most: int) -> None:
        while len(self._pending) > most:
            self._pending.pop(0).wait()
