"""The closed form of transformer shapes: published parameter counts, and FLOP by hand."""

from __future__ import annotations

import pytest

from profiles.closed_forms.transformer import TransformerShape, transformer_profile
from profiles.model.profile import Numerics

LLAMA = {"kind": "llama", "gated": True, "tied": False, "head_width": 128}
# Parameters as the models' authors count them in their checkpoints.
KNOWN = {
    "Llama-2-7B": (
        6_738_415_616,
        TransformerShape(
            layers=32, hidden=4096, heads=32, kv_heads=32, ffn=11008, vocab=32000, length=4096,
            **LLAMA,
        ),
    ),
    "Llama-3-8B": (
        8_030_261_248,
        TransformerShape(
            layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, length=8192,
            **LLAMA,
        ),
    ),
    "Mixtral-8x7B": (
        46_702_792_704,
        TransformerShape(
            kind="moe", layers=32, hidden=4096, heads=32, kv_heads=8, ffn=0, vocab=32000,
            length=4096, gated=True, tied=False, head_width=128, experts=8, topk=2,
            expert_ffn=14336,
        ),
    ),
    "GPT-2 XL": (
        1_557_611_200,
        TransformerShape(
            kind="dense_gpt", layers=48, hidden=1600, heads=25, kv_heads=25, ffn=6400,
            vocab=50257, length=1024, gated=False, tied=True, head_width=64,
        ),
    ),
}  # fmt: skip
GPT = TransformerShape(
    kind="dense_gpt", layers=4, hidden=512, heads=8, kv_heads=8, ffn=2048, vocab=51200,
    length=256, gated=False, tied=True, head_width=64,
)  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_parameters_equal_those_of_published_checkpoints(name: str) -> None:
    expected, shape = KNOWN[name]
    assert transformer_profile(shape, name=name).parameters == expected


def test_flop_equal_megatrons_formula() -> None:
    """72 b s l h^2 (1 + s / 6h + V / 12lh), arXiv 2104.04473, section 5.1, of a mask that hides
    nothing: the formula counts the whole square of scores, kernels skip half of it."""
    shape = GPT
    s, h, layers, vocab = shape.length, shape.hidden, shape.layers, shape.vocab
    model = transformer_profile(shape, name="gpt")
    # Backward of attention without scores is 2.5 times its forward (1 + 2.5 for 1 + 2), over half.
    attention = 4 * s * s * h * layers * 0.5 * 3.5
    linear = 72 * s * layers * h * h * (1 + vocab / (12 * layers * h))
    assert model.flop(1) == pytest.approx(linear + attention)


def test_costs_grow_with_samples_and_16_bits_halve_activations() -> None:
    model = transformer_profile(GPT, name="gpt")
    block = next(model.blocks())
    wide, half = block.cost(Numerics.AS_BUILT), block.cost(Numerics.BF16)
    # Sums of softmax stay in fp32 in both.
    sums = 4 * GPT.heads * GPT.length
    assert half.activation_bytes.at(3) - 3 * sums == (wide.activation_bytes.at(3) - 3 * sums) / 2
    assert wide.forward_flop == half.forward_flop


def test_stretches_of_layers_and_the_rest_make_up_a_unit() -> None:
    """The parts that tensor parallelism divides and leaves never exceed the whole."""
    for _, shape in KNOWN.values():
        for unit in transformer_profile(shape, name="x").units:
            cost = unit.cost(Numerics.BF16)
            inside = [part for layer in cost.layers for part in (layer.own, layer.after)]
            for name in ("forward_flop", "forward_moved_bytes", "activation_bytes"):
                parts = sum(getattr(part, name).at(1) for part in inside)
                assert parts <= getattr(cost, name).at(1) * (1 + 1e-12)


def test_grouped_products_count_the_tokens_that_experts_get() -> None:
    _, shape = KNOWN["Mixtral-8x7B"]
    block = next(transformer_profile(shape, name="x").blocks())
    products = [p for layer in block.cost(Numerics.BF16).layers for p in layer.after.products]
    # Up and gate, and down: topk tokens each, whatever experts they go to.
    by_hand = 2 * shape.length * shape.topk * 3 * shape.hidden * shape.expert_ffn
    assert sum(p.forward_flop(1) for p in products) == pytest.approx(by_hand)
    assert {p.count for p in products} == {8}


@pytest.mark.parametrize("kind", ["bert", "t5", "transformer_xl", "hybrid_mamba_moe"])
def test_every_kind_of_stack_has_blocks_a_head_and_a_loss(kind: str) -> None:
    hybrid = {"attention_layers": 2, "mamba_layers": 4, "mamba_width": 1024, "experts": 4,
              "topk": 2, "expert_ffn": 256} if kind == "hybrid_mamba_moe" else {}  # fmt: skip
    shape = TransformerShape(
        **{**GPT.model_dump(), "kind": kind, "layers": 8, "tied": False, **hybrid}
    )
    model = transformer_profile(shape, name=kind)
    assert len(list(model.blocks())) == shape.depth
    assert model.has_loss
    assert model.flow.calls[-1].unit == model.units[-1].name
