from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from dthpc.errors import UserError
from dthpc.models.gpt import GPT
from dthpc.models.pipeline import PipelineLayer
from dthpc.parallel.layout import Layout
from dthpc.parallel.mesh import Mesh
from dthpc.parallel.parts import Part, Parts
from dthpc.parallel.pipeline.stages import cut, deal, layers_of
from tests.parallel.pipeline import tasks
from tests.parallel.pipeline.tasks import Tower
from tests.ranks import pool


def mesh_of(rank: int, pp: int, schedule: str = "1f1b", chunks: int = 1) -> Mesh:
    """Where a rank stands; nothing is sent over it."""
    return Mesh(Layout(pp=pp, schedule=schedule, chunks=chunks), rank, "cpu", None)


def cut_all(model: nn.Module, pp: int, how: Any = "auto", **layout: Any) -> list[tuple[list[nn.Module], Parts]]:
    meshes = [mesh_of(rank, pp, **layout) for rank in range(pp)]
    return [cut(model, mesh, deal(model, mesh, how)) for mesh in meshes]


@pytest.mark.parametrize("layout", [{}, {"schedule": "interleaved", "chunks": 2}, {"schedule": "zbv", "chunks": 2}])
def test_stages_one_after_the_other_are_the_model(layout: dict[str, Any]) -> None:
    model = Tower()
    tokens = torch.randint(tasks.VOCABULARY, (2, tasks.LENGTH))
    by_rank = [chunks for chunks, _ in cut_all(model, 2, **layout)]
    order = {
        "interleaved": [by_rank[0][0], by_rank[1][0], by_rank[0][-1], by_rank[1][-1]],
        "zbv": [by_rank[0][0], by_rank[1][0], by_rank[1][-1], by_rank[0][-1]],
    }.get(layout.get("schedule", ""), [by_rank[0][0], by_rank[1][0]])
    x = tokens
    for chunk in order:
        x = chunk(x)
    assert torch.equal(x, model(tokens))


def test_a_stage_keeps_names_and_memory_of_its_layers_alone() -> None:
    model = Tower()
    named = dict(model.named_parameters())
    seen: list[str] = []
    for (chunk,), parts in cut_all(model, 3, [2, 4, 2]):
        for name, parameter in chunk.named_parameters():
            assert parameter is named[name]
            assert parts[parameter] == Part(name, tuple(parameter.shape))
            seen.append(name)
    assert seen == list(named)
    assert list(dict(cut_all(model, 3, [2, 4, 2])[1][0][0].blocks.named_children())) == ["1", "2", "3", "4"]
    assert model.head is not None


def test_a_tied_weight_is_known_by_its_first_name_on_both_ranks() -> None:
    (first, first_parts), (last, last_parts) = cut_all(Tower(tied=True), 2)
    shape = (tasks.VOCABULARY, tasks.WIDTH)
    assert first_parts[first[0].embed.weight] == Part("embed.weight", shape, tied_stage_rank=1)
    assert last_parts[last[0].head.weight] == Part("embed.weight", shape, counts=False, tied_stage_rank=0)


def test_a_weight_tied_within_a_rank_is_one() -> None:
    (chunks, parts), (_, others) = cut_all(Tower(tied=True), 2, schedule="zbv", chunks=2)
    assert chunks[0].embed.weight is chunks[1].head.weight
    assert parts[chunks[0].embed.weight] == Part("embed.weight", (tasks.VOCABULARY, tasks.WIDTH))
    assert "embed.weight" not in {part.name for part in others.values()}


class Thrice(Tower):
    """A weight on three stages."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.blocks["2"].down.weight = self.blocks["0"].down.weight
        self.blocks["5"].down.weight = self.blocks["0"].down.weight


def test_one_process_keeps_the_model_as_it_is() -> None:
    model = nn.Linear(2, 2)
    mesh = mesh_of(0, 1)
    assert deal(model, mesh, "auto") == []
    chunks, parts = cut(model, mesh, [])
    assert chunks == [model]
    assert [part.name for part in parts.values()] == ["weight", "bias"]


def test_a_model_on_the_meta_device_is_cut_without_memory() -> None:
    with torch.device("meta"):
        model = GPT(vocab_size=16, dim=8, layers=4, heads=2)
    (first, parts), (last, _) = cut_all(model, 2)
    assert all(parameter.is_meta for parameter in parts)
    assert list(dict(first[0].blocks.named_children())) + list(dict(last[0].blocks.named_children())) == list("0123")


def test_layers_are_dealt_as_asked() -> None:
    model, mesh = Tower(), mesh_of(0, 3)
    assert deal(model, mesh, "uniform") == [2, 3, 3]
    assert deal(model, mesh, "auto") == [3, 2, 3]
    assert deal(model, mesh, [1, 1, 6]) == [1, 1, 6]
    seconds = [9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert deal(model, mesh_of(0, 1), "measured", lambda: seconds) == []
    assert pool().run(3, tasks.measured_stages, seconds) == [[1, 3, 4]] * 3


class Declares(nn.Module):
    """Declares what it is told to."""

    def __init__(self, *layers: tuple[str, ...]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)
        self.layers = layers

    def pipeline_layers(self) -> list[PipelineLayer]:
        return [PipelineLayer(names, 1.0) for names in self.layers]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear(2, 2), "model._target_=Linear: the model does not say where it may be cut"),
        (Declares(("one",)), "parameter two.weight is in no pipeline layer"),
        (Declares(("one",), ("two", "three")), "pipeline layer 1 names three, which the model does not have"),
        (Declares(("one",), ("two", "one")), "one is in two pipeline layers"),
        (Declares(("one",), ("two", "one.bias")), "parameter one.bias is in pipeline layers 0 and 1"),
    ],
)
def test_what_cannot_be_cut_is_refused(model: nn.Module, words: str) -> None:
    with pytest.raises(UserError) as refusal:
        deal(model, mesh_of(0, 2), "auto")
    assert words in str(refusal.value)
    assert "pipeline_layers" in str(refusal.value)


class NamesOnly(Tower):
    """Lists bare names."""

    def pipeline_layers(self) -> list[PipelineLayer]:
        return ["embed", "head"]  # type: ignore[list-item]


def test_layers_that_are_bare_names_are_refused() -> None:
    with pytest.raises(UserError, match="pipeline layer 0 is a str without names and cost"):
        layers_of(NamesOnly())


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = Tower()
    model.lock = threading.Lock()
    with pytest.raises(UserError, match="the model cannot be copied"):
        cut_all(model, 2)


def test_a_weight_on_three_ranks_is_refused() -> None:
    model = Thrice()
    with pytest.raises(UserError, match=r"are one weight, on pipeline ranks 0, 1, 2"):
        cut(model, mesh_of(0, 3), deal(model, mesh_of(0, 3), "uniform"))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("even", "parallel.stages=even: unknown way"),
        ("measured", "parallel.stages=measured: there is nothing to measure layers with here"),
        ([1, 2], "there are 3 stages, but numbers of layers for 2"),
        ([1, 2, 3], r"the numbers add up to 6, but the model has 8 layers"),
    ],
)
def test_a_wrong_way_of_dealing_is_refused(how: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        deal(Tower(), mesh_of(0, 3), how)


def test_parameters_of_the_model_itself_may_be_named() -> None:
    class Shifted(Declares):
        def __init__(self) -> None:
            super().__init__(("one", "shift"), ("two",))
            self.shift = nn.Parameter(torch.ones(2))

    model = Shifted()
    assert len(layers_of(model)) == 2
    (first, _), (second, _) = cut_all(model, 2)
    assert first[0].shift is model.shift
    assert second[0].shift is None
