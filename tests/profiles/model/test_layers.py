"""The layers of captured units against arithmetic by hand."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from profiles.capture.capture import capture
from profiles.model.layers import INPUT, LayerCost, LayerKind
from profiles.model.profile import ModelProfile, Numerics, UnitCost
from tests.contract.subjects import HEAD, Decoder, batch_of
from tests.engines.cases import token_loss
from tests.engines.tensor.biases import HEADS, Slopes, sample

ROWS, TOKENS, WIDTH, VOCABULARY = 2, 16, 128, 256
F32, BF16 = 4, 2
HIDDEN = ROWS * TOKENS * WIDTH  # elements


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    numerics = (Numerics.AS_BUILT, Numerics.BF16, Numerics.BF16_AUTOCAST)
    return capture(Decoder(tied=True), batch_of(ROWS), loss_fn=token_loss, numerics=numerics)


def layers_of(
    profile: ModelProfile, unit: str, numerics: Numerics = Numerics.AS_BUILT
) -> dict[str, LayerCost]:
    match = next(each for each in profile.units if each.name == unit)
    return {layer.path: layer for layer in match.cost(numerics).layers}


def test_layers_come_in_call_order_with_what_feeds_them(profile: ModelProfile) -> None:
    layers = layers_of(profile, "blocks.1")
    assert list(layers) == [
        *(f"attention.{name}" for name in "qkvo"),
        *(f"feed_forward.{name}" for name in ("gate", "up", "down")),
    ]
    # Queries, keys and values take the norm's tensor; the rest of the block feeds on its input too.
    assert [layer.same_input for layer in layers.values()] == [0, 0, 0, 3, 4, 4, 6]
    assert [layer.sources for layer in layers.values()] == [
        (INPUT,), (INPUT,), (INPUT,), (0, 1, 2), (INPUT, 3), (INPUT, 3), (4, 5),
    ]  # fmt: skip
    assert [n for n, layer in layers.items() if layer.reaches_output] == [
        "attention.o",
        "feed_forward.down",
    ]


@pytest.mark.parametrize(("is_read", "reaching"), [(False, ["o"]), (True, ["q", "k", "o"])])
def test_what_no_code_takes_of_a_call_reaches_nothing(is_read: bool, reaching: list[str]) -> None:
    """Blocks of BLOOM and MPT return their attention's weights, for whoever asks."""

    class Model(Slopes):
        def forward(self, x: Tensor) -> Tensor:
            alibi = torch.zeros(HEADS * len(x), 1, x.shape[1])
            x, _ = self.blocks[0](x, alibi)
            x, weights = self.blocks[1](x, alibi)
            return x + weights.mean() if is_read else x

    x = sample()
    profile = capture(Model(), (x, x), loss_fn=nn.functional.mse_loss)
    layers = layers_of(profile, "blocks.1")
    assert [name for name, layer in layers.items() if layer.reaches_output] == reaching


def test_a_layer_costs_what_arithmetic_says(profile: ModelProfile) -> None:
    gate = layers_of(profile, "blocks.1")["feed_forward.gate"]
    wide = 3 * WIDTH
    assert (gate.kind, gate.inputs, gate.outputs) == (LayerKind.LINEAR, WIDTH, wide)
    assert (gate.weight_bytes, gate.bias_bytes) == (F32 * WIDTH * wide, F32 * wide)
    assert gate.input_bytes.at(ROWS) == F32 * HIDDEN
    assert gate.output_bytes.at(ROWS) == F32 * 3 * HIDDEN
    assert gate.own.forward_flop.at(ROWS) == 2 * HIDDEN * wide
    assert gate.own.backward_flop.at(ROWS) == 4 * HIDDEN * wide
    # Its output, which SiLU keeps, and what SiLU makes of it, which the product with `up` keeps.
    assert gate.own.activation_bytes.at(ROWS) == 0
    after = [layers_of(profile, "blocks.1")[f"feed_forward.{n}"].after for n in ("gate", "up")]
    saved = [stretch.activation_bytes.at(ROWS) for stretch in after]
    assert saved == [2 * F32 * 3 * HIDDEN, 2 * F32 * 3 * HIDDEN]  # `up`'s output, and the product


def test_attention_lies_between_values_and_output(profile: ModelProfile) -> None:
    layers = layers_of(profile, "blocks.1")
    attention = layers["attention.v"].after
    # Two products of (tokens x head) by (head x tokens) for every head.
    assert attention.forward_flop.at(ROWS) == 2 * 2 * ROWS * TOKENS * TOKENS * WIDTH
    assert [layers[f"attention.{name}"].heads for name in "qkvo"] == [16, 8, 8, 1]
    # A norm of every head's features is used on heads that are split: weight and bias.
    assert attention.parameter_gradient_bytes == (F32 * HEAD, F32 * HEAD)
    # What is added to the residual and normed: its output is not kept, the sum, mean and
    # deviation are, and the norm's output.
    summed = layers["attention.o"].after
    assert summed.activation_bytes.at(ROWS) == F32 * (2 * HIDDEN + 2 * ROWS * TOKENS)


def test_a_tied_weight_is_counted_where_it_is_first(profile: ModelProfile) -> None:
    embed, head = layers_of(profile, "embed")[""], layers_of(profile, "head")[""]
    assert (embed.kind, embed.inputs, embed.outputs) == (LayerKind.EMBEDDING, VOCABULARY, WIDTH)
    assert embed.weight_bytes == F32 * VOCABULARY * WIDTH
    assert not embed.needs_input_gradient
    assert (head.weight_bytes, head.weight_gradient_bytes) == (0, 0)
    assert head.output_bytes.at(ROWS) == F32 * ROWS * TOKENS * VOCABULARY


@pytest.mark.parametrize("numerics", Numerics)
def test_parts_add_up_to_no_more_than_the_unit(profile: ModelProfile, numerics: Numerics) -> None:
    for unit in profile.units:
        cost = unit.cost(numerics)
        stretches = [s for layer in cost.layers for s in (layer.own, layer.after)]
        for name in ("forward_flop", "backward_flop", "forward_moved_bytes", "activation_bytes"):
            total = sum(getattr(stretch, name).at(ROWS) for stretch in stretches)
            assert total <= getattr(cost, name).at(ROWS) * (1 + 1e-9)
        assert sum(s.forward_flop.at(ROWS) for s in stretches) == cost.forward_flop.at(ROWS)


def test_weights_are_as_built_and_activations_as_computed(profile: ModelProfile) -> None:
    low = layers_of(profile, "blocks.1", Numerics.BF16)["attention.q"]
    assert low.weight_bytes == F32 * WIDTH * WIDTH
    assert (low.input_bytes.at(ROWS), low.output_bytes.at(ROWS)) == (BF16 * HIDDEN, BF16 * HIDDEN)
    # Under autocast each layer casts its input, and keeps the copy.
    cast = layers_of(profile, "blocks.1", Numerics.BF16_AUTOCAST)["attention.q"]
    assert cast.input_bytes.at(ROWS) == F32 * HIDDEN
    assert cast.own.activation_bytes.at(ROWS) == BF16 * HIDDEN


def test_a_layer_that_is_called_again_is_one_with_all_its_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.other = nn.ModuleList([nn.Sequential(nn.Linear(8, 8)) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            x = self.other[1](self.other[0](self.layer(x)))
            out: Tensor = self.layer(x)
            return out

    profile = capture(Twice(), torch.randn(4, 8))
    (layer,) = layers_of(profile, "layer").values()
    assert layer.calls == 2
    assert layer.own.forward_flop.at(4) == 2 * (2 * 4 * 8 * 8)


def test_profiles_of_earlier_releases_have_no_layers_and_are_read(profile: ModelProfile) -> None:
    data = json.loads(profile.to_json())
    for unit in data["units"]:
        for cost in unit["costs"].values():
            cost.pop("layers", None)
    read = ModelProfile.from_json(json.dumps(data))
    assert all(cost.layers == () for unit in read.units for cost in unit.costs.values())
    assert UnitCost().layers == ()
    assert ModelProfile.from_json(profile.to_json()) == profile


class FewKeys(nn.Module):
    """Queries of four heads and one key and value in one product, as Falcon's: heads are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.fused, self.out = nn.Linear(32, 6 * 8), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.fused(x).view(*x.shape[:2], 6, 8)
        q, k, v = heads[..., :-2, :], heads[..., [-2], :], heads[..., [-1], :]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        attended = nn.functional.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q))
        result: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return result


def test_heads_that_are_taken_out_of_a_fused_product_are_its_first_piece() -> None:
    profile = capture(nn.Sequential(FewKeys(), FewKeys()), torch.randn(2, 5, 32))
    layer = layers_of(profile, "0")["fused"]
    assert (layer.pieces, layer.heads) == ((4 * 8, 2 * 8), 4)
