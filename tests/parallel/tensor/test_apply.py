from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.tensor import tasks
from tests.ranks import pool

TOLERANCE = 2e-6
"""Of losses and of each parameter's gradient (Euclidean norm), relative, in fp32: sums are taken in another order."""

GPT_FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped-untied": {"kv_heads": 2, "tie_embeddings": False},
    "gpt2": {"norm": "layer", "position": "learned", "mlp": "gelu"},
    "biases-rope-untied": {"norm": "layer", "tie_embeddings": False, "vocab_size": 38},
    "dropout": {"dropout": 0.3, "norm": "layer", "position": "learned"},
}


def whole_pass(kind: str, fields: dict[str, Any], loss: str, **how: Any) -> tuple[float, dict[str, Tensor]]:
    model = tasks.MODELS[kind](**fields)
    value = tasks.train_pass(model, tasks.LOSSES[loss], **how)
    return value, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def joined(answers: list[tasks.Gradients]) -> dict[str, Tensor]:
    """Whole gradients from the ranks' parts; what each rank holds whole must be the same on all."""
    result = {}
    for name, (part, first) in answers[0].items():
        grads = [answer[name][1] for answer in answers]
        assert first is not None
        assert [answer[name][0].counts for answer in answers] == [
            part.dim is not None or r == 0 for r in range(len(grads))
        ]
        if part.dim is not None:
            assert not part.partial
            result[name] = torch.cat(grads, part.dim)
        elif part.partial:
            result[name] = torch.stack(grads).sum(0)
        else:
            assert all(torch.equal(first, grad) for grad in grads)
            result[name] = first
        assert result[name].shape == part.shape
    return result


def compare(
    tp: int, sequence_parallel: bool, kind: str, fields: dict[str, Any], loss: str, tolerance: float, **how: Any
) -> None:
    expected, gradients = whole_pass(kind, fields, loss, **how)
    answers = pool().run(tp, tasks.split_pass, tp, sequence_parallel, kind, fields, loss, how)
    assert len({value for value, _ in answers}) == 1
    assert answers[0][0] == pytest.approx(expected, rel=tolerance)
    found = joined([grads for _, grads in answers])
    assert found.keys() == gradients.keys()
    for name, grad in gradients.items():
        # A key's bias shifts all scores of a query alike: its gradient is zero but for rounding (without rotation).
        scale = gradients[name.replace(".k.bias", ".k.weight")].norm()
        difference = (found[name] - grad).norm() / scale
        assert difference < tolerance, f"{name}: {difference}"


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("form", GPT_FORMS)
def test_gpt_on_two_ranks_is_the_same_model(form: str, sequence_parallel: bool) -> None:
    compare(2, sequence_parallel, "gpt", GPT_FORMS[form], "next_token", TOLERANCE)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("form", ["plain", "gpt2", "dropout"])
def test_gpt_on_four_ranks_is_the_same_model(form: str, sequence_parallel: bool) -> None:
    compare(4, sequence_parallel, "gpt", GPT_FORMS[form], "next_token", TOLERANCE)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("fields", [{}, {"dropout": 0.2}])
def test_vit_is_the_same_model(fields: dict[str, Any], sequence_parallel: bool) -> None:
    compare(2, sequence_parallel, "vit", fields, "next_token", TOLERANCE)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_loss_of_ones_own_gets_all_logits(sequence_parallel: bool) -> None:
    compare(2, sequence_parallel, "gpt", {}, "other", TOLERANCE)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_recomputed_activations_change_nothing(sequence_parallel: bool) -> None:
    compare(2, sequence_parallel, "gpt", GPT_FORMS["dropout"], "next_token", TOLERANCE, recompute=True)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_bf16_is_as_near_to_fp32_as_the_single_process_in_bf16_is(sequence_parallel: bool) -> None:
    fields = GPT_FORMS["gpt2"]
    value, exact = whole_pass("gpt", fields, "next_token")
    expected, single = whole_pass("gpt", fields, "next_token", bf16=True)
    answers = pool().run(2, tasks.split_pass, 2, sequence_parallel, "gpt", fields, "next_token", {"bf16": True})
    found = joined([grads for _, grads in answers])
    assert abs(answers[0][0] - expected) < 2 * abs(expected - value)
    # Partial sums are rounded too, which may add as much error as rounding in the single process makes.
    assert distance(found, exact) < 1.5 * distance(single, exact)


def distance(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    return torch.stack([(grad - others[name]).norm() for name, grad in some.items()]).norm().item()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_rank_without_samples_takes_part(sequence_parallel: bool) -> None:
    fields = {"norm": "layer"}
    for value, gradients in pool().run(
        2, tasks.split_pass, 2, sequence_parallel, "gpt", fields, "next_token", {"rows": 0}
    ):
        assert value == 0.0
        assert all(grad is not None and not grad.any() for _, grad in gradients.values())


def test_meta_and_real_parameters_give_the_same_parts() -> None:
    fields = {"vocab_size": 37, "dim": 24, "layers": 2, "heads": 4, "hidden": 37, "norm": "layer"}
    for rank, (empty, real, meta) in enumerate(pool().run(2, tasks.parts_of_meta, 2, fields)):
        assert empty == real
        assert all(meta)
        embed = next(part for part in empty if part.name == "embed.weight")
        assert (embed.dim, embed.start, embed.size) == (0, [0, 19][rank], [19, 18][rank])


class NoPlan(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)


class Planned(nn.Module):
    def __init__(self, plan: dict[str, str], tied: bool = False) -> None:
        super().__init__()
        self.plan = plan
        self.up = nn.Linear(4, 8)
        self.norm = nn.LayerNorm(8)
        self.down = nn.Linear(8, 4)
        self.small = nn.Linear(4, 1)
        self.again = nn.Linear(4, 8)
        if tied:
            self.again.weight = self.up.weight

    def tensor_plan(self) -> dict[str, str]:
        return self.plan


def planned(tied: bool = False, **plan: str) -> Callable[[], nn.Module]:
    return partial(Planned, plan, tied)


def three_heads() -> nn.Module:
    return tasks.make_gpt(heads=6, kv_heads=3)


REFUSALS: list[tuple[Callable[[], nn.Module], bool, str]] = [
    (NoPlan, False, "NoPlan does not say how its layers are split over tensor-parallel ranks. Instead: parallel.tp=1"),
    (
        planned(up="colunm"),
        False,
        "tensor_plan=colunm: the tensor plan of Planned gives 'up' a role that does not exist",
    ),
    (planned(layer="column"), False, "tensor_plan=layer: the tensor plan of Planned matches none of its modules"),
    (planned(norm="row"), False, "the tensor plan's role row is for torch.nn.Linear, and norm is LayerNorm"),
    (planned(small="column"), False, "small has a width of 1, which cannot be split among 2 tensor-parallel ranks"),
    (planned(down="attention"), False, "the tensor plan's role attention is for a module with `head_dim`"),
    (planned(up="column", norm="inner", down="row"), True, "tensor_plan=small.weight: the tensor plan gives no role"),
    (planned(True, up="column"), False, "tensor_plan=again.weight: this weight is also used by a layer that the"),
    (planned(True, up="column", again="row"), False, "tensor_plan=again: two layers share this weight, and the tensor"),
    (
        three_heads,
        False,
        "blocks.0.attention.k makes 3 heads, which do not divide among 2 ranks. Instead: parallel.tp=1",
    ),
    (tasks.make_gpt, True, "a sequence of 15 positions does not divide among 2 tensor-parallel ranks. Instead: a seq"),
]


@pytest.mark.parametrize(("make", "sequence_parallel", "said"), REFUSALS)
def test_what_cannot_be_split_is_refused_with_the_reason(
    make: Callable[[], nn.Module], sequence_parallel: bool, said: str
) -> None:
    for message in pool().run(2, tasks.refusal, 2, sequence_parallel, make):
        assert said in message
