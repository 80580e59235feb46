from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dthpc.parallel.pipeline.schedule import Action, Kind, actions_of
from dthpc.parallel.pipeline.weights import WeightStore, defer_weights
from dthpc.parallel.pipeline.worker import MicroBatch, ModuleWorker


def squares(outputs: Tensor, targets: Any) -> tuple[Tensor, int]:
    return outputs.square().sum(), outputs.shape[0]


def batches(*rows: int) -> list[MicroBatch]:
    return [MicroBatch(torch.ones(count, 3), None, count, f"samples of {count}") for count in rows]


class Ledger:
    """Writes down how a worker speaks of gradients."""

    def __init__(self) -> None:
        self.said: list[str] = []

    @contextmanager
    def forward(self, chunk: int) -> Iterator[None]:
        self.said.append(f"forward {chunk}")
        yield

    @contextmanager
    def backward(self, chunk: int, last: bool, complete: bool = True) -> Iterator[None]:
        self.said.append(f"backward {chunk}{' last' if last else ''}{'' if complete else ' in part'}")
        yield

    def ready(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        self.said.append(f"ready {list(gradient.shape)}")


class Stream:
    """Writes down which samples it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "samples":
            self.told.append(value)
        super().__setattr__(name, value)


def walk(worker: ModuleWorker, actions: tuple[Action, ...], gradient: Tensor | None = None) -> None:
    """Do a rank's actions where nothing has to travel."""
    for kind, stage, micro_batch in actions:
        if kind is Kind.F:
            worker.forward(stage, micro_batch, None)
        elif kind is Kind.W:
            worker.weight_backward(stage, micro_batch)
        else:
            (worker.backward if kind is Kind.B else worker.input_backward)(stage, micro_batch, gradient)


def test_the_divisor_is_asked_for_once_and_only_when_a_gradient_needs_it() -> None:
    layer, asked = nn.Linear(3, 1), []
    worker = ModuleWorker({0: layer}, 1, squares)
    actions = actions_of("gpipe", 0, 1, 1, 2)
    worker.begin(batches(2, 4), actions, lambda: asked.append(len(worker.sizes)) or 8.0)
    worker.forward(0, 0, None)
    assert asked == []
    worker.backward(0, 0, None)
    walk(worker, actions[2:])
    assert asked == [2]
    assert worker.counted == 6
    output = layer(torch.ones(1, 3)).item()
    assert worker.loss == pytest.approx(6 * output**2)
    torch.testing.assert_close(layer.bias.grad, torch.tensor([6 * 2 * output / 8]))


def test_a_step_may_be_abandoned_by_the_divisor() -> None:
    worker = ModuleWorker({0: nn.Linear(3, 1)}, 1, squares)
    actions = actions_of("gpipe", 0, 1, 1, 1)

    def stop() -> float:
        raise InterruptedError

    worker.begin(batches(2), actions, stop)
    with pytest.raises(InterruptedError):
        walk(worker, actions)
    worker.begin(batches(3), actions)
    assert (worker.held, worker.counted, worker.loss) == (0, 0, 0.0)
    walk(worker, actions)
    assert worker.counted == 3


def test_gradients_are_told_which_pass_is_the_last() -> None:
    ledger = Ledger()
    worker = ModuleWorker({0: nn.Linear(3, 1), 1: nn.Linear(1, 1)}, 2, squares, gradients=ledger)
    actions = actions_of("interleaved", 0, 1, 2, 2)
    worker.begin(batches(1, 0), actions)
    x = torch.ones(1, 1)
    for kind, stage, micro_batch in actions:
        if kind is Kind.F:
            worker.forward(stage, micro_batch, x if stage else None)
        else:
            worker.backward(stage, micro_batch, None if stage else torch.ones(1, 1))
    # A micro-batch without rows computes nothing, but its passes count: others may wait for collectives in them.
    assert ledger.said == ["forward 0", "forward 1", "backward 1", "backward 0", "backward 1 last", "backward 0 last"]


def test_weight_gradients_are_handed_over_in_the_last_pass() -> None:
    ledger, store, layer = Ledger(), WeightStore(), nn.Linear(3, 1)
    defer_weights([layer], store)
    worker = ModuleWorker({0: layer}, 1, squares, gradients=ledger, store=store)
    actions = tuple(Action(kind, 0, number) for kind in (Kind.F, Kind.I, Kind.W) for number in (0, 1))
    worker.begin(batches(1, 2), actions)
    walk(worker, actions)
    ready = ["ready [1, 3]", "ready [1]"]
    assert ledger.said == [
        *["forward 0"] * 2,
        *["backward 0 in part"] * 2,
        "backward 0",
        *ready,
        "backward 0 last",
        *ready,
    ]


def test_random_numbers_are_selected_before_every_pass() -> None:
    stream = Stream()
    worker = ModuleWorker({0: nn.Linear(3, 1)}, 1, squares, stream=stream)
    actions = actions_of("gpipe", 0, 2, 1, 2)
    worker.begin(batches(1, 2), actions)
    walk(worker, actions)
    assert stream.told == ["samples of 1", "samples of 2", "samples of 1", "samples of 2"]


class Doubled(torch.autograd.Function):
    """A node made in Python, which does not keep its graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Doubled.apply(x)
        return result


@pytest.mark.parametrize("last", [nn.Identity(), nn.Flatten(0), Doubling()])
def test_an_output_is_not_held_once_it_has_gone(last: nn.Module) -> None:
    seen: list[Any] = []
    layer = nn.Linear(3, 2)
    chunk = nn.Sequential(layer, last)
    chunk.register_forward_hook(lambda module, inputs, output: seen.append(weakref.ref(output)))
    worker = ModuleWorker({0: chunk}, 2, squares)
    worker.begin(batches(2), [Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)])
    output = worker.forward(0, 0, None)
    assert output is not None
    assert not output.requires_grad
    gc.collect()
    assert seen[0]() is None
    assert worker.backward(0, 0, torch.full_like(output, 3.0)) is None
    assert torch.equal(layer.weight.grad, torch.full((2, 3), 12.0 if isinstance(last, Doubling) else 6.0))


def test_a_weight_may_be_a_stages_output() -> None:
    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 5))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight

    chunk = Gives()
    worker = ModuleWorker({0: chunk}, 2, squares)
    worker.begin(batches(2), [Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)])
    worker.forward(0, 0, None)
    worker.backward(0, 0, torch.full((2, 5), 3.0))
    assert torch.equal(chunk.weight.grad, torch.full((2, 5), 3.0))


def test_an_input_that_is_not_used_gets_a_gradient_of_zeros() -> None:
    class Ignores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight

    worker = ModuleWorker({1: Ignores()}, 2, squares)
    worker.begin(batches(2), [Action(Kind.F, 1, 0), Action(Kind.B, 1, 0)])
    worker.forward(1, 0, torch.ones(2, 5))
    assert torch.equal(worker.backward(1, 0, None), torch.zeros(2, 5))


def test_a_stage_without_parameters_to_train_hands_on_nothing_to_learn() -> None:
    frozen = nn.Linear(3, 2).requires_grad_(False)
    worker = ModuleWorker({0: frozen}, 2, squares)
    worker.begin(batches(2), [Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)])
    assert worker.forward(0, 0, None) is not None
    assert worker.backward(0, 0, torch.ones(2, 2)) is None


def test_sizes_tell_what_decides_the_form_of_activations() -> None:
    worker = ModuleWorker({0: nn.Identity()}, 2, squares)
    inputs = [torch.zeros(2, 5), {"a": torch.zeros(2, 5), "b": [torch.zeros(2)]}, torch.zeros(2, 6), torch.zeros(0, 5)]
    worker.begin([MicroBatch(each, None, rows) for each, rows in zip(inputs, (2, 2, 2, 0), strict=True)], [])
    signatures = [size.signature for size in worker.sizes]
    assert len(set(signatures)) == 3
    assert signatures[0] == signatures[3]
    assert [size.runs for size in worker.sizes] == [True, True, True, False]
