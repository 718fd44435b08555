"""The demo's model and text: shapes by closed form, real text that does not leak."""

from __future__ import annotations

import pydoc_data.topics

import pytest
import torch
from torch import nn

from advisor.inputs.bundled.gpt import GPT, loss
from advisor.inputs.bundled.gpt_shapes import SHAPES, GPTConfig
from advisor.tutorial.demo.text import ByteWindows, reference_text

TINY = GPTConfig(vocab_size=11, context=6, num_layers=2, num_heads=2, width=8)

# Parameter counts in millions. GPT-3 rows: Brown et al. 2020, table 2.1; the others by hand:
# gpt-10m 6 x (12 x 384^2 + 13 x 384) + (256 + 128 + 2) x 384 = 10,795,008.
PUBLISHED_MILLION = {"gpt-125m": 125, "gpt-1.3b": 1_300, "gpt-7b": 6_700, "gpt-13b": 13_000}


@pytest.mark.parametrize("name", SHAPES)
def test_a_bundled_name_has_the_parameters_of_the_closed_form(name: str) -> None:
    with torch.device("meta"):
        model = GPT(SHAPES[name])
    assert sum(p.numel() for p in model.parameters()) == SHAPES[name].parameters


def test_the_small_shape_counted_by_hand() -> None:
    assert SHAPES["gpt-10m"].parameters == 10_795_008


@pytest.mark.parametrize("name", PUBLISHED_MILLION)
def test_the_paper_shapes_have_the_published_size(name: str) -> None:
    assert SHAPES[name].parameters / 1e6 == pytest.approx(PUBLISHED_MILLION[name], rel=0.02)


def test_names_are_ordered_by_size() -> None:
    sizes = [config.parameters for config in SHAPES.values()]
    assert sizes == sorted(sizes)


def test_a_token_does_not_see_those_after_it() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    tokens = torch.randint(11, (1, 6))
    changed = tokens.clone()
    changed[0, 4] = (changed[0, 4] + 1) % 11
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4:], after[:, 4:])


def test_attention_equals_the_textbook_formula() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    attention = model.blocks[0].attention
    x = torch.randn(2, 6, 8)
    query, key, value = attention.qkv(x).split(8, dim=-1)
    heads = []
    for head in (slice(0, 4), slice(4, 8)):
        scores = query[..., head] @ key[..., head].transpose(1, 2) / 4**0.5
        scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), float("-inf"))
        heads.append(scores.softmax(-1) @ value[..., head])
    torch.testing.assert_close(attention(x), attention.out(torch.cat(heads, dim=-1)))


def test_an_untrained_model_guesses_evenly() -> None:
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=256, context=16, num_layers=2, num_heads=2, width=32)
    tokens = torch.randint(256, (4, 16))
    value = loss(GPT(config)(tokens), tokens.roll(1, dims=1))
    assert value.item() == pytest.approx(torch.log(torch.tensor(256.0)).item(), rel=0.02)


def test_dropout_is_off_unless_asked_for() -> None:
    torch.manual_seed(0)
    model = GPT(TINY).train()
    tokens = torch.randint(11, (2, 6))
    assert torch.equal(model(tokens), model(tokens))
    assert all(m.p == 0 for m in model.modules() if isinstance(m, nn.Dropout))


def test_the_text_is_the_reference_in_a_fixed_order() -> None:
    text = reference_text()
    first = pydoc_data.topics.topics[min(pydoc_data.topics.topics)].split("\n\n")[0]
    assert text.train.startswith(first.encode())
    assert reference_text() == text
    assert len(text.train) > 200_000


def test_about_a_tenth_is_held_out() -> None:
    text = reference_text()
    assert 0.07 < len(text.held_out) / len(text.train + text.held_out) < 0.13


def test_nothing_held_out_was_trained_on() -> None:
    text = reference_text()
    trained = " ".join(text.train.decode().split())
    # Short lines ("Example:", "See also:") recur in any manual.
    paragraphs = (" ".join(p.split()) for p in text.held_out.decode().split("\n\n"))
    assert [p for p in paragraphs if len(p) > 80 and p in trained] == []


def test_windows_cover_the_text_once_and_targets_are_one_ahead() -> None:
    text = bytes(range(100))
    windows = ByteWindows(text, length=9)
    tokens = b"".join(bytes(windows[i][0].tolist()) for i in range(len(windows)))
    targets = b"".join(bytes(windows[i][1].tolist()) for i in range(len(windows)))
    assert (tokens, targets) == (text[:99], text[1:])
    assert windows[0][0].dtype == torch.int64


def test_a_window_past_the_end_is_an_index_error() -> None:
    windows = ByteWindows(bytes(100), length=9)
    with pytest.raises(IndexError, match="11 of 11"):
        windows[11]
    assert len(list(windows)) == 11  # a plain loop ends
