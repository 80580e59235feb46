from pathlib import Path

import pytest

from tests.proof import __main__ as command
from tests.proof.cases import Case
from tests.proof.compare import Deviation
from tests.proof.table import TABLE_MARK, table


def test_the_command_holds_the_layouts_that_were_asked_for_and_writes_their_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "layouts.md"
    page.write_text(f"# Kept\n\n{TABLE_MARK}\n\nold numbers\n", encoding="utf-8")
    assert command.main(["--only", "conv clip", "--table", str(page)]) == 0
    told = capsys.readouterr().out
    assert "1/2 ok  1 ranks, conv clip: loss " in told
    assert "2 layouts, 0 over a limit" in told
    written = page.read_text(encoding="utf-8")
    assert written.startswith(f"# Kept\n\n{TABLE_MARK}\n\n2 layouts on 1 to 2 ranks")
    assert "| conv clip | 1 | " in written
    assert "old numbers" not in written


def test_a_layout_over_its_limit_is_told_and_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "deviation", lambda ranks, case: Deviation(0.5, 0.0, 0.0, "head.weight"))
    assert command.main(["--only", "conv clip"]) == 1
    told = capsys.readouterr().out
    assert "BAD 1 ranks, conv clip" in told
    assert "loss deviates by 5.0e-01, and the limit is 1e-06" in told


def test_the_table_has_the_largest_deviations_of_each_number_format() -> None:
    results = {
        Case.of("dp tp"): Deviation(1e-7, 2e-7, 3e-7, "head.weight"),
        Case.of("zero1"): Deviation(4e-7, 1e-7, 1e-7, "embed.weight"),
        Case.of("tp bf16"): Deviation(1e-5, 1e-4, 1e-3, "norm.weight"),
    }
    lines = table(results).splitlines()
    assert lines[0].startswith("3 layouts on 1 to 4 ranks")
    assert "| fp32 | 2 | 4.0e-07 | 2.0e-07 | 3.0e-07 | 1e-06, 2e-06, 5e-06 |" in lines
    assert "| bf16 | 1 | 1.0e-05 | 1.0e-04 | 1.0e-03 | 4e-04, 8e-03, 8e-02 |" in lines
    assert lines[-1] == "| tp bf16 | 2 | 1.0e-05 | 1.0e-04 | 1.0e-03 | `norm.weight` |"
