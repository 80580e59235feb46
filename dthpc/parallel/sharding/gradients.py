"""Gradients on their way from backward passes to sums, and the moment at which each bucket is sent off.

A bucket is sent when every gradient that the reducing pass brings has come; every rank must send the buckets in the
same order, so a complete one waits for those before it. How many gradients a parameter gets in such a pass (several,
if its layer is computed again in parts; none, if only weights of matrices come in it) is seen in the first one, at
whose end all buckets are sent. When a bucket is sent has no influence on its sum.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from dthpc.comm.collectives import BufferPool, Pending
from dthpc.comm.courier import Courier
from dthpc.parallel.sharding.bucket import Bucket, Slot
from dthpc.parallel.sharding.reduction import Reduction

VOLLEY = 8 << 20
"""Bytes of complete gradients that are sent together: fewer, larger volleys disturb the backward pass less often. The
last ones of a pass are smaller, so that little is left to travel at its end."""

SMALLEST_VOLLEY = 1 << 20
"""Bytes of the last volley of a pass; those before it double in size."""


AHEAD = 2
"""Volleys of every pass that may be under way, where no thread sees to them: their gradients take memory."""


class Gradients:
    """Receives every gradient of a step, and sends the buckets off."""

    def __init__(
        self, buckets: Sequence[Bucket], reduction: Reduction, pool: BufferPool, every_pass: bool, volley: int
    ) -> None:
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
        self._all = _Queue(buckets, min(volley, VOLLEY))
        numbers = sorted({chunk for bucket in buckets for chunk in bucket.kind.chunks})
        self._of_chunk = {
            chunk: _Queue([bucket for bucket in buckets if chunk in bucket.kind.chunks], min(volley, VOLLEY))
            for chunk in numbers
        }
        self._queue = self._all
        self._under_way: list[Pending] = []
        self._volleys: deque[list[Pending]] = deque()
        # Waiting for a GPU's collectives does not block, and belongs to the thread that launches its kernels. Where one
        # pass of a step is reduced, all waiting can be done at its end; else buffers must be free before.
        self._courier = Courier() if (reduction.on_host and every_pass) or reduction.in_levels else None
        # Nothing refers back to its owner, so that a group of ranks is let go of with the last that uses it, and not by
        # the garbage collector in some thread.
        self._slots = [(bucket, slot) for bucket in buckets for slot in bucket.slots]
        self._slot_of = {slot.parameter: (bucket, slot) for bucket, slot in self._slots}
        for number, (_, slot) in enumerate(self._slots):
            # A parameter's hook is out of the garbage collector's sight: a strong reference would keep it all for good.
            hook = partial(_tell, weakref.ref(self), number)
            slot.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Start a step."""
        for bucket in self._buckets:
            bucket.drop(self._pool)
            bucket.launched = bucket.summed = False
            # One for each chunk's last pass, which has to begin.
            bucket.missing = len(bucket.kind.chunks)
            for slot in bucket.slots:
                slot.used = slot.hooked = False
                bucket.missing += sum(slot.expected.values())
        self._queue = self._all
        self._queue.rewind()

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
        place = self._slot_of.get(parameter)
        if place is not None:
            self._calls += 1
            self._arrive(*place, gradient, False)

    def finish(self) -> None:
        """Send what was not sent, wait, and make all sums."""
        if self._every_pass:
            left = [slot.part.name for _, slot in self._slots if slot.filled]
            if left:
                raise RuntimeError(f"gradients came outside of a pass that reduces them: {', '.join(left[:5])}")
        else:
            self._send(len(self._buckets))
        self._wait()
        if self._every_pass:
            for bucket in self._buckets:
                if not bucket.summed:
                    bucket.share.zero_()
        self._reduction.rest(self._buckets)
        for bucket in self._buckets:
            bucket.present()

    def abandon(self) -> None:
        """Drop everything since the step began."""
        self._wait()
        for bucket in self._buckets:
            bucket.dismiss()
        self.begin()

    def on_gradient(self, number: int, parameter: nn.Parameter) -> None:
        """Take a gradient that autograd has just put in its place."""
        gradient = parameter.grad
        # The hook runs also where a layer has left its weight's gradient for later.
        if gradient is not None:
            bucket, slot = self._slots[number]
            slot.hooked = True
            self._hooks += 1
            self._arrive(bucket, slot, gradient, True)

    def _arrive(self, bucket: Bucket, slot: Slot, gradient: Tensor, in_place: bool) -> None:
        if bucket.launched:
            raise RuntimeError(
                f"parameter {slot.part.name} got a gradient after the gradients of its bucket were complete: "
                "in earlier steps fewer gradients came to it in the last backward pass"
            )
        bucket.receive(slot, gradient, in_place, self._pool)
        slot.used = True
        if self._chunk is not None:
            slot.count += 1
            if slot.count <= slot.due:
                bucket.missing -= 1
                if not bucket.missing:
                    self._advance()

    def _open(self, chunk: int) -> None:
        """Begin a reducing pass."""
        self._chunk = chunk
        self._hooks = self._calls = 0
        queue = self._of_chunk.get(chunk)
        if queue is None:
            return
        for bucket in queue.buckets:
            for slot in bucket.slots:
                slot.count, slot.due = 0, slot.expected.get(chunk, 0)
            if self._every_pass:
                bucket.missing = sum(slot.due for slot in bucket.slots)
            else:
                bucket.missing -= 1
        if self._every_pass:
            self._queue = queue
            queue.rewind()
        self._advance()

    def _advance(self) -> None:
        """Send the volleys that are complete."""
        queue, ready = self._queue, self._queue.ready
        while ready < len(queue.buckets) and not queue.buckets[ready].missing and self._knows(queue.buckets[ready]):
            ready += 1
        queue.ready = ready
        ends = [end for end in queue.ends if queue.sent < end <= ready]
        if ends:
            self._send(ends[-1])

    def _send(self, end: int) -> None:
        """Send the next volley."""
        sent = [self._launch(bucket) for bucket in self._queue.buckets[self._queue.sent : end]]
        self._queue.sent = end
        pending = [one for one in sent if one is not None]
        if self._courier is not None:
            self._courier.hand_in([one.wait for one in pending])
        elif not self._every_pass:
            self._under_way += pending
        else:
            self._volleys.append(pending)
            self._clear_up()

    def _clear_up(self) -> None:
        """Have the buffers of what has arrived back, and of what must have arrived by now."""
        while self._volleys and (len(self._volleys) > AHEAD or all(one.ready() for one in self._volleys[0])):
            for one in self._volleys.popleft():
                one.wait()

    def _knows(self, bucket: Bucket) -> bool:
        if self._every_pass:
            return self._chunk in self._learned
        return self._learned.issuperset(bucket.kind.chunks)

    def _close(self, chunk: int) -> None:
        if chunk not in self._learned and self._hooks + self._calls:
            self._learn(chunk)
        if self._every_pass:
            self._send(len(self._queue.buckets))
            for bucket in self._queue.buckets:
                bucket.launched = False

    def _learn(self, chunk: int) -> None:
        """Note what the pass brought; one for the weights of matrices alone brings other parameters nothing more."""
        weights_alone = self._calls > 0 and self._hooks == 0
        for bucket in self._of_chunk[chunk].buckets:
            for slot in bucket.slots:
                least = 0 if weights_alone and slot.hooked else 1
                slot.expected[chunk] = max(slot.count, least)
        self._learned.add(chunk)

    def _launch(self, bucket: Bucket) -> Pending | None:
        bucket.complete(self._pool)
        bucket.launched = True
        pending = self._reduction.first(bucket)
        if self._every_pass:
            bucket.detach()
        return pending

    def _wait(self) -> None:
        if self._courier is not None:
            self._courier.finish()
        for volley in self._volleys:
            for pending in volley:
                pending.wait()
        for pending in self._under_way:
            pending.advance()
        for pending in self._under_way:
            pending.wait()
        self._volleys.clear()
        self._under_way.clear()


class _Queue:
    """Buckets in the order in which they are sent."""

    def __init__(self, buckets: Sequence[Bucket], largest: int) -> None:
        self.buckets = buckets
        self.ends = volleys([bucket.nbytes for bucket in buckets], largest)
        self.ready = self.sent = 0

    def rewind(self) -> None:
        """Begin anew."""
        self.ready = self.sent = 0


def volleys(sizes: Sequence[int], largest: int) -> list[int]:
    """How buckets of some bytes, sent in this order, are sent together: where each volley ends, exclusively."""
    ends, limit, filled = [len(sizes)], min(SMALLEST_VOLLEY, largest), 0
    for place in range(len(sizes) - 1, 0, -1):
        filled += sizes[place]
        if filled >= limit:
            ends.append(place)
            limit, filled = min(2 * limit, largest), 0
    return ends[::-1]


def _tell(gradients: weakref.ref[Gradients], number: int, parameter: nn.Parameter) -> None:
    alive = gradients()
    if alive is not None:
        alive.on_gradient(number, parameter)
