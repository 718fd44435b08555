"""Stacks: presets of the catalogue, and what they change of a model's costs."""

from __future__ import annotations

from itertools import pairwise

import pytest

from profiles.closed_forms.convnets.profile import profile_of as convnet_profile
from profiles.closed_forms.convnets.registry import network_of
from profiles.closed_forms.families import profile_from_config
from profiles.closed_forms.transformer import TransformerShape, transformer_profile
from profiles.errors import UnknownNameError
from profiles.model.profile import LOSS, Numerics, UnitCost
from profiles.model.work import AttentionCall, AttentionKernel, FusibleKind, attention_cost
from profiles.workload.stack import TORCH, Loss, Stack, stack_named, stacks
from profiles.workload.under_stack import in_plain_fp32, on_device, under_stack

SHAPE = TransformerShape(
    kind="llama", layers=2, hidden=1024, heads=16, kv_heads=4, ffn=2816, vocab=32000, length=512,
    gated=True, tied=False, head_width=64,
)  # fmt: skip
MODEL = transformer_profile(SHAPE, name="llama")
TOKENS = SHAPE.length


def block(stack: Stack) -> UnitCost:
    return next(under_stack(MODEL, stack).blocks()).cost(Numerics.BF16)


def test_every_flag_of_a_preset_has_a_source() -> None:
    for name, stack in stacks().items():
        fields = {field for field, value in stack if value != getattr(TORCH, field)}
        said = {flag for flag, _ in stack.sources} | {"default"}
        missing = fields - said - {"name", "sources"}
        # `extends` brings the sources of the table before.
        assert not missing, f"{name}: {sorted(missing)}"


def test_an_unknown_stack_is_refused_with_the_near_miss() -> None:
    with pytest.raises(UnknownNameError, match="torchtitan"):
        stack_named("torchtitn")


def test_the_default_changes_nothing() -> None:
    assert under_stack(MODEL, TORCH) is MODEL


def test_a_stack_is_applied_once() -> None:
    once = under_stack(MODEL, stack_named("megatron-core-0.5"))
    assert under_stack(once, stack_named("megatron-core-0.5")) is once


def test_equal_blocks_go_on_sharing_their_costs() -> None:
    sizes = {"n_layer": 6, "n_embd": 64, "n_head": 4, "n_positions": 8, "vocab_size": 99}
    model = profile_from_config(
        {"model_type": "gpt2", **sizes},
        samples=1,
        sequence_length=8,
        name="gpt2",
        on_processor=False,
    )
    on_processor = on_device(model, is_processor=True)
    for changed in (on_processor, under_stack(model, stack_named("megatron-core-0.5"))):
        assert changed != model
        # Between the first block, which also takes the mask, and the last one.
        between = [unit.costs for unit in list(changed.blocks())[1:-1]]
        assert len(between) == 4
        assert all(costs is between[0] for costs in between)


def test_in_plain_fp32_maps_stay_as_they_lie() -> None:
    network, _ = network_of("resnet50-128px")
    model = convnet_profile(network, samples=1)
    assert in_plain_fp32(MODEL) is MODEL  # it has no maps
    plain = in_plain_fp32(model)
    for before, after in zip(model.units, plain.units, strict=True):
        fp32, after_it = before.costs[Numerics.AS_BUILT], after.costs[Numerics.AS_BUILT]
        turned = [f for f in fp32.fusible if f.kind is FusibleKind.LAYOUT]
        assert not [f for f in after_it.fusible if f.kind is FusibleKind.LAYOUT]
        spared = fp32.forward_moved_bytes.at(1) - after_it.forward_moved_bytes.at(1)
        assert spared == pytest.approx(sum(f.forward_moved_bytes for f in turned))
        for kind in set(before.costs) - {Numerics.AS_BUILT}:
            assert after.costs[kind] == before.costs[kind]
    assert in_plain_fp32(plain) is plain


@pytest.mark.parametrize("name", sorted(set(stacks()) - {"torch"}))
def test_fused_kernels_never_move_or_save_more(name: str) -> None:
    before, after = block(TORCH), block(stack_named(name))
    if stack_named(name).attention in (None, AttentionKernel.FLASH2, AttentionKernel.FLASH3):
        assert after.forward_moved_bytes.at(1) <= before.forward_moved_bytes.at(1)
        assert after.activation_bytes.at(1) <= before.activation_bytes.at(1)
        assert after.forward_kernels <= before.forward_kernels
    for layer in after.layers:
        for part in (layer.own, layer.after):
            assert part.forward_moved_bytes.at(1) >= 0
            assert part.activation_bytes.at(1) >= 0


def test_a_fused_block_moves_what_its_kernels_read_and_write() -> None:
    """By hand, of bf16: two norms (read, write), rotary (read, write of queries and keys), gate
    (read two, write one), two residuals (read two, write one), attention's operands, products."""
    h, f, e = SHAPE.hidden, SHAPE.ffn, 2
    queries, keys = SHAPE.heads * SHAPE.head_width, SHAPE.kv_heads * SHAPE.head_width
    elementwise = 2 * 2 * h + 2 * (queries + keys) + 3 * f + 2 * 3 * h
    attention = 2 * (queries + keys)
    products = [(h, queries + 2 * keys), (queries, h), (h, 2 * f), (f, h)]
    rows = sum(n + k for k, n in products)
    expected = e * TOKENS * (elementwise + attention + rows) + 4 * SHAPE.heads * TOKENS
    weights = e * sum(n * k for k, n in products)
    forward_moved_bytes = block(stack_named("torch-compiled")).forward_moved_bytes
    assert forward_moved_bytes.fixed == weights
    assert forward_moved_bytes.per_sample == pytest.approx(expected)


def test_kernels_that_save_scores_compute_the_full_square() -> None:
    call = AttentionCall(
        heads=16, kv_heads=16, queries=512, keys=512, width=64, value_width=64, is_causal=True,
        dropout=True,
    )  # fmt: skip
    flash = attention_cost(call, AttentionKernel.FLASH2)
    scores = attention_cost(call, AttentionKernel.FUSED_SOFTMAX)
    pairs = 16 * 512 * 512
    assert scores.forward_flop == 2 * flash.forward_flop == 4 * pairs * 64
    # Five products for two (arXiv 2205.14135), and four.
    assert flash.backward_flop == 2.5 * flash.forward_flop
    assert scores.backward_flop == 2 * scores.forward_flop
    # 5 a s^2 b of arXiv 2205.05198, equation 2.
    assert scores.core_bytes == 5 * pairs
    assert flash.core_bytes == 4 * 16 * 512
    kernels = AttentionKernel.SCORES, AttentionKernel.FUSED_SOFTMAX, AttentionKernel.FLASH2
    moved = [attention_cost(call, kernel).forward_moved_bytes for kernel in kernels]
    assert all(one > other for one, other in pairwise(moved))


def test_the_loss_keeps_fp32_logits_unless_it_is_fused() -> None:
    logits = TOKENS * SHAPE.vocab

    def saved_bytes(loss: Loss) -> float:
        stack = Stack(name=f"with {loss}", loss=loss, fused=(FusibleKind.NORM,))
        units = {unit.name: unit for unit in under_stack(MODEL, stack).units}
        head, end = units["head"].cost(Numerics.BF16), units[LOSS].cost(Numerics.BF16)
        norm = 2 * TOKENS * SHAPE.hidden
        return head.activation_bytes.at(1) + end.activation_bytes.at(1) - norm

    assert saved_bytes(Loss.MATERIALISED) == pytest.approx(logits * (2 + 4))
    assert saved_bytes(Loss.IN_PLACE) == pytest.approx(logits * 4)
    assert saved_bytes(Loss.FUSED) == pytest.approx(logits * 2)
