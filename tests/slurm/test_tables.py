"""Cells of tables that are only aligned."""

from __future__ import annotations

import pytest

from dthpc.errors import UserError
from dthpc.slurm.tables import parse_table, separated_rows


def test_ruled_columns_keep_empty_cells() -> None:
    text = "   JobID    Account   State \n------- ---------- ------- \n      3            PENDING \n"
    assert parse_table(text, ["JobID"], "sacct") == [{"JobID": "3", "Account": "", "State": "PENDING"}]


def test_aligned_columns_with_blanks_in_a_cell() -> None:
    text = (
        "             JOBID PARTITION     NAME ST  NODES NODELIST(REASON)\n"
        "                 7      main   my net PD      2 (Nodes down, or reserved)\n"
        "                12      main     name  R      1 n1\n"
    )
    rows = parse_table(text, ["JOBID"], "squeue")
    assert [row["NAME"] for row in rows] == ["my net", "name"]
    assert rows[0]["NODELIST(REASON)"] == "(Nodes down, or reserved)"


def test_a_cell_between_two_columns_is_refused() -> None:
    text = "JOBID      NAME      ST\n    7    x    y   z    R\n"
    with pytest.raises(UserError, match="cannot be told from its neighbours"):
        parse_table(text, ["JOBID"], "squeue")


def test_lines_before_the_header_are_skipped_and_a_missing_header_is_told() -> None:
    assert parse_table("$ squeue\nJOBID|ST\n1|R\n", ["JOBID"], "squeue") == [{"JOBID": "1", "ST": "R"}]
    with pytest.raises(UserError, match="no header with JOBID"):
        parse_table("slurm_load_jobs error: Zero Bytes\n", ["JOBID"], "squeue")


def test_separated_rows() -> None:
    assert separated_rows("CLUSTER: x\n1|a\n\n2|b|\n", ["i", "n"], "c") == [{"i": "1", "n": "a"}, {"i": "2", "n": "b"}]
    with pytest.raises(UserError, match="has 4 columns where 2"):
        separated_rows("1|2|3|4\n", ["i", "n"], "c")


def test_a_table_that_lost_its_alignment_is_read_only_where_every_cell_is_there() -> None:
    assert parse_table("JOBID ST NODES\n17 PD 2\n", ["JOBID"], "squeue") == [{"JOBID": "17", "ST": "PD", "NODES": "2"}]
    with pytest.raises(UserError, match="cannot be told"):
        parse_table("JOBID ST NODES\n17 2\n", ["JOBID"], "squeue")


def test_a_word_across_a_rule_is_refused() -> None:
    with pytest.raises(UserError, match="cannot be told"):
        parse_table("JobID   State\n----- -------\n1234567 RUNNING\n", ["JobID"], "sacct")
