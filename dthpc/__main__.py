"""`python -m dthpc`: the same as the console script `dthpc`."""

from __future__ import annotations

import sys

from dthpc.cli import main

if __name__ == "__main__":
    sys.exit(main())
