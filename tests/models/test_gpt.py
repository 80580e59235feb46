from __future__ import annotations

import itertools

import pytest
import torch

from dthpc.errors import UserError, UserErrors
from dthpc.models.dropout import Dropout, DropoutStream, attach
from dthpc.models.gpt import GPT
from dthpc.models.init import init_parameters

TINY = {"vocab_size": 19, "dim": 16, "layers": 2, "heads": 4, "max_seq_len": 12}


def build(**fields: object) -> GPT:
    model = GPT(**{**TINY, **fields})  # type: ignore[arg-type]
    init_parameters(model, 3)
    return model.eval()


@pytest.mark.parametrize(
    ("norm", "position", "mlp", "tied", "kv_heads"),
    [
        (*words, kv_heads)
        for words, kv_heads in zip(
            itertools.product(("rms", "layer"), ("rope", "learned"), ("swiglu", "gelu"), (True, False)),
            itertools.cycle((1, 2, 4)),
            strict=False,
        )
    ],
)
def test_every_variant_gives_logits_and_a_gradient_for_each_parameter(
    norm: str, position: str, mlp: str, tied: bool, kv_heads: int
) -> None:
    model = build(norm=norm, position=position, mlp=mlp, tie_embeddings=tied, kv_heads=kv_heads)
    tokens = torch.randint(0, 19, (3, 12), generator=torch.Generator().manual_seed(0))
    logits = model(tokens)
    assert logits.shape == (3, 12, 19)
    logits.square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()] == []


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_a_token_changes_only_what_comes_at_its_place_or_later(position: str) -> None:
    model = build(position=position)
    tokens = torch.randint(0, 19, (1, 12), generator=torch.Generator().manual_seed(1))
    other = tokens.clone()
    other[0, 7] = (other[0, 7] + 1) % 19
    before, after = model(tokens), model(other)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] - after[:, 7:]).abs().amax(dim=-1).min() > 1e-6


def test_a_shorter_sequence_gives_the_same_logits() -> None:
    model = build()
    tokens = torch.randint(0, 19, (2, 12), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(model(tokens)[:, :5], model(tokens[:, :5]), rtol=1e-5, atol=1e-6)


def test_grouped_query_attention_equals_heads_that_are_repeated() -> None:
    grouped, full = build(kv_heads=2), build(kv_heads=4)
    weights = grouped.state_dict()
    for name in list(weights):
        if name.endswith((".k.weight", ".v.weight")):
            heads = weights[name].view(2, 4, 16)
            weights[name] = heads.repeat_interleave(2, dim=0).reshape(16, 16)
    full.load_state_dict(weights)
    tokens = torch.randint(0, 19, (2, 12), generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(grouped(tokens), full(tokens), rtol=1e-5, atol=1e-6)


def test_tied_embeddings_are_one_parameter() -> None:
    tied, untied = build(tie_embeddings=True), build(tie_embeddings=False)
    assert tied.head.weight is tied.embed.weight
    assert "head.weight" not in dict(tied.named_parameters())
    assert "head.weight" in dict(untied.named_parameters())


def test_dropout_acts_in_training_only() -> None:
    model = build(dropout=0.5)
    tokens = torch.randint(0, 19, (2, 12), generator=torch.Generator().manual_seed(4))
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


def test_global_names_are_stable() -> None:
    names = set(dict(build(layers=1, kv_heads=2).named_parameters()))
    assert names == {
        "embed.weight",
        "blocks.0.attention_norm.weight",
        "blocks.0.attention.q.weight",
        "blocks.0.attention.k.weight",
        "blocks.0.attention.v.weight",
        "blocks.0.attention.out.weight",
        "blocks.0.mlp_norm.weight",
        "blocks.0.mlp.gate.weight",
        "blocks.0.mlp.up.weight",
        "blocks.0.mlp.down.weight",
        "norm.weight",
    }


def test_sizes_that_do_not_fit_are_all_told_with_their_numbers() -> None:
    with pytest.raises(UserErrors) as caught:
        GPT(vocab_size=19, dim=18, layers=1, heads=4, kv_heads=3)
    text = str(caught.value)
    assert "model.dim=18" in text
    assert "model.heads=4 query heads do not divide among 3" in text
    with pytest.raises(UserError, match=r"model\.norm=batch"):
        GPT(vocab_size=19, norm="batch")


def test_tables_are_right_after_a_model_without_memory_got_some() -> None:
    # `to_empty` makes two weights of one that is tied.
    expected = build(tie_embeddings=False)
    with torch.device("meta"):
        model = GPT(**TINY, tie_embeddings=False)  # type: ignore[arg-type]
    model.to_empty(device="cpu")
    model.rope_cos.fill_(7.0)
    model.rope_sin.fill_(7.0)
    model.reset_buffers()
    init_parameters(model, 3)
    tokens = torch.randint(0, 19, (2, 12), generator=torch.Generator().manual_seed(5))
    assert torch.equal(model.eval()(tokens), expected(tokens))


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_residual_stream_is_fp32_whatever_the_table_is_stored_in(position: str) -> None:
    model = build(position=position)
    model.embed.to(torch.bfloat16)
    seen = []
    model.blocks["0"].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    model.head = None
    assert model(torch.zeros(1, 3, dtype=torch.int64)).dtype == torch.float32
    assert seen == [torch.float32]


def test_one_place_drops_other_elements_than_another() -> None:
    model = build(dropout=0.5).train()
    stream = DropoutStream(1)
    stream.samples = range(2)
    attach(model, stream)
    x = torch.ones(2, 12, 16)
    masks = [m(x) != 0 for m in model.modules() if isinstance(m, Dropout)]
    assert len(masks) == 5
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 5
    tokens = torch.randint(0, 19, (2, 12), generator=torch.Generator().manual_seed(4))
    assert torch.equal(model(tokens), model(tokens))
