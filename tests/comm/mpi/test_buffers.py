from __future__ import annotations

import torch

from dthpc.comm.mpi.buffers import adjacent


def test_parts_of_one_tensor_in_order_are_one() -> None:
    whole = torch.arange(12.0)
    flat = adjacent([part.view(1, -1) for part in whole.split_with_sizes([5, 4, 3])])
    assert flat is not None
    assert flat.data_ptr() == whole.data_ptr()
    assert torch.equal(flat, whole)
    tail = adjacent(list(whole[6:].chunk(2)))
    assert tail is not None
    assert torch.equal(tail, whole[6:])


def test_others_are_not() -> None:
    whole = torch.arange(12.0)
    assert adjacent([whole[4:], whole[:4]]) is None
    assert adjacent([whole[:4], whole[5:]]) is None
    assert adjacent([whole[:6:2], whole[6:]]) is None
    assert adjacent([whole[:4], whole[4:].view(torch.int32)]) is None
    assert adjacent([torch.ones(3), torch.ones(3)]) is None
