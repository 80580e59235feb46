from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.parallel.tensor import tasks
from tests.ranks import pool

WHOLE = 2 * 4 * 6
"""Elements of the whole input."""


def whole_pass() -> tuple[Tensor, dict[str, Tensor]]:
    model, x = tasks.User(True), tasks.user_input().requires_grad_()
    model(x).square().sum().backward()
    assert x.grad is not None
    return x.grad, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_are_those_of_whole_matrices(tp: int, shared: bool, sequence_parallel: bool) -> None:
    of_input, of_parameters = whole_pass()
    answers = pool().run(tp, tasks.user_pass, tp, sequence_parallel, shared, False)
    inputs = [grad for _, grad, _, _ in answers]
    torch.testing.assert_close(torch.cat(inputs, 1) if sequence_parallel else inputs[0], of_input, rtol=1e-5, atol=1e-6)
    assert sequence_parallel or all(torch.equal(grad, inputs[0]) for grad in inputs)
    for name, (part, first) in answers[0][2].items():
        grads = [parts[name][1] for _, _, parts, _ in answers]
        if part.dim is not None:
            found = torch.cat(grads, part.dim)
        else:
            assert part.partial == sequence_parallel
            found = torch.stack(grads).sum(0) if part.partial else first
        torch.testing.assert_close(found, of_parameters[name], rtol=1e-5, atol=1e-6)


def test_layers_that_share_an_input_exchange_once() -> None:
    for made, *_ in pool().run(2, tasks.user_pass, 2, False, True, False):
        assert made == [("all_reduce", WHOLE, torch.float32)] * 2
    for made, *_ in pool().run(2, tasks.user_pass, 2, False, False, False):
        assert len(made) == 3
    for made, *_ in pool().run(2, tasks.user_pass, 2, True, True, False):
        forward, backward = ["gather", "reduce_scatter"], ["gather", "gather", "reduce_scatter"]
        assert [kind for kind, _, _ in made] == forward + backward


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_under_autocast_everything_travels_in_16_bits_and_gradients_have_the_dtype_of_their_tensor(
    sequence_parallel: bool,
) -> None:
    for made, _, _, dtypes in pool().run(2, tasks.user_pass, 2, sequence_parallel, True, True):
        assert {dtype for _, _, dtype in made} == {torch.bfloat16}
        assert dtypes == [torch.bfloat16, torch.float32, torch.float32]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_weight_gradients_can_wait(sequence_parallel: bool) -> None:
    for early, same in pool().run(2, tasks.deferred_pass, 2, sequence_parallel):
        assert early == ["body.down.bias"]
        assert same


def test_what_needs_no_gradient_costs_no_exchange() -> None:
    for made, got in pool().run(2, tasks.frozen_pass, 2):
        assert made == ["all_reduce"]
        assert got == ["body.gate.bias", "body.up.weight", "body.up.bias", "body.down.weight", "body.down.bias"]


def test_sequence_parallelism_keeps_only_a_part_of_the_input_for_the_backward_pass() -> None:
    assert pool().run(2, tasks.saved_for_backward, 2, True) == [WHOLE // 2] * 2
    assert pool().run(2, tasks.saved_for_backward, 2, False) == [WHOLE] * 2


def test_shared_layers_are_right_in_any_order_of_calls() -> None:
    assert pool().run(2, tasks.called_out_of_turn, 2) == [True, True]
