from __future__ import annotations

import torch

from dthpc.data.batches import micro_batches, rows

CPU = torch.device("cpu")


def test_micro_batches_cover_the_batch_in_order() -> None:
    inputs, targets = torch.arange(10).view(5, 2), torch.arange(5)
    parts = list(micro_batches(inputs, targets, 2, None, CPU))
    assert [len(t) for _, t in parts] == [2, 2, 1]
    assert torch.equal(torch.cat([i for i, _ in parts]), inputs)
    assert torch.equal(torch.cat([t for _, t in parts]), targets)


def test_no_size_means_one_part_and_an_empty_batch_has_none() -> None:
    assert len(list(micro_batches(torch.ones(5, 2), torch.ones(5), None, None, CPU))) == 1
    assert list(micro_batches(torch.ones(0, 2), torch.ones(0), None, None, CPU)) == []


def test_a_fixed_number_of_parts_may_end_in_short_and_empty_ones() -> None:
    parts = list(micro_batches(torch.arange(10).view(5, 2), torch.arange(5), 2, 4, CPU))
    assert [len(t) for _, t in parts] == [2, 2, 1, 0]
    assert parts[-1][0].shape == (0, 2)


def test_nests_are_cut_alike() -> None:
    inputs = {"ids": torch.arange(4), "more": [torch.arange(8).view(4, 2)]}
    assert rows(inputs) == 4
    *_, (last, target) = micro_batches(inputs, torch.arange(4), 3, None, CPU)
    assert last["ids"].tolist() == [3]
    assert last["more"][0].tolist() == [[6, 7]]
    assert target.tolist() == [3]
