from __future__ import annotations

import subprocess
import sys

import pytest

from dthpc.data.digits import TARGET, check_split, digits_file
from dthpc.data.images import Digits
from dthpc.errors import UserError


def test_the_file_is_found_and_nothing_heavy_is_imported() -> None:
    assert digits_file().is_file()
    heavy = "{'torch', 'numpy', 'sklearn', 'scipy'}"
    code = (
        f"import sys; from dthpc.data.digits import digits_file; digits_file(); assert not {heavy} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_class_that_reads_them_is_the_one_that_is_looked_for() -> None:
    assert f"{Digits.__module__}.{Digits.__name__}" == TARGET


def test_a_missing_package_is_told_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(UserError, match=r"pip install 'dthpc\[images\]'"):
        digits_file()


@pytest.mark.parametrize(("every", "mistakes"), [(-1, 1), (1, 1), (2, 0), (5, 0)])
def test_something_is_left_to_train_on(every: int, mistakes: int) -> None:
    assert len(list(check_split(every))) == mistakes
