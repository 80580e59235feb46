"""Where the handwritten digits lie that scikit-learn ships; free of torch, so that the login node can look."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from dthpc.errors import UserError

TARGET = "dthpc.data.images.Digits"
"""The class that reads them."""

FILE = "datasets/data/digits.csv.gz"
"""Their file, within scikit-learn."""


def digits_file() -> Path:
    """The file, without an import of scikit-learn: that would import SciPy, which takes longer than all the rest.

    Raises:
        UserError: scikit-learn is not installed.
    """
    package = importlib.util.find_spec("sklearn")
    for folder in (package.submodule_search_locations or []) if package is not None else []:
        file = Path(folder) / FILE
        if file.is_file():
            return file
    raise UserError(
        "the images are a part of scikit-learn, which is not installed here",
        key="data._target_",
        value=TARGET,
        instead="pip install 'dthpc[images]', or data=stdlib",
    )


def check_split(held_out_every: int) -> Iterator[UserError]:
    """What is wrong with holding out each n-th image."""
    if held_out_every < 2:
        why = "leaves nothing to train on"
        yield UserError(why, key="data.held_out_every", value=held_out_every, instead="2 or more")
