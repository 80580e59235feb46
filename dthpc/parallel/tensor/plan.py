"""How a model declares which of its modules are split over tensor-parallel ranks, and how.

A model says so with one method, from patterns (`fnmatch`) of global module names to roles:

    def tensor_plan(self) -> dict[str, str]:
        return {
            "embed": "vocab_embedding",
            "position": "sequence",
            "dropout": "sequence",
            "blocks.*_norm": "sequence",
            "blocks.*.attention": "attention",
            "blocks.*.attention.[qkv]": "column",
            "blocks.*.attention.out": "row",
            "blocks.*.mlp": "shared_input",
            "blocks.*.mlp.gate": "column",
            "blocks.*.mlp.up": "column",
            "blocks.*.mlp.down": "row",
            "blocks.*.dropout": "sequence",
            "norm": "sequence",
            "head": "vocab_head",
        }

`*` matches dots too. The first pattern that matches a name gives its role; a pattern may match nothing (a stage of a
pipeline holds only some of the modules, and a model may have been built without one). The roles, where *tp* is the
degree, n a width, and *whole* means the same values on every rank:

vocab_embedding
    `nn.Embedding` of token numbers, split by rows. In: whole `[B, T]`. Out: `[B, T, dim]`.
column
    `nn.Linear`, split by output features. Out: this rank's features `[B, T, n / tp]`, of the whole sequence. Its
    features must be of one kind: a matrix that makes queries, keys and values, or gate and input, has to be written
    as several.
row
    `nn.Linear`, split by input features. In: what `column` gives. Out: `[B, T, dim]`. What lies between the two must
    work on each feature by itself, as an activation does, and a softmax or a mean does not: nothing can tell that.
vocab_head
    `nn.Linear`, split by output features, whose output is what the model returns: this rank's share of the logits, of
    the whole sequence. May share its weight with a `vocab_embedding`.
attention
    A module with an integer attribute `head_dim` whose `column` children all read the tensor that it is given first
    (queries, then keys and values), and whose projections' widths decide how many heads there are. Heads stay whole,
    so their numbers must be multiples of tp. Gets `first_head`: the number of this rank's first query head.
shared_input
    Any other module whose `column` children all read one and the same tensor, such as a gated feed-forward: one
    exchange serves all of them.
sequence
    A module between the matrices that works on each token for itself: norms, dropouts, learned positions. Under
    sequence parallelism its parameters' gradients are summed over the ranks, and it and its children, where they have
    an attribute `shard`, get `(1, index, tp)`: which part of the sequence they see (`dthpc.models.dropout.Dropout`).
inner
    A module with parameters between a `column` and a `row`, which works on this rank's features with values that all
    ranks share, such as a norm over each head's queries. Its parameters' gradients are summed over the ranks.
scatter
    A module that every rank computes whole and whose output `[B, T, dim]` goes into the matrices, such as the patches
    of an image.
gather
    A module that is computed whole on every rank, from the whole sequence, such as a pooling head. In: the output
    of `row` or `sequence`; it gets `[B, T, dim]` as its first argument.
whole
    A module that is given whole inputs and computed whole on every rank, such as what follows a `gather`.

Where a module has no role, every rank computes it whole, on whole inputs; that is right outside the matrices and
between them, but with sequence parallelism the activations between matrices are `[B, T / tp, dim]`, so there every
parameter must belong to a module with a role. Two rules keep a model right there: the sequence's length is taken
from the tokens or from what a `column` gave, never from what lies between the matrices; and parameters are used by
calling their module, not read from outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Protocol, runtime_checkable

from torch import nn

from dthpc.errors import UserError, nearest

ROLES = (
    "vocab_embedding",
    "column",
    "row",
    "vocab_head",
    "attention",
    "shared_input",
    "sequence",
    "inner",
    "scatter",
    "gather",
    "whole",
)


@runtime_checkable
class HasTensorPlan(Protocol):
    """A model that can be split over tensor-parallel ranks."""

    def tensor_plan(self) -> dict[str, str]:
        """Roles of modules, by patterns of their global names; see this file's head."""


def roles_of(chunk: nn.Module, tp: int) -> dict[str, str]:
    """The role of each module of a chunk that has one, by global name, parents first.

    Args:
        chunk: the model, or one stage of it whose modules have kept their names.
        tp: tensor-parallel degree, for messages.

    Raises:
        UserError: the model declares no plan, or a role that does not exist.
    """
    if not isinstance(chunk, HasTensorPlan):
        raise UserError(
            f"{type(chunk).__name__} does not say how its layers are split over tensor-parallel ranks",
            key="parallel.tp",
            value=tp,
            instead="parallel.tp=1, or give the model a method `tensor_plan(self) -> dict[str, str]` such as "
            '`return {"*.up": "column", "*.down": "row"}` (see dthpc/parallel/tensor/plan.py)',
        )
    plan = chunk.tensor_plan()
    if not isinstance(plan, dict):
        raise UserError(
            f"the tensor plan of {type(chunk).__name__} is a {type(plan).__name__}, not a dict of roles by patterns",
            key="tensor_plan",
            value=plan,
            instead='`{"*.up": "column", "*.down": "row"}`',
        )
    for pattern, role in plan.items():
        if role not in ROLES:
            raise UserError(
                f"the tensor plan of {type(chunk).__name__} gives {pattern!r} a role that does not exist",
                key="tensor_plan",
                value=role,
                instead=nearest(role, ROLES, count=2),
            )
    return dict(_matches(chunk, plan))


def _matches(chunk: nn.Module, plan: dict[str, str]) -> Iterator[tuple[str, str]]:
    for name, _ in chunk.named_modules():
        for pattern, role in plan.items():
            if name and fnmatchcase(name, pattern):
                yield name, role
                break


def check_coverage(chunk: nn.Module, roles: dict[str, str], sequence_parallel: bool) -> None:
    """Refuse a plan under which some parameters would silently get only a rank's summand of their gradients.

    Args:
        chunk: before it is split.
        roles: of its modules.
        sequence_parallel: whether the sequence is split between matrices.

    Raises:
        UserError: a parameter beside split matrices, or any under sequence parallelism, belongs to no role.
    """
    if not roles:
        raise UserError(
            f"the tensor plan of {type(chunk).__name__} matches none of its modules",
            key="tensor_plan",
            value=", ".join(chunk.tensor_plan()) if isinstance(chunk, HasTensorPlan) else None,
            instead="patterns of module names such as "
            + ", ".join(sorted(n for n, _ in chunk.named_modules() if n)[:5]),
        )
    for name, _ in chunk.named_parameters():
        owners = [name.rsplit(".", level)[0] for level in range(1, name.count(".") + 1)]
        nearest_roles = [roles[owner] for owner in owners if owner in roles]
        inside = bool(nearest_roles) and nearest_roles[0] in ("attention", "shared_input")
        if inside or (sequence_parallel and not nearest_roles):
            raise UserError(
                "the tensor plan gives no role to the module of this parameter"
                + (", which stands beside split matrices" if inside else ", as sequence parallelism needs"),
                key="tensor_plan",
                value=name,
                instead="`inner` between a column and a row; `sequence`, `scatter`, `gather` or `whole` elsewhere",
            )


def wrong(name: str, role: str, need: str, module: nn.Module) -> UserError:
    """A role that does not fit its module."""
    return UserError(
        f"the tensor plan's role {role} {need}, and {name} is {type(module).__name__}",
        key="tensor_plan",
        value=name,
        instead=f"another role, or {need.removeprefix('is for ')}",
    )
