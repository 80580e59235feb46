from __future__ import annotations

import torch

from dthpc.checkpoint.manifest import TensorRecord
from dthpc.checkpoint.shares import Share, whole


def columns(start: int, stop: int, tensor: torch.Tensor) -> Share:
    """A flat range of the last two columns of a 3x5 matrix."""
    return Share("w", (3, 5), (0, 3), (3, 2), start, stop, tensor)


def test_a_whole_tensor_is_one_box_and_shares_its_memory() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    share = whole("w", tensor)
    (box,) = share.boxes(6)
    assert share.within(box).data_ptr() == tensor.data_ptr()
    assert (share.is_whole, share.record) == (True, TensorRecord((2, 3), "torch.float32"))


def test_boxes_of_a_range_share_the_memory_of_its_values() -> None:
    share = columns(1, 6, torch.arange(5.0))
    boxes = share.boxes(100)
    assert [(box.offsets, share.within(box).tolist()) for box in boxes] == [
        ((0, 1), [[0.0]]),
        ((1, 0), [[1.0, 2.0], [3.0, 4.0]]),
    ]
    share.within(boxes[1]).fill_(7.0)
    assert share.tensor.tolist() == [0.0, 7.0, 7.0, 7.0, 7.0]


def test_a_whole_part_need_not_be_contiguous() -> None:
    tensor = torch.arange(6.0).view(2, 3).t()
    share = columns(0, 6, tensor)
    assert [share.within(box).tolist() for box in share.boxes(2)] == [[[0.0, 3.0]], [[1.0, 4.0]], [[2.0, 5.0]]]
    assert not share.is_whole


def test_a_flat_whole_part_is_seen_in_its_shape() -> None:
    share = columns(0, 6, torch.arange(6.0))
    assert [share.within(box).tolist() for box in share.boxes(6)] == [[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]]


def test_a_scalar_and_an_empty_share() -> None:
    scalar = Share("s", (), (), (), 0, 1, torch.tensor([4.0]))
    assert [scalar.within(box).shape for box in scalar.boxes(1)] == [()]
    assert whole("none", torch.zeros(0, 3)).boxes(1) == []
    assert whole("none", torch.zeros(0, 3)).is_whole


def test_other_values_are_cut_as_the_first_were() -> None:
    share = columns(1, 6, torch.zeros(5)).holding("optim.w.exp_avg", torch.ones(5))
    assert (share.name, share.start, share.stop, share.offsets) == ("optim.w.exp_avg", 1, 6, (0, 3))
    assert share.tensor.tolist() == [1.0] * 5
