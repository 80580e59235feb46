from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from dthpc.parallel.layout import Layout
from dthpc.parallel.mesh import make_mesh
from dthpc.parallel.outer import OuterStep
from tests.parallel import outer_tasks as tasks
from tests.parallel.outer_tasks import Outer
from tests.ranks import pool


def reference(size: int, outer: Outer, steps: int) -> list[list[list[Tensor]]]:
    """The same in one process, by torch's own Nesterov step: for each replica its parameters after each step."""
    nets = [tasks.model() for _ in range(size)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    anchor = [torch.nn.Parameter(value) for value in tasks.values(nets[0])]
    nesterov = torch.optim.SGD(anchor, lr=outer.lr, momentum=outer.momentum, nesterov=outer.momentum > 0)
    sent: list[list[Tensor]] = []
    seen: list[list[list[Tensor]]] = [[] for _ in nets]
    for step in range(1, steps + 1):
        for replica, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            tasks.inner_update(net, optimizer, replica, step)
        if step % outer.every == 0:
            sent = [tasks.values(net) for net in nets]
        if step > outer.every - 1 and step % outer.every == outer.delay:
            for n, shared in enumerate(anchor):
                shared.grad = torch.stack([shared.detach() - mine[n] for mine in sent]).mean(0)
            nesterov.step()
            with torch.no_grad():
                for net, mine in zip(nets, sent, strict=True):
                    for p, shared, old in zip(net.parameters(), anchor, mine, strict=True):
                        p.copy_(shared + (p - old))
        for net, record in zip(nets, seen, strict=True):
            record.append(tasks.values(net))
    return seen


@pytest.mark.parametrize(
    ("size", "outer"),
    [
        (2, Outer(every=3, lr=0.7, momentum=0.9)),
        (3, Outer(every=2, lr=1.0, momentum=0.0)),
        (2, Outer(every=3, lr=0.7, momentum=0.9, delay=2)),
        (3, Outer(every=4, lr=0.5, momentum=0.5, delay=1)),
    ],
)
def test_outer_steps_are_those_of_the_formula(size: int, outer: Outer) -> None:
    expected = reference(size, outer, 9)
    for replica, seen in enumerate(pool().run(size, tasks.trajectory, size, outer, 9)):
        for (parameters, *_), wanted in zip(seen, expected[replica], strict=True):
            torch.testing.assert_close(parameters, wanted, rtol=1e-5, atol=1e-6)


def test_one_step_of_plain_sgd_between_meetings_is_synchronous_training() -> None:
    net = tasks.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(1, 4):
        optimizer.zero_grad()
        torch.stack([tasks.loss(net, replica, step) for replica in range(2)]).mean().backward()
        optimizer.step()
    for parameters in pool().run(2, tasks.plain_sgd, 2, Outer(every=1), 3):
        torch.testing.assert_close(parameters, tasks.values(net), rtol=1e-5, atol=1e-7)


def test_replicas_are_equal_after_each_meeting_and_differ_between_them() -> None:
    one, other = pool().run(2, tasks.trajectory, 2, Outer(every=3, lr=0.7, momentum=0.9), 9)
    for step in range(1, 10):
        (mine, anchor, _, changed), (theirs, their_anchor, *_) = one[step - 1], other[step - 1]
        assert changed == (step % 3 == 0)
        assert all(map(torch.equal, anchor, their_anchor))
        assert all(map(torch.equal, mine, theirs)) == (step % 3 == 0)
        assert all(map(torch.equal, mine, anchor)) == (step % 3 == 0)


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_an_exchange_is_applied_exactly_when_it_is_due(delay: int) -> None:
    every, start = 4, tasks.values(tasks.model())
    for seen in pool().run(2, tasks.trajectory, 2, Outer(every=every, lr=0.7, momentum=0.9, delay=delay), 12):
        before = start
        for step, (_, anchor, due, changed) in enumerate(seen, start=1):
            meeting = step // every * every
            applied = meeting > 0 and step == meeting + delay
            assert changed == applied
            assert all(map(torch.equal, before, anchor)) == (not applied)
            assert due == (meeting + delay if meeting > 0 and step < meeting + delay else 0)
            before = anchor


def test_a_replica_goes_on_while_another_has_not_come_to_the_meeting() -> None:
    for due in pool().run(2, tasks.goes_on_while_others_lag, 2):
        assert due == [0, 0, 0, 6, 6, 0, 0]


@pytest.mark.parametrize("delay", [0, 2])
def test_the_same_run_twice_gives_the_same_bits(delay: int) -> None:
    outer = Outer(every=3, lr=0.7, momentum=0.9, delay=delay)
    first, second = (pool().run(3, tasks.trajectory, 3, outer, 7) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        for (mine, *_), (again, *_) in zip(one, other, strict=True):
            assert all(map(torch.equal, mine, again))


@pytest.mark.parametrize(("delay", "saved"), [(0, 3), (0, 4), (2, 3), (2, 4), (2, 5)])
def test_a_resumed_run_has_the_same_bits_also_with_an_exchange_under_way(delay: int, saved: int) -> None:
    outer = Outer(every=3, lr=0.7, momentum=0.9, delay=delay)
    through = pool().run(2, tasks.resumed, 2, outer, 9, 0, True)
    again = pool().run(2, tasks.resumed, 2, outer, 9, saved, True)
    for one, other in zip(through, again, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            assert all(map(torch.equal, mine, theirs))


def test_an_exchange_that_is_not_restored_becomes_part_of_the_next_one() -> None:
    outer = Outer(every=3, lr=1.0, momentum=0.0, delay=1)
    lost = pool().run(2, tasks.resumed, 2, outer, 7, 3, False)
    assert all(torch.isfinite(value).all() for seen in lost for values in seen for value in values)
    # At step 7 the replicas' mean is what it would be without any meeting but that one: nothing was lost.
    alone = pool().run(2, tasks.resumed, 2, Outer(every=6, lr=1.0, momentum=0.0, delay=1), 7, 0, True)
    for mine, theirs in zip(lost[0][-1], alone[0][-1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_copies_of_a_tied_tensor_stay_equal_to_the_last_bit() -> None:
    values = pool().run(6, tasks.tied_copies, 6)
    assert all(torch.equal(values[0], value) for value in values[1:])


STEPS = 160


@functools.cache
def synchronous_loss() -> float:
    return pool().run(2, tasks.train_language, 2, None, STEPS)[0]


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize(("lr", "momentum", "factor"), [(1.0, 0.0, 1.05), (0.7, 0.9, 1.2)])
def test_a_small_decoder_learns_about_as_well_as_with_synchronous_steps(
    lr: float, momentum: float, factor: float, delay: int
) -> None:
    outer = Outer(every=8, lr=lr, momentum=momentum, delay=delay)
    assert pool().run(2, tasks.train_language, 2, outer, STEPS)[0] < factor * synchronous_loss()


def test_without_meetings_it_does_not() -> None:
    assert pool().run(2, tasks.train_language, 2, Outer(every=STEPS + 1), STEPS)[0] > 2 * synchronous_loss()


def test_without_replicas_the_anchor_follows() -> None:
    net = tasks.model()
    outer = OuterStep(tasks.whole_pieces(net), make_mesh(Layout(), "cpu"), every=1, lr=0.5, momentum=0.0)
    before = tasks.values(net)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1.0)
    assert outer.after_update(1)
    torch.testing.assert_close(tasks.values(net), [value + 0.5 for value in before])


def test_what_is_saved_has_the_shape_of_the_pieces() -> None:
    net = tasks.model()
    pieces = tasks.whole_pieces(net)
    state = OuterStep(pieces, make_mesh(Layout(), "cpu"), every=4, delay=2).replica_state
    assert (state.index, state.count) == (0, 1)
    assert set(state.shared) == {"anchor", "momentum", "arriving"}
    assert set(state.extra) == {"outer.due", "outer.sent.0"}
    for tensors in state.shared.values():
        assert [tensor.shape for tensor in tensors] == [piece.tensor.shape for piece in pieces]
    plain = OuterStep(pieces, make_mesh(Layout(), "cpu"), every=4, momentum=0.0).replica_state
    assert set(plain.shared) == {"anchor"}
    assert plain.extra == {}


@pytest.mark.parametrize(("every", "delay"), [(0, 0), (2, 2), (2, -1)])
def test_meetings_that_cannot_be(every: int, delay: int) -> None:
    with pytest.raises(ValueError, match=f"every={every}"):
        OuterStep([], make_mesh(Layout(), "cpu"), every=every, delay=delay)
