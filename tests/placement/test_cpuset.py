from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dthpc.errors import UserError
from dthpc.placement.cpuset import format_cpus, format_mask, parse_cpus, parse_mask

CPUS = st.frozensets(st.integers(0, 700))


@given(CPUS)
def test_a_list_and_a_mask_give_back_their_cpus(cpus: frozenset[int]) -> None:
    assert parse_cpus(format_cpus(cpus)) == cpus
    assert parse_mask(format_mask(cpus)) == cpus


@given(CPUS)
def test_the_kernels_words_of_32_bits_give_back_their_cpus(cpus: frozenset[int]) -> None:
    digits = f"{sum(1 << cpu for cpu in cpus):0176x}"
    assert parse_mask(",".join(digits[at : at + 8] for at in range(0, len(digits), 8))) == cpus


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("", []),
        (" 0-3, 8\n", [0, 1, 2, 3, 8]),
        ("0-8:4", [0, 4, 8]),
        ("0-9:2/5", [0, 1, 5, 6]),
        ("3,1,1", [1, 3]),
    ],
)
def test_lists_as_tools_write_them(text: str, cpus: list[int]) -> None:
    assert sorted(parse_cpus(text)) == cpus


@pytest.mark.parametrize(
    ("text", "cpus"), [("0x3f", range(6)), ("0xffffff00,,0x0", range(72, 96)), ("0x0", []), ("00000001,00000000", [32])]
)
def test_masks_as_tools_write_them(text: str, cpus: list[int]) -> None:
    assert sorted(parse_mask(text)) == list(cpus)


@pytest.mark.parametrize("text", ["3-1", "a", "1-", "0-3:0", "0-99999999", "1;2", "N/A"])
def test_a_list_of_another_form_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(UserError, match=r"topo\.txt") as caught:
        parse_cpus(text, "topo.txt")
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["", "0x", "0xfg", "fffffffff,0", "0xf...f"])
def test_a_mask_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        parse_mask(text)
