from __future__ import annotations

import os
import socket

import pytest
import torch
from torch import Tensor
from torch.distributed import DistNetworkError

from dthpc.parallel.pipeline.wires import SHORT, Wires
from tests.parallel.pipeline import tasks
from tests.ranks import pool


def pair(timeout_s: float = 20.0) -> tuple[Wires, Wires]:
    """The ends of a wire between ranks 0 and 1."""
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Wires({1: first}, timeout_s), Wires({0: second}, timeout_s)


def send(wires: Wires, peer: int, tag: int, tensor: Tensor) -> None:
    wires.send(peer, tag, tensor, wires.place(tensor.shape, tensor.dtype))


def receive(wires: Wires, peer: int, tag: int, size: torch.Size, dtype: torch.dtype) -> Tensor:
    return wires.receive(peer, tag, wires.place(size, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_tensor_arrives_as_it_was_sent(dtype: torch.dtype) -> None:
    here, there = pair()
    sent = torch.randn(3, 5).to(dtype).t()
    kept = sent.clone()
    send(here, 1, 7, sent)
    sent.zero_()
    got = receive(there, 0, 7, torch.Size((5, 3)), dtype)
    assert torch.equal(got, kept)
    assert got.is_contiguous()


def test_messages_are_taken_by_their_tags_and_of_one_tag_in_the_order_of_sending() -> None:
    here, there = pair()
    for tag, value in ((1, 10.0), (2, 20.0), (1, 11.0), (3, 30.0)):
        send(here, 1, tag, torch.full((tag, 2), value))
    taken = [receive(there, 0, tag, torch.Size((tag, 2)), torch.float32) for tag in (3, 1, 2, 1)]
    assert [one[0, 0].item() for one in taken] == [30.0, 10.0, 20.0, 11.0]


def test_sending_more_than_the_kernel_holds_waits_for_nobody() -> None:
    here, there = pair()
    size = torch.Size((SHORT // 4,))
    count = 0
    while here.pending < 3:
        send(here, 1, count, torch.full(size, float(count)))
        count += 1
    # The other end is as full, so that both can get on only by taking while they send.
    for number in range(count):
        send(there, 0, number, torch.full(size, float(-number)))
    assert there.pending == 3
    for number in range(count):
        assert receive(there, 0, number, size, torch.float32)[0].item() == number
        assert receive(here, 1, number, size, torch.float32)[0].item() == -number
    for end in (here, there):
        end.finish()
        assert end.pending == 0


def test_a_rank_that_is_gone_or_silent_is_named() -> None:
    here, there = pair(timeout_s=0.05)
    with pytest.raises(DistNetworkError, match=r"timed out: rank 1 of the pipeline has sent nothing for 0\.05 s"):
        receive(here, 1, 0, torch.Size((1,)), torch.float32)
    send(there, 0, 0, torch.ones(1))
    there.close()
    assert receive(here, 1, 0, torch.Size((1,)), torch.float32).item() == 1
    with pytest.raises(DistNetworkError, match="rank 1 of the pipeline is gone"):
        receive(here, 1, 1, torch.Size((1,)), torch.float32)
    with pytest.raises(DistNetworkError, match="rank 1 of the pipeline is gone"):
        send(here, 1, 2, torch.ones(1))


def test_a_child_process_does_not_hold_a_wire_open() -> None:
    here, there = pair()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(write)
        os.read(read, 1)  # until the parent is done
        os._exit(0)
    try:
        there.close()
        with pytest.raises(DistNetworkError, match="is gone"):
            receive(here, 1, 0, torch.Size((1,)), torch.float32)
    finally:
        os.close(write)
        os.waitpid(child, 0)
        os.close(read)


def test_neighbours_of_one_host_are_connected_and_no_others() -> None:
    assert pool().run(4, tasks.wired) == [[1], [0, 2], [1, 3], [2]]
    assert pool().run(4, tasks.wired, 2) == [[1], [0], [3], [2]]
