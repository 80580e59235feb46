"""Masks that follow the samples, however rows, sequences and heads are dealt out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dthpc.models.dropout import Dropout, DropoutStream, attach, keep_mask
from dthpc.models.layers import Attention

WORD = (1 << 64) - 1


def layer(p: float = 0.3, seed: int = 7, samples: range | Tensor | None = None, name: str = "a") -> Dropout:
    module = Dropout(p)
    module.stream, module.name = DropoutStream(seed), name
    module.stream.samples = samples
    return module


def kept(module: Dropout, *shape: int) -> Tensor:
    return module(torch.ones(shape)) != 0


def splitmix(state: int, outputs: int) -> list[int]:
    """The published algorithm, in Python's integers."""
    found = []
    for _ in range(outputs):
        state = (state + 0x9E3779B97F4A7C15) & WORD
        word = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
        found.append(word ^ (word >> 31))
    return found


def test_decisions_are_the_16_bit_parts_of_splitmix64() -> None:
    keys = [5, -3, (1 << 63) - 1]
    mask = keep_mask(torch.tensor(keys), (3, 2, 6), 0.25)
    for row, key in enumerate(keys):
        words = splitmix(key & WORD, 4)
        parts = [[(word >> 16 * lane) & 0xFFFF for word in words[t : t + 2] for lane in range(4)] for t in (0, 2)]
        signed = [[part - (1 << 16) if part >> 15 else part for part in line[:6]] for line in parts]
        assert mask[row].tolist() == [[part >= (1 << 14) - (1 << 15) for part in line] for line in signed]


def test_rows_keep_their_masks_wherever_they_are_computed() -> None:
    whole = kept(layer(samples=range(10, 18)), 8, 5, 7)
    assert torch.equal(kept(layer(samples=range(13, 15)), 2, 5, 7), whole[3:5])
    assert torch.equal(kept(layer(samples=torch.tensor([17, 10])), 2, 5, 7), whole[[7, 0]])
    assert torch.equal(kept(layer(samples=range(10, 18)), 40, 7), whole.view(40, 7))


@pytest.mark.parametrize("dim", [1, 2, -1])
@pytest.mark.parametrize("width", [6, 9])
def test_slices_drop_what_the_whole_drops(dim: int, width: int) -> None:
    module = layer(samples=range(3))
    whole = kept(module, 3, 9, 2 * width) if dim != 1 else kept(module, 3, 2 * width, 9)
    slices = []
    for index in (0, 1):
        module.shard = (dim, index, 2)
        slices.append(kept(module, *whole.chunk(2, dim)[index].shape))
    assert torch.equal(torch.cat(slices, dim), whole)


def test_masks_differ_between_seeds_steps_samples_layers_and_places() -> None:
    module = layer(0.5, samples=range(2))
    assert module.stream is not None
    masks = [kept(module, 2, 4, 16)]
    masks.append(kept(layer(0.5, seed=8, samples=range(2)), 2, 4, 16))
    masks.append(kept(layer(0.5, name="b", samples=range(2)), 2, 4, 16))
    module.stream.step = 1
    masks.append(kept(module, 2, 4, 16))
    rows = [row for mask in masks for row in mask.view(8, 16)]
    assert len({tuple(row.tolist()) for row in rows}) == 32


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_each_element_is_dropped_with_the_probability_and_the_mean_stays(p: float) -> None:
    x = torch.ones(64, 50, 128)
    out = layer(p, samples=range(64))(x)
    share = (out == 0).double()
    # Five standard deviations of a binomial share, for the whole, for each row and for each column.
    for count, found in ((x.numel(), share.mean()), (6400, share.mean((1, 2))), (3200, share.mean((0, 1)))):
        assert ((found - p).abs() < 5 * (p * (1 - p) / count) ** 0.5 + 1e-5).all()
    assert abs(out.mean().item() - 1) < 0.02
    assert out.max().item() == pytest.approx(1 / (1 - p), rel=1e-4)


def test_neighbouring_decisions_are_independent() -> None:
    dropped = (~kept(layer(0.5, samples=range(64)), 64, 64, 64)).double() - 0.5
    for shift, dim in ((1, 0), (1, 1), (1, 2), (4, 2), (32, 2)):
        correlation = 4 * (dropped * dropped.roll(shift, dim)).mean().item()
        assert abs(correlation) < 5 / 512


def test_gradients_pass_where_values_do() -> None:
    module = layer(samples=range(4))
    x = torch.randn(4, 6, requires_grad=True)
    module(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, module(torch.ones(4, 6)))


def test_types_are_kept_and_evaluation_and_p_0_do_nothing() -> None:
    x = torch.randn(2, 6, dtype=torch.bfloat16)
    assert layer(samples=range(2))(x).dtype == torch.bfloat16
    assert layer(samples=range(2)).eval()(x) is x
    assert layer(0.0, samples=range(2))(x) is x
    assert layer(samples=range(0))(x[:0]).shape == (0, 6)


def test_alone_it_draws_as_torch_does() -> None:
    x = torch.randn(5, 6)
    for module in (Dropout(0.5), layer(0.5)):
        torch.manual_seed(1)
        mine = module(x)
        torch.manual_seed(1)
        assert torch.equal(mine, nn.Dropout(0.5)(x))


def test_wrong_use_is_told() -> None:
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        Dropout(1.0)
    with pytest.raises(ValueError, match="5 rows cannot be dealt to 2 samples"):
        layer(samples=range(2))(torch.ones(5, 3))


def attention(heads: int, kv_heads: int, p: float) -> Attention:
    torch.manual_seed(0)
    module = Attention(24, heads, kv_heads, bias=True, dropout=p)
    stream = DropoutStream(3)
    stream.samples = range(4, 6)
    attach(module, stream)
    return module


def test_attach_reaches_all_layers_that_drop_and_tells_them_their_names() -> None:
    stream = DropoutStream(0)
    model = nn.ModuleDict({"x": nn.Sequential(Dropout(0.1), Attention(8, 2, 2, bias=False, dropout=0.1))})
    attach(model, stream)
    names = {m.name for m in model.modules() if getattr(m, "stream", None) is stream}
    assert names == {"x.0", "x.1.core"}


def test_attention_with_masks_is_the_fused_one_where_nothing_is_dropped() -> None:
    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(1))
    # So small a probability is rounded to none, and so goes through the explicit form.
    torch.testing.assert_close(attention(6, 2, 1e-9)(x, None), attention(6, 2, 0.0)(x, None), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kv_heads", [2, 6])
def test_heads_keep_their_masks_when_they_are_dealt_out(kv_heads: int) -> None:
    x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(1))
    whole = attention(6, kv_heads, 0.4)
    parts = []
    for rank in range(2):
        part = attention(3, kv_heads // 2, 0.4)
        part.head_dim = 4
        part.first_head = 3 * rank
        for mine, all_ in ((part.q, whole.q), (part.k, whole.k), (part.v, whole.v)):
            mine.weight = nn.Parameter(all_.weight.chunk(2)[rank])
            mine.bias = nn.Parameter(all_.bias.chunk(2)[rank])
        part.out.weight = nn.Parameter(whole.out.weight.chunk(2, 1)[rank])
        part.out.bias = nn.Parameter(whole.out.bias / 2)
        parts.append(part(x, None))
    torch.testing.assert_close(parts[0] + parts[1], whole(x, None), rtol=1e-5, atol=1e-6)
