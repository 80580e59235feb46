"""A job that only tells where its ranks are."""

from __future__ import annotations

from typing import Any


def tell(config: Any, context: Any) -> None:
    """Leave the node and the local number of each rank in the run's folder."""
    who = context.identity
    (context.run.path / f"host-{who.rank}").write_text(f"{who.host} {who.local_rank}")
