"""Profiles against arithmetic by hand and against what real runs take."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from profiles.capture.capture import capture
from profiles.capture.subject import TracedModel
from profiles.capture.trace_step import trace_step
from profiles.model.profile import GLUE, LOSS, ModelProfile, Numerics, UnitCost
from profiles.trace.tally import affine
from tests.engines.cases import CASES, Block, TinyGPT, token_loss
from tests.engines.shared_parameters import OUTSIDE
from tests.profiles.capture.measured import measure, peak_of_a_run

AS_BUILT = Numerics.AS_BUILT
B, T = 3, 12  # samples and tokens
F32, BF16 = 4, 2  # bytes


class Dropped(Block):
    """The block with dropout on what each branch adds."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        parts = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(attended.transpose(1, 2).reshape(b, t, c)), 0.1)
        return x + F.dropout(self.mlp(self.norm2(x)), 0.1)


def only_unit(profile: ModelProfile) -> UnitCost:
    (unit,) = [unit for unit in profile.units if unit.name not in (GLUE, LOSS)]
    return unit.cost(AS_BUILT)


def total(profile: ModelProfile, quantity: str, samples: int, kind: Numerics = AS_BUILT) -> float:
    return sum(getattr(unit.cost(kind), quantity).at(samples) for unit in profile.units)


def test_a_linear_costs_what_arithmetic_says() -> None:
    m, n = 16, 24
    profile = capture(nn.Linear(m, n), torch.randn(B, m))
    unit, cost = profile.units[0], profile.units[0].cost(AS_BUILT)
    assert (unit.name, unit.kind, unit.parameters) == ("", "Linear", m * n + n)
    assert unit.parameter_bytes == unit.gradient_bytes == F32 * (m * n + n)
    assert cost.forward_flop.at(B) == 2 * B * m * n
    # The input needs no gradient: only the weight's product runs backward.
    assert cost.backward_flop.at(B) == 2 * B * m * n
    # addmm reads weight, bias and input, and writes the output: the weights are the fixed part.
    assert cost.forward_moved_bytes.fixed == F32 * (m * n + n)
    assert cost.forward_moved_bytes.per_sample == F32 * (m + n)
    assert cost.forward_kernels == 1
    # It saves its input, which is the batch, and its weight: nothing new.
    assert cost.activation_bytes.at(B) == 0
    assert cost.input_bytes.at(B) == F32 * B * m
    assert cost.output_bytes.at(B) == F32 * B * n
    assert cost.forward_transient_bytes.at(B) == F32 * B * n
    assert profile.batch_bytes.at(B) == F32 * B * m
    assert not profile.has_loss


def test_a_two_layer_mlp_costs_what_arithmetic_says() -> None:
    m, h, n = 16, 32, 8
    model = nn.Sequential(nn.Linear(m, h), nn.ReLU(), nn.Linear(h, n))
    profile = capture(model, (torch.randn(B, m), torch.randn(B, n)), loss_fn=F.mse_loss)
    first, relu, second, loss = profile.units
    assert [u.name for u in profile.units] == ["0", "1", "2", LOSS]
    assert profile.flop(B) == 2 * B * m * h * 2 + 2 * B * h * n * 3
    assert first.cost(AS_BUILT).activation_bytes.at(B) == 0
    # ReLU saves its output; the second layer saves the same tensor, once in memory.
    assert relu.cost(AS_BUILT).activation_bytes.at(B) == F32 * B * h
    assert second.cost(AS_BUILT).activation_bytes.at(B) == 0
    # MSE saves the prediction; the target is the batch's.
    assert loss.cost(AS_BUILT).activation_bytes.at(B) == F32 * B * n
    # Backward of the second layer makes the gradient of its input beside its own output's.
    assert second.cost(AS_BUILT).backward_transient_bytes.at(B) == F32 * B * h
    assert profile.has_loss


def test_a_gpt_block_saves_what_the_paper_counts() -> None:
    """arXiv 2205.05198, section 4.1, per token and width: 16 elements and two dropout masks.

    Norm inputs 2, qkv's input 1, q, k and v 3, projection's input 1, MLP's input 1, GELU's input 4
    and output 4: 32 bytes in 16 bit. Fused attention keeps a log-sum per head in place of the
    paper's 5 a s / h; each norm keeps a mean and a deviation.
    """
    width, heads = 32, 4
    profile = capture(Wrapped(Block(width, heads)), torch.randn(B, T, width))
    block = next(iter(profile.blocks())).cost(AS_BUILT)
    assert block.activation_bytes.at(B) == F32 * B * T * (16 * width + 2 * 2 + heads)
    # Matmuls: qkv 3, projection 1, MLP 8 widths squared; scores and their use, no causal discount.
    matmul, attention = 2 * B * T * 12 * width**2, 2 * 2 * B * T * T * width
    assert block.forward_flop.at(B) == matmul + attention
    assert block.backward_flop.at(B) == 2 * matmul + 2.5 * attention
    # Selective recompute keeps the input, and the outputs of the same matmuls and of attention.
    saved_units = 1 + 3 + 1 + 1 + 4 + 1
    assert block.selective_activation_bytes.at(B) == F32 * B * T * (saved_units * width + heads)
    assert block.input_bytes.at(B) == block.output_bytes.at(B) == F32 * B * T * width


def test_eager_dropout_adds_a_mask_as_large_as_what_it_drops() -> None:
    # The paper's masks are a byte per element; eager CPU code keeps them in the tensor's dtype.
    width, heads = 32, 4
    plain, dropped = (
        next(iter(capture(Wrapped(kind(width, heads)), torch.randn(B, T, width)).blocks()))
        for kind in (Block, Dropped)
    )
    added = dropped.cost(AS_BUILT).activation_bytes.at(B) - plain.cost(
        AS_BUILT
    ).activation_bytes.at(B)
    assert added == F32 * 2 * B * T * width


class Wrapped(nn.Module):
    """An input that needs gradients, then two blocks."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        width = block.out.in_features
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList([block, type(block)(width, block.heads)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("name", CASES)
def test_a_real_run_takes_exactly_what_was_predicted(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    # Parts of an LSTM's workspace are whole pages, so that it grows by steps: two sizes are seen.
    model, looked_at, run = case.build(), 4, 8 if name == "lstm" else 6
    profile = capture(model, case.batch(looked_at), loss_fn=case.loss_fn)
    measured = measure(model, case.batch(run), case.loss_fn)
    assert profile.flop(run) == measured.flop
    assert total(profile, "activation_bytes", run) == measured.saved_bytes


@pytest.mark.parametrize("name", ["gpt", "tied-frozen-unused", "loss-inside"])
def test_the_captured_peak_equals_the_allocators(name: str) -> None:
    # In these the loss is the fullest moment: no gradient of a parameter is there yet.
    case, samples = CASES[name], 16
    torch.manual_seed(0)
    model, batch = case.build(), case.batch(samples)
    seen = trace_step(TracedModel(model, batch, case.loss_fn), AS_BUILT)
    assert seen.peak_bytes == peak_of_a_run(model, batch, case.loss_fn)


@pytest.mark.parametrize("name", [name for name in CASES if name != "lstm"])
def test_the_peak_summed_over_units_is_the_allocators(name: str) -> None:
    case, samples = CASES[name], 16
    torch.manual_seed(0)
    model = case.build()
    profile = capture(model, case.batch(samples), loss_fn=case.loss_fn)
    measured = peak_of_a_run(model, case.batch(samples), case.loss_fn)
    # Above by no more than an input counted twice; below by the scratch memory of convolutions,
    # which no tensor shows (padded channels: 12 of 16 are used here).
    lowest = 0.9 if name.startswith("resnet") else 0.999
    assert lowest < peak_of(profile, samples) / measured < 1.04


def test_the_peak_in_the_middle_of_a_backward_is_found_too() -> None:
    # Few tokens, wide layers: gradients grow to more than activations.
    torch.manual_seed(0)
    model, case = TinyGPT(vocabulary=61, width=128, layers=4), CASES["gpt"]
    profile = capture(model, case.batch(2), loss_fn=token_loss)
    measured = peak_of_a_run(model, case.batch(2), token_loss)
    assert measured > 2 * total(profile, "activation_bytes", 2)
    # Above by part of one unit's gradients, which are taken to be there when its backward begins.
    assert 1 <= peak_of(profile, 2) / measured < 1.07


def peak_of(profile: ModelProfile, samples: int) -> float:
    """Forward: what earlier units keep, and the unit's own; backward: gradients as well."""
    activations = gradients = highest = 0.0
    for unit in profile.units:
        cost = unit.cost(AS_BUILT)
        work = cost.input_bytes.at(samples) + cost.forward_transient_bytes.at(samples)
        highest = max(highest, activations + work)
        activations += cost.activation_bytes.at(samples)
    for unit in reversed(profile.units):
        cost = unit.cost(AS_BUILT)
        gradients += unit.gradient_bytes
        work = cost.output_bytes.at(samples) + cost.backward_transient_bytes.at(samples)
        highest = max(highest, activations + gradients + work)
        activations -= cost.activation_bytes.at(samples)
    return highest


@pytest.mark.parametrize("name", CASES)
def test_a_model_on_the_meta_device_has_the_same_profile(name: str) -> None:
    case = CASES[name]
    with torch.device("meta"):
        abstract = case.build()
    batch = case.batch(2)
    real = capture(case.build(), batch, loss_fn=case.loss_fn)
    assert capture(abstract, batch, loss_fn=case.loss_fn) == real


def test_bf16_halves_the_saved_activations() -> None:
    case = CASES["gpt"]
    profile = capture(case.build(), case.batch(2), loss_fn=token_loss, numerics=tuple(Numerics))
    for unit in profile.blocks():
        whole = unit.cost(AS_BUILT).activation_bytes.at(2)
        # CPU attention keeps its log-sums in float32: one of 16 D + 4 + heads elements per head.
        log_sums = F32 * 2 * T * 4
        halved = unit.cost(Numerics.BF16).activation_bytes.at(2)
        assert halved == (whole - log_sums) / 2 + log_sums
    assert total(profile, "forward_flop", 2, Numerics.BF16) == total(profile, "forward_flop", 2)
    # The loss gets float32 logits in both cases.
    loss = profile.units[-1]
    assert loss.cost(Numerics.BF16).activation_bytes == loss.cost(AS_BUILT).activation_bytes


def test_autocast_saves_what_a_real_autocast_run_saves_besides_casts_of_parameters() -> None:
    width, rows = 64, 8
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    batch = (torch.randn(rows, width), torch.randn(rows, width))
    profile = capture(model, batch, loss_fn=F.mse_loss, numerics=(Numerics.BF16_AUTOCAST,))
    parts = {u.name: u.cost(Numerics.BF16_AUTOCAST).activation_bytes for u in profile.units}
    # The first layer keeps its input cast to bf16; its weight's cast is a parameter.
    assert parts["0"].fixed == 0
    assert parts["0"].at(rows) == BF16 * rows * width
    assert parts["1"].at(rows) == BF16 * rows * width


def test_a_frozen_layer_has_no_gradient_and_half_the_backward() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].requires_grad_(False)
    profile = capture(model, torch.randn(B, 8))
    _, frozen, trained = profile.units
    assert (frozen.trainable_parameters, frozen.gradient_bytes) == (0, 0)
    assert frozen.cost(AS_BUILT).backward_flop.at(B) == 2 * B * 8 * 8
    assert trained.cost(AS_BUILT).backward_flop.at(B) == 2 * 2 * B * 8 * 8
    assert frozen.cost(AS_BUILT).activation_bytes.at(B) == 0


def test_a_tied_weight_is_counted_once_and_both_holders_are_shared() -> None:
    case = CASES["tied-frozen-unused"]
    profile = capture(case.build(), case.batch(2), loss_fn=case.loss_fn)
    units = {unit.name: unit for unit in profile.units}
    assert profile.parameters == sum(p.numel() for p in case.build().parameters())
    assert profile.tied == (("embed.weight", "head.weight"),)
    assert {name for name, unit in units.items() if unit.is_shared} == {"embed", "head"}
    assert (units["embed"].parameters, units["head"].parameters) == (61 * 32, 0)
    assert profile.unused == ("never.weight", "never.bias")
    assert units["never"].cost(AS_BUILT) == UnitCost()
    assert units[GLUE].buffer_bytes == F32


def test_a_weight_used_by_code_outside_its_unit_makes_it_shared() -> None:
    class Functional(TinyGPT):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return self.norm(x) @ self.embed.weight.T

    case = CASES["gpt"]
    profile = capture(Functional(), case.batch(2), loss_fn=token_loss)
    assert [unit.name for unit in profile.units if unit.is_shared] == ["embed"]
    assert not any(u.is_shared for u in capture(TinyGPT(), case.batch(2), loss_fn=token_loss).units)


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        ("Latents", {"latents", "decoder"}),  # returned to other code; asked for before its call
        ("Borrowed", {"blocks.0", "blocks.1", "blocks.2"}),  # views, made by the caller
        ("OneNorm", {"blocks.0", "blocks.1", "blocks.2"}),  # one module in all of them
    ],
)
def test_a_unit_with_parameters_that_others_use_or_hand_to_it_is_shared(
    name: str, shared: set[str]
) -> None:
    case = OUTSIDE[name]
    units = capture(case.build(), case.batch(2), loss_fn=case.loss_fn).units
    assert {unit.name for unit in units if unit.is_shared} == shared


def test_facts_of_the_model_and_its_batch() -> None:
    ids = torch.zeros(2, 7, dtype=torch.long)
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))
    profile = capture(model, ids, name="given")
    assert (profile.name, profile.dtype, profile.samples) == ("given", "float32", 2)
    assert profile.tokens_per_sample == 7
    assert profile.sparse_gradients == ("0.weight",)
    resnet = CASES["resnet-batch-norm"]
    training, still = resnet.build(), resnet.build().eval()
    norms = capture(training, resnet.batch(2), loss_fn=F.cross_entropy).batch_norms
    assert norms[:2] == ("stem.1", "layers.0.norm1")
    assert capture(still, resnet.batch(2), loss_fn=F.cross_entropy).batch_norms == norms


def test_a_loss_inside_the_model_is_a_unit_of_its_own() -> None:
    inside, outside = CASES["loss-inside"], CASES["gpt"]
    within = capture(inside.build(), inside.batch(2)).units[-1]
    separate = capture(outside.build(), outside.batch(2), loss_fn=token_loss).units[-1]
    assert within.name == separate.name == LOSS
    assert within.cost(AS_BUILT).activation_bytes == separate.cost(AS_BUILT).activation_bytes


def test_a_model_that_takes_one_batch_size_only_is_taken_as_proportional() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.view(B, 4))

    profile = capture(Fixed(), torch.randn(B, 4))
    assert profile.is_proportional
    assert only_unit(profile).forward_flop.at(2 * B) == 2 * 2 * B * 4 * 4


@pytest.mark.parametrize(
    ("one", "two", "at"),
    [
        (30, 50, {2: 30, 4: 50, 6: 70}),  # 10 fixed, 10 per sample
        (16, 64, {2: 32, 4: 64}),  # grows as the square: never below what was seen
        (50, 30, {2: 50, 4: 50}),  # shrinks
        (30, None, {2: 30, 4: 60}),
    ],
)
def test_two_points_make_a_line_that_is_never_negative(
    one: int, two: int | None, at: dict[int, float]
) -> None:
    line = affine(one, two, samples=2)
    assert {samples: line.at(samples) for samples in at} == at
    assert line.at(1) >= 0


def test_a_profile_survives_its_json() -> None:
    case = CASES["gpt"]
    profile = capture(case.build(), case.batch(2), loss_fn=token_loss)
    assert ModelProfile.from_json(profile.to_json()) == profile


def test_an_empty_split_of_a_layers_output_is_no_part_of_it() -> None:
    class Rotated(nn.Module):
        """Features without positions and with them; there are none of the first, as in GLM."""

        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(8, 16)

        def forward(self, x: Tensor) -> Tensor:
            still, turned, gate = self.proj(x).split([0, 8, 8], dim=-1)
            return torch.cat([still, turned * gate], -1)

    profile = capture(nn.Sequential(Rotated(), Rotated()), torch.randn(B, T, 8))
    (layer,) = next(iter(profile.blocks())).cost(AS_BUILT).layers
    assert layer.pieces == (8, 8)


class Summed(nn.Module):
    """A mask of the batch, a gate before the second layer, a sum before the third."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        mask = x > 0
        first = self.first(x)
        second = self.second(torch.tanh(first))
        output: Tensor = self.third(first + second)
        return output.masked_fill(mask, 0.0)


def test_code_between_units_is_told_by_the_unit_that_comes_next() -> None:
    profile = capture(Summed(), (torch.randn(B, 8), torch.randn(B, 8)), loss_fn=F.mse_loss)
    glue, row = profile.glue[AS_BUILT], F32 * B * 8
    kernels = {unit: (c.forward_kernels, c.backward_kernels) for unit, c in glue.items()}
    # `x > 0`; tanh, and the sum of two gradients of what it takes; the sum; masked_fill.
    assert kernels[GLUE] == (1, 0)
    assert kernels["second"] == (1, 2)
    assert kernels["third"] == (1, 0)
    assert kernels[LOSS] == (1, 1)
    assert glue["second"].activation_bytes.at(B) == row  # tanh keeps its output
    assert glue["third"].activation_bytes.at(B) == 0
    assert glue[LOSS].activation_bytes.at(B) == B * 8  # the mask, in bytes
    (whole,) = (unit.cost(AS_BUILT) for unit in profile.units if unit.name == GLUE)
    for name in ("forward_kernels", "backward_kernels"):
        assert sum(getattr(cost, name) for cost in glue.values()) == getattr(whole, name)
    moved = sum(cost.forward_moved_bytes.at(B) for cost in glue.values())
    assert moved == whole.forward_moved_bytes.at(B)


@pytest.mark.parametrize("groups", [1, 4, 16])
def test_gradients_of_a_grouped_convolution_take_what_its_forward_takes_each(groups: int) -> None:
    layers = nn.Sequential(nn.Conv2d(4, 16, 1), nn.Conv2d(16, 16, 3, padding=1, groups=groups))
    profile = capture(layers, (torch.randn(B, 4, 8, 8), torch.randn(B, 16, 8, 8)),
                      loss_fn=F.mse_loss)  # fmt: skip
    cost = next(unit for unit in profile.units if unit.name == "1").cost(AS_BUILT)
    forward = 2 * B * 16 * 8 * 8 * (16 // groups) * 3 * 3
    assert cost.forward_flop.at(B) == forward
    assert cost.backward_flop.at(B) == 2 * forward


class OfTwoDtypes(nn.Module):
    """Small parameters in fp32 around a large one in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
        self.wide = nn.Linear(64, 64, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.wide((x * self.before[0]).bfloat16()).float() * self.after[0]
        return out


def test_the_dtype_of_a_model_is_that_of_most_elements() -> None:
    assert capture(OfTwoDtypes(), torch.ones(2, 64)).dtype == "bfloat16"
