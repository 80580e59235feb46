from __future__ import annotations

import pytest
from torch import nn

from dthpc.errors import UserError
from dthpc.parallel.tensor.plan import check_coverage, roles_of
from tests.parallel.tensor import tasks


class Normed(tasks.User):
    """A user's model with a norm between its matrices."""

    def __init__(self, **more: str) -> None:
        super().__init__(True)
        self.body.norm = nn.LayerNorm(7, elementwise_affine=True)
        self.more = more

    def tensor_plan(self) -> dict[str, str]:
        return super().tensor_plan() | {f"body.{name}": role for name, role in self.more.items()}


def test_the_first_pattern_that_matches_gives_the_role() -> None:
    model = tasks.make_gpt(norm="layer", position="learned")
    roles = roles_of(model, 2)
    assert roles["embed"] == "vocab_embedding"
    assert roles["blocks.1.attention_norm"] == "sequence"
    assert roles["blocks.1.attention.k"] == "column"
    assert roles["blocks.0.mlp.down"] == "row"
    assert "" not in roles
    assert "blocks.0" not in roles


def test_plans_of_the_models_cover_all_parameters() -> None:
    for model in (tasks.make_gpt(), tasks.make_gpt(norm="layer", position="learned", mlp="gelu"), tasks.make_vit()):
        check_coverage(model, roles_of(model, 2), sequence_parallel=True)


def test_a_parameter_beside_split_matrices_needs_a_role_of_its_own() -> None:
    model = Normed()
    with pytest.raises(UserError, match=r"body\.norm\.weight: .* stands beside split matrices"):
        check_coverage(model, roles_of(model, 2), sequence_parallel=False)
    model = Normed(norm="inner")
    check_coverage(model, roles_of(model, 2), sequence_parallel=True)


class Listed(tasks.User):
    """Gives its plan in another form."""

    def tensor_plan(self) -> dict[str, str]:
        return [("body.up", "column")]  # type: ignore[return-value]


def test_a_plan_that_is_no_dict_is_refused() -> None:
    with pytest.raises(UserError, match="the tensor plan of Listed is a list, not a dict of roles by patterns"):
        roles_of(Listed(True), 2)
