from __future__ import annotations

import json

from dthpc.train.state import TrainState


def test_the_state_survives_json() -> None:
    state, other = TrainState(step=7, samples=56), TrainState()
    other.load_state_dict(json.loads(json.dumps(state.state_dict())))
    assert other == state
