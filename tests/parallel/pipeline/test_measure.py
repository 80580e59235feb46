from __future__ import annotations

import copy

import torch

from dthpc.models.gpt import GPT
from tests.parallel.pipeline import tasks


def test_layers_are_measured_alone_and_the_model_stays_as_it_is() -> None:
    with torch.device("meta"):
        meta = GPT(vocab_size=16, dim=8, layers=3, heads=2, max_seq_len=8, dropout=0.1)
    for model in (GPT(vocab_size=16, dim=8, layers=3, heads=2, max_seq_len=8, dropout=0.1), meta):
        before, state = copy.deepcopy(model), torch.get_rng_state()
        seconds = tasks.measure_gpt(model)
        assert len(seconds) == 3
        assert min(seconds) > 0
        assert torch.equal(torch.get_rng_state(), state)
        for one, other in zip(model.parameters(), before.parameters(), strict=True):
            assert one.grad is None
            assert one.is_meta == other.is_meta
            assert one.is_meta or torch.equal(one, other)
