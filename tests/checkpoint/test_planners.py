from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from dthpc.checkpoint.dcp import TensorReader, read_tensors, write_tensors
from dthpc.checkpoint.planners import WritePlanner
from dthpc.checkpoint.ranks import Ranks
from dthpc.checkpoint.shares import Share, whole


def flat(start: int, stop: int, counts: bool = True) -> Share:
    """Elements of a 4x5 matrix whose elements are numbered."""
    return Share("w", (4, 5), (0, 0), (4, 5), start, stop, torch.arange(float(start), stop), counts)


def write(folder: Path, *shares: Share) -> None:
    write_tensors(shares, folder, Ranks())


def test_a_plan_covers_each_element_of_a_share_once() -> None:
    planner = WritePlanner([flat(3, 17)])
    planner.set_up_planner({}, None, True)
    chunks = [item.tensor_data.chunk for item in planner.create_local_plan().items if item.tensor_data]
    assert sum(math.prod(chunk.sizes) for chunk in chunks) == 14
    assert [tuple(chunk.offsets) for chunk in chunks] == [(0, 3), (1, 0), (3, 0)]


def test_a_copy_that_does_not_count_is_not_written(tmp_path: Path) -> None:
    wrong = Share("w", (4, 5), (0, 0), (4, 5), 0, 20, torch.full((20,), 99.0), counts=False)
    write(tmp_path, wrong, flat(0, 20))
    target = torch.zeros(4, 5)
    read_tensors([whole("w", target)], TensorReader(tmp_path), Ranks())
    assert torch.equal(target.flatten(), torch.arange(20.0))


@pytest.mark.parametrize("shares", [(flat(0, 12), flat(13, 20)), (flat(0, 20, counts=False), flat(0, 10))])
def test_a_tensor_with_a_hole_is_not_written(tmp_path: Path, shares: tuple[Share, ...]) -> None:
    with pytest.raises(Exception, match=r"of the 20 elements of w"):
        write(tmp_path, *shares)


def test_shares_that_overlap_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"validate global plan|overlapping|elements of w"):
        write(tmp_path, flat(0, 12), flat(10, 20))


def test_a_share_of_another_shape_is_not_read(tmp_path: Path) -> None:
    write(tmp_path, flat(0, 20))
    with pytest.raises(ValueError, match=r"w was saved with the shape \(4, 5\) and not \(5, 4\)"):
        read_tensors([whole("w", torch.zeros(5, 4))], TensorReader(tmp_path), Ranks())


def test_two_shares_of_one_tensor_are_both_filled(tmp_path: Path) -> None:
    write(tmp_path, flat(0, 20))
    first, copy = flat(2, 11), flat(0, 20)
    for share in (first, copy):
        share.tensor.zero_()
    read_tensors([first, copy], TensorReader(tmp_path), Ranks())
    assert torch.equal(first.tensor, torch.arange(2.0, 11.0))
    assert torch.equal(copy.tensor, torch.arange(20.0))
