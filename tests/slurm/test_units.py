"""Times, sizes, TRES and GRES in Slurm's spellings."""

from __future__ import annotations

import math

import pytest

from dthpc.errors import UserError
from dthpc.slurm.units import (
    Gres,
    gpus_of_gres,
    gpus_of_tres,
    memory_to_bytes,
    optional_seconds,
    parse_gres,
    parse_tres,
    sbatch_memory_to_mb,
    sbatch_time_to_seconds,
    seconds_to_time,
    time_to_seconds,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1-02:03:04", 93784),
        ("02:03:04", 7384),
        ("18:18", 1098),
        ("90", 90),
        ("30 sec", 30),
        ("00:00.123", 0),
        ("UNLIMITED", math.inf),
        ("infinite", math.inf),
    ],
)
def test_printed_times(text: str, seconds: float) -> None:
    assert time_to_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "1-", "1:", "a", "-5", "1-0", "1 2"])
def test_printed_times_refused(text: str) -> None:
    with pytest.raises(UserError, match="is no time"):
        time_to_seconds(text)


def test_absent_times() -> None:
    assert [optional_seconds(text) for text in ("", "N/A", "(null)", "NONE", "Partition_Limit")] == [None] * 5


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90 * 60),
        (" 5 ", 300),
        ("1:30", 90),
        ("1:00:00", 3600),
        ("2-12", 60 * 3600),
        ("2-12:30", 60 * 3600 + 1800),
        ("1-2:3:4", 93784),
        ("0", math.inf),
        ("UNLIMITED", math.inf),
    ],
)
def test_typed_times(text: str, seconds: float) -> None:
    assert sbatch_time_to_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "abc", "1:2:3:4", "1.5", "-", "1-", "1h"])
def test_typed_times_refused_with_the_key(text: str) -> None:
    with pytest.raises(UserError, match=r"cluster\.time"):
        sbatch_time_to_seconds(text)


@pytest.mark.parametrize("text", ["00:00:59", "1-00:00:01", "13:02:03", "UNLIMITED"])
def test_times_written_as_slurm_writes_them(text: str) -> None:
    assert seconds_to_time(time_to_seconds(text)) == text


@pytest.mark.parametrize(("text", "size"), [("8K", 8192), ("62.5G", 62.5 * 2**30), ("7", 7 * 2**20), ("2Gn", 2**31)])
def test_printed_memory(text: str, size: float) -> None:
    assert memory_to_bytes(text) == size


@pytest.mark.parametrize(("text", "mb"), [("64G", 65536), ("64GB", 65536), ("1500", 1500), ("1k", 1), ("0", 0)])
def test_typed_memory(text: str, mb: int) -> None:
    assert sbatch_memory_to_mb(text) == mb


@pytest.mark.parametrize("text", ["1.5G", "lots", "", "64 G", "-1"])
def test_typed_memory_refused_with_the_key(text: str) -> None:
    with pytest.raises(UserError, match=r"cluster\.memory"):
        sbatch_memory_to_mb(text)


def test_tres() -> None:
    tres = parse_tres("billing=8,cpu=4,gres/gpu=2,gres/gpu:h100=2,mem=1G,node=1")
    assert tres["mem"] == "1G"
    assert gpus_of_tres(tres) == (2, "h100")
    assert gpus_of_tres(parse_tres("gres/gpu:a=1,gres/gpu:b=3")) == (4, None)
    assert gpus_of_tres(parse_tres("(null)")) == (0, None)
    with pytest.raises(UserError, match="name=value"):
        parse_tres("cpu=1,node")


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("(null)", []),
        ("gpu:4", [Gres("gpu", None, 4)]),
        ("gpu", [Gres("gpu", None, 1)]),
        ("gpu:my-card-9:2(S:0,2),nic:1", [Gres("gpu", "my-card-9", 2, "S:0,2"), Gres("nic", None, 1)]),
        ("gres:gpu:1", [Gres("gpu", None, 1)]),
        ("gres/gpu=8", [Gres("gpu", None, 8)]),
        ("gpu:h100_1g.10gb:7(IDX:0-6)", [Gres("gpu", "h100_1g.10gb", 7, "IDX:0-6")]),
        ("bw:fast:no_consume:2K", [Gres("bw", "fast", 2048)]),
    ],
)
def test_gres(text: str, entries: list[Gres]) -> None:
    assert parse_gres(text) == entries


def test_gres_refused() -> None:
    with pytest.raises(UserError, match="is no generic resource"):
        parse_gres("gpu:a:b:2")


def test_gpus_among_gres() -> None:
    assert gpus_of_gres(parse_gres("gpu:a:2,nic:4")) == (2, "a")
    assert gpus_of_gres(parse_gres("gpu:a:2,gpu:b:2")) == (4, None)
