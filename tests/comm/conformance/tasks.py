"""What a rank does with a batch of cases."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.comm.conformance.cases import Case
from tests.comm.conformance.operations import Called, Place, call, same

_UNDER_WAY = 5
"""Asynchronous calls that are left under way together, and then waited for last first."""


def run_cases(rank: int, cases: list[Case], through_memory: bool = False) -> list[str]:
    """Make all calls in order; returns what went wrong.

    Args:
        rank: this rank.
        cases: the calls.
        through_memory: whether MPI's group uses the memory of the node for messages of any size.
    """
    with pytest.MonkeyPatch.context() as patch:
        if through_memory:
            patch.setattr("dthpc.comm.mpi.near.LEAST", 1)
        return _run_cases(cases)


def _run_cases(cases: list[Case]) -> list[str]:
    warnings.simplefilter("ignore")
    places = _places()
    wrong: list[str] = []
    pending: list[tuple[Case, Called]] = []
    for case in cases:
        place = places.get(case.group)
        if place is None:
            continue
        try:
            called = call(case, place)
        except Exception as error:
            raise RuntimeError(f"{case} raised {type(error).__name__}: {error}") from error
        pending.append((case, called))
        if not case.asynchronous or len(pending) == _UNDER_WAY:
            _settle(pending, wrong)
    _settle(pending, wrong)
    return wrong


def _settle(pending: list[tuple[Case, Called]], wrong: list[str]) -> None:
    for case, called in reversed(pending):
        for work in called.works:
            work.wait()
        for found, expected in called.pairs:
            if not same(found, expected):
                wrong.append(f"{case} gave {_short(found)} instead of {_short(expected)}")
    pending.clear()


def _places() -> dict[str, Place]:
    """This rank's place in each kind of group that it is in."""
    size, rank = dist.get_world_size(), dist.get_rank()
    kinds: dict[str, list[list[int]]] = {"world": [list(range(size))]}
    if size > 2:
        kinds["first"] = [list(range(size - 1))]
        kinds["odd"] = [list(range(1, size, 2))]
    if size % 2 == 0 and size > 2:
        kinds["mesh_rows"] = [[at, at + 1] for at in range(0, size, 2)]
        kinds["mesh_columns"] = [list(range(column, size, 2)) for column in range(2)]
    places: dict[str, Place] = {}
    for kind, groups in kinds.items():
        for ranks in groups:
            group: Any = dist.group.WORLD if kind == "world" else dist.new_group(ranks)
            if rank in ranks and len(ranks) > 1:
                places[kind] = Place(group, ranks, ranks.index(rank))
    return places


def _short(tensor: torch.Tensor) -> str:
    text = str(tensor.flatten()[:8].tolist())
    return f"{text[:-1]}, …]" if tensor.numel() > 8 else text
