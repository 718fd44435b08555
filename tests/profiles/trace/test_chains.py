"""Savings of one kernel in place of a captured chain: by hand, and against the closed form."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from profiles.capture.capture import capture
from profiles.closed_forms.transformer import TransformerShape, transformer_profile
from profiles.model.layers import Stretch
from profiles.model.profile import LOSS, ModelProfile, Numerics, UnitCost
from profiles.model.work import Fusible, FusibleKind
from profiles.workload.stack import Stack, stack_named
from profiles.workload.under_stack import under_stack
from tests.profiles.capture.test_attention_calls import captured, gpt2, llama, vit

ROWS, WIDTH, F32, BF16 = 4, 64, 4, 2
NAMES = {"llama": llama, "gpt2": gpt2, "gpt2 with dropout": lambda: gpt2(0.1), "vit": vit}
COMPILED = stack_named("torch-compiled")
NUMERICS = (Numerics.AS_BUILT, Numerics.BF16)
MOVED = ("forward_moved_bytes", "backward_moved_bytes")


@functools.cache
def profile(name: str) -> ModelProfile:
    return captured(NAMES[name]())


class RMSNorm(nn.Module):
    """As models of transformers write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * scaled.to(x.dtype)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, WIDTH, False), nn.Linear(WIDTH, WIDTH, False)
        self.down = nn.Linear(WIDTH, WIDTH, False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    def __init__(self, part: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.before, self.part = nn.Linear(WIDTH, WIDTH, False), part()
        self.behind = nn.Linear(WIDTH, WIDTH, False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.behind(self.part(self.before(x)))
        return out


def chains_of(part: Callable[[], nn.Module], numerics: Numerics) -> list[Fusible]:
    blocks = nn.ModuleList([Block(part), Block(part)])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    profile = capture(Model(), torch.randn(ROWS, WIDTH), numerics=(numerics,), every_block=True)
    block = next(profile.blocks())
    cost = block.cost(numerics)
    return [fusible for layer in cost.layers for fusible in layer.after.fusible]


def test_a_norm_that_is_written_out_by_hand() -> None:
    """Elements of bf16 are cast to fp32 (2 + 4 bytes), squared (8), averaged (4), multiplied (8),
    cast (6) and scaled (4): 36 bytes for one read and one write of 2; six sums of a row apart."""
    (norm,) = chains_of(RMSNorm, Numerics.BF16)
    assert norm.kind is FusibleKind.NORM
    # Mean written; read and written by the sum with epsilon and the root; root read.
    rows = 6 * F32
    assert norm.forward_moved_bytes == (36 - 4) * WIDTH + rows
    assert norm.forward_kernels == 7
    # The fp32 copy and what was scaled go, with the root of each row; the input of bf16 is kept.
    assert norm.activation_bytes == (F32 + BF16 - BF16) * WIDTH + F32


def test_a_gate_around_another_layer_by_hand() -> None:
    """SiLU reads and writes, the product reads two and writes: 5 for 3; backward 9 for 5: arXiv
    2002.05202 has the formula, the counts are those of reads and writes."""
    actual = chains_of(Gated, Numerics.AS_BUILT)
    assert {fusible.kind for fusible in actual} == {FusibleKind.GATE}
    tensor = F32 * WIDTH
    assert sum(f.forward_moved_bytes for f in actual) == 2 * tensor
    assert sum(f.backward_moved_bytes for f in actual) == 4 * tensor
    assert sum(f.activation_bytes for f in actual) == tensor
    assert sum(f.forward_kernels for f in actual) == 1
    assert sum(f.backward_kernels for f in actual) == 2


def test_layers_and_their_own_norm_have_nothing_to_fuse() -> None:
    """torch's layer norm is one kernel already."""
    forward = [f.forward_moved_bytes for f in chains_of(lambda: nn.LayerNorm(WIDTH), NUMERICS[0])]
    assert sum(forward) == 0


def test_a_fused_loss_allocates_only_its_gradient() -> None:
    """Operation by operation an fp32 copy lies beside its log-softmax, and two fp32 gradients side
    by side in the backward; in place one fp32 copy, and a gradient in 16 bits."""
    logits = SHAPE.length * SHAPE.vocab
    loss = next(unit for unit in same_llama().units if unit.name == LOSS).cost(Numerics.BF16)
    assert loss.fusible[0].transient_bytes == pytest.approx(2 * F32 * logits, rel=0.02)
    for stack, there, back in (("megatron-core-0.12", F32, BF16), ("internevo", 0, 0)):
        changed = under_stack(same_llama(), stack_named(stack)).units[-1].cost(Numerics.BF16)
        assert changed.forward_transient_bytes.at(1) == pytest.approx(there * logits, rel=0.02)
        assert changed.backward_transient_bytes.at(1) == pytest.approx(back * logits, rel=0.02)


def parts(cost: UnitCost) -> list[Stretch]:
    return [part for layer in cost.layers for part in (layer.own, layer.after)]


@pytest.mark.parametrize("name", NAMES)
def test_fusion_saves_no_more_than_is_moved(name: str) -> None:
    for unit in profile(name).units:
        for cost in unit.costs.values():
            for part in parts(cost):
                for field in (*MOVED, "activation_bytes"):
                    saved = sum(getattr(fusible, field) for fusible in part.fusible)
                    assert saved <= getattr(part, field).per_sample * (1 + 1e-12), (
                        unit.name,
                        field,
                    )
            chains = [*cost.fusible, *(f for part in parts(cost) for f in part.fusible)]
            for field in (*MOVED, "activation_bytes"):
                saved = sum(getattr(fusible, field) for fusible in chains)
                assert saved <= getattr(cost, field).per_sample * (1 + 1e-12), (unit.name, field)
            assert sum(f.forward_kernels for f in chains) <= cost.forward_kernels
            assert sum(f.backward_kernels for f in chains) <= cost.backward_kernels


@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_model_is_compiled_once(name: str) -> None:
    once = under_stack(profile(name), COMPILED)
    assert under_stack(once, COMPILED) is once
    # Nor does it matter what the second stack is called: no chain is left.
    again = under_stack(once, Stack(name="compiled again", compiled=True))
    assert again.units == once.units


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("llama", {FusibleKind.NORM, FusibleKind.ROTARY, FusibleKind.GATE}),
        ("gpt2", {FusibleKind.GATE}),  # its activation is written out in Python
        ("gpt2 with dropout", {FusibleKind.GATE, FusibleKind.RESIDUAL}),
    ],
)
def test_blocks_have_the_kinds_of_chains_that_their_code_has(
    name: str, kinds: set[FusibleKind]
) -> None:
    for block in profile(name).blocks():
        cost = block.cost(Numerics.AS_BUILT)
        chains = [*cost.fusible, *(f for part in parts(cost) for f in part.fusible)]
        assert kinds <= {f.kind for f in chains if f.forward_moved_bytes}
    loss = next(unit for unit in profile(name).units if unit.name == LOSS)
    assert [f.kind for f in loss.cost(Numerics.AS_BUILT).fusible] == [FusibleKind.LOSS]


SHAPE = TransformerShape(
    kind="llama", layers=3, hidden=256, heads=8, kv_heads=4, ffn=704, vocab=1000, length=128,
    gated=True, tied=False, head_width=32,
)  # fmt: skip


@functools.cache
def same_llama() -> ModelProfile:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=SHAPE.vocab, hidden_size=SHAPE.hidden, intermediate_size=SHAPE.ffn,
        num_hidden_layers=SHAPE.layers, num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.kv_heads,
    )  # fmt: skip
    config.use_cache = False
    ids = torch.zeros(1, SHAPE.length, dtype=torch.long)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).train()
    return capture(model, {"input_ids": ids, "labels": ids}, numerics=(Numerics.BF16,))


def elementwise(model: ModelProfile, field: str, times: int) -> float:
    """Bytes that grow with the sample, beside those of linear products: operands and results."""
    block = list(under_stack(model, COMPILED).blocks())[1]
    cost = block.cost(Numerics.BF16)
    h, f = SHAPE.hidden, SHAPE.ffn
    queries, keys = SHAPE.heads * SHAPE.head_width, SHAPE.kv_heads * SHAPE.head_width
    products = [(h, queries), (h, keys), (h, keys), (queries, h), (h, f), (h, f), (f, h)]
    if model.units[0].name == "embedding" or len(cost.layers) == 4:  # one product for several
        products = [(h, queries + 2 * keys), (queries, h), (h, 2 * f), (f, h)]
    rows = BF16 * SHAPE.length * sum(n + k for n, k in products)
    per_sample: float = getattr(cost, field).per_sample
    return per_sample - times * rows


@pytest.mark.parametrize(
    ("field", "times"), [("forward_moved_bytes", 1), ("backward_moved_bytes", 2)]
)
def test_a_compiled_llama_moves_what_the_closed_form_says(field: str, times: int) -> None:
    expected = elementwise(transformer_profile(SHAPE, name="llama"), field, times)
    assert elementwise(same_llama(), field, times) == pytest.approx(expected, rel=0.2)


def test_a_compiled_llama_saves_what_the_closed_form_says() -> None:
    saved = [
        list(under_stack(model, COMPILED).blocks())[1].cost(Numerics.BF16).activation_bytes.at(1)
        for model in (same_llama(), transformer_profile(SHAPE, name="llama"))
    ]
    assert saved[0] == pytest.approx(saved[1], rel=0.2)
