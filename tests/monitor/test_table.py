from __future__ import annotations

import io

from dthpc.monitor.table import Column, is_terminal, plain_table, print_lines, print_table


def test_cells_are_aligned_and_lines_end_without_blanks() -> None:
    columns = (Column("NAME"), Column("STEP", right=True), Column("WHY"))
    assert plain_table(columns, [["a", "10", ""], ["long", "5", "x y"]]).splitlines() == [
        "NAME  STEP  WHY",
        "a       10",
        "long     5  x y",
    ]


def test_a_column_without_content_is_left_out() -> None:
    out = io.StringIO()
    print_table(out, (Column("A"), Column("B"), Column("C")), [["1", "", "3"]])
    assert out.getvalue() == "A  C\n1  3\n"


def test_a_closed_file_is_no_terminal() -> None:
    out = io.StringIO()
    out.close()
    assert not is_terminal(out)


def test_text_is_reduced_to_what_the_encoding_has() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    print_lines(out, "a – b… é")
    assert raw.getvalue() == b"a - b... ?\n"
