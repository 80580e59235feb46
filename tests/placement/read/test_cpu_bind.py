from __future__ import annotations

import pytest

from dthpc.errors import UserError
from dthpc.placement.read.cpu_bind import read_cpu_bind

LINE = "cpu-bind=MASK - nid1, task  {0}  {0} [1477{0}]: mask {1} set\n"


def test_masks_of_tasks() -> None:
    text = "$ srun\n" + LINE.format(1, "0xf0") + LINE.format(0, "0xf") + LINE.format(0, "0xf")
    assert read_cpu_bind(text) == {0: frozenset(range(4)), 1: frozenset(range(4, 8))}


@pytest.mark.parametrize("text", ["nothing\n", LINE.format(0, "0x1") + LINE.format(0, "0x2")])
def test_nothing_and_two_masks_are_refused(text: str) -> None:
    with pytest.raises(UserError):
        read_cpu_bind(text)
