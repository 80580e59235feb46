from __future__ import annotations

import os

import torch

from dthpc.comm.shared.segment import PAGE, Segment, create, free_memory, pages, reserve


def test_two_mappings_of_a_file_show_the_same_memory_and_outlive_it() -> None:
    descriptor = create(3 * PAGE)
    reserve(descriptor, 1, PAGE)
    one, other = Segment.map(descriptor, 3, PAGE), Segment.map(descriptor, 3, PAGE)
    os.close(descriptor)
    mine = one.of(1).view(torch.float32)
    mine.fill_(2)
    assert other.of(1).view(torch.float32).eq(2).all()
    assert other.of(0).eq(0).all()
    assert other.of(2).eq(0).all()
    del one
    assert mine.eq(2).all()


def test_a_tensor_is_found_only_where_it_lies_whole() -> None:
    descriptor = create(2 * PAGE)
    segment = Segment.map(descriptor, 2, PAGE)
    os.close(descriptor)
    assert segment.offset(segment.of(1)[64:128], 1) == 64
    assert segment.offset(segment.of(1)[64:128], 0) is None
    assert segment.offset(segment.flat[PAGE - 4 : PAGE + 4], 0) is None
    assert segment.offset(torch.empty(4), 0) is None


def test_bytes_are_whole_pages() -> None:
    assert [pages(nbytes) for nbytes in (0, 1, PAGE, PAGE + 1)] == [PAGE, PAGE, PAGE, 2 * PAGE]


def test_free_memory_is_no_more_than_the_host_has() -> None:
    assert 0 < free_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
