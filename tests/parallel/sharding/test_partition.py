from __future__ import annotations

import torch
from torch import nn

from dthpc.parallel.parts import Parts, whole_parts
from dthpc.parallel.sharding.options import ShardOptions
from dthpc.parallel.sharding.partition import ALONE, FIRST_BUCKET, partition


def names(
    chunks: list[nn.Module], options: ShardOptions, parts: Parts | None = None, ranks: int = 1
) -> list[list[str]]:
    parts = whole_parts(chunks) if parts is None else parts
    return [[part.name for _, part in members] for _, members in partition(chunks, parts, options, ranks)]


def layers(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(size, 1, bias=False) for size in sizes))


def test_buckets_follow_the_reverse_of_the_parameters_and_close_when_full() -> None:
    model = layers(10, 10, 10, 10, 10)
    assert names([model], ShardOptions(bucket_bytes=80)) == [
        ["4.weight", "3.weight"],
        ["2.weight", "1.weight"],
        ["0.weight"],
    ]
    assert names([model], ShardOptions(bucket_bytes=1)) == [[f"{n}.weight"] for n in (4, 3, 2, 1, 0)]
    assert names([model], ShardOptions()) == [[f"{n}.weight" for n in (4, 3, 2, 1, 0)]]


def test_the_first_bucket_is_small() -> None:
    count = FIRST_BUCKET // 4 // 10
    model = layers(*[count] * 30)
    assert [len(group) for group in names([model], ShardOptions(bucket_bytes=2 * FIRST_BUCKET), ranks=1000)] == [11, 19]


def test_a_large_parameter_is_a_bucket_by_itself_unless_it_would_need_padding() -> None:
    count = ALONE // 4
    model = layers(8, 2 * count, 2 * count + 1, 8)
    together = [["3.weight", "2.weight", "1.weight", "0.weight"]]
    assert names([model], ShardOptions(zero=2), ranks=2) == [["1.weight"], ["3.weight", "2.weight", "0.weight"]]
    assert names([model], ShardOptions(zero=2), ranks=3) == together
    assert names([model], ShardOptions(zero=1), ranks=2) == together


def test_formats_and_what_is_to_be_summed_keep_parameters_apart() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    found = partition([model], whole_parts([model]), ShardOptions(storage=torch.bfloat16))
    assert [(kind.dtype, [part.name for _, part in members]) for kind, members in found] == [
        (torch.float32, ["1.bias", "0.bias"]),
        (torch.bfloat16, ["1.weight", "0.weight"]),
    ]
    parts = {p: part.but(partial=part.name == "0.weight") for p, part in whole_parts([model]).items()}
    assert sorted(map(sorted, names([model], ShardOptions(), parts))) == [
        ["0.bias", "1.bias", "1.weight"],
        ["0.weight"],
    ]


def test_tied_parameters_lie_in_the_order_of_their_names_whatever_the_size() -> None:
    model = layers(10, 10, 10)
    parts = {
        p: part.but(name="zab"[number], tied_stage_rank=1)
        for number, (p, part) in enumerate(whole_parts([model]).items())
    }
    assert names([model], ShardOptions(bucket_bytes=1), parts) == [["a", "b", "z"]]


def test_frozen_parameters_are_left_out() -> None:
    model = layers(10, 10)
    model[0].requires_grad_(False)
    assert names([model], ShardOptions()) == [["1.weight"]]
