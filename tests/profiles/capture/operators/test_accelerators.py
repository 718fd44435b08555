"""Operators that accelerators run otherwise: attention with dropout, and autocast's in fp32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from profiles.capture.capture import capture
from profiles.capture.operators.accelerators import AcceleratorOperators, _written_out
from profiles.model import attention_kernels
from profiles.model.profile import ModelProfile, Numerics, UnitCost
from profiles.model.work import AttentionCall, Product, ProductKind
from tests.profiles.capture.equal_profiles import without_cycles

HEADS, TOKENS, WIDTH = 2, 64, 16


class Attention(nn.Module):
    """Self-attention on (B, T, C); `bias` is added to the scores."""

    def __init__(self, dropout: float, *, bias: bool = False, by_name: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout, self.by_name = dropout, by_name
        self.bias = nn.Parameter(torch.zeros(1, HEADS, TOKENS, TOKENS)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.by_name:
            y = F.scaled_dot_product_attention(
                query=q, key=k, value=v, attn_mask=self.bias, dropout_p=self.dropout
            )
        else:
            y = F.scaled_dot_product_attention(q, k, v, self.bias, self.dropout)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


def profile(model: nn.Module, *, on_processor: bool) -> ModelProfile:
    return capture(model.train(), torch.ones(2, TOKENS, WIDTH), on_processor=on_processor)


def activation_bytes(profile: ModelProfile) -> float:
    """Of one sample more."""
    costs = [cost for unit in profile.units for cost in unit.costs.values()]
    return sum(cost.activation_bytes.per_sample for cost in costs)


@pytest.mark.parametrize("by_name", [False, True])
def test_on_accelerators_dropout_keeps_no_scores(by_name: bool) -> None:
    """A model keeps what one without dropout does."""
    dropped = profile(Attention(0.1, by_name=by_name), on_processor=False)
    plain = profile(Attention(0.0, by_name=by_name), on_processor=True)
    assert activation_bytes(dropped) == activation_bytes(plain)
    assert not dropped.on_processor


def test_on_a_processor_the_scores_and_their_mask_are_kept() -> None:
    scores = HEADS * TOKENS * TOKENS
    written_out = profile(Attention(0.1), on_processor=True)
    fused = profile(Attention(0.1), on_processor=False)
    more = activation_bytes(written_out) - activation_bytes(fused)
    assert more >= scores * (4 + 1)  # probabilities in fp32, and a mask of bytes


class Permuted(Attention):
    """A bias whose heads come last in memory, as T5's."""

    def __init__(self) -> None:
        super().__init__(0.1, bias=True)
        self.table = nn.Parameter(torch.zeros(TOKENS, TOKENS, HEADS))
        del self.bias

    @property
    def bias(self) -> Tensor:
        return self.table.permute(2, 0, 1)[None]


def test_with_a_permuted_bias_that_is_trained_scores_are_kept_on_both() -> None:
    """Their mask is of numbers on a processor, of bytes on accelerators."""
    here, there = (profile(Permuted(), on_processor=o) for o in (True, False))
    assert activation_bytes(here) - activation_bytes(there) == 3 * HEADS * TOKENS * TOKENS


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_with_a_dense_one_accelerators_keep_no_scores_and_give_it_a_gradient(
    dropout: float,
) -> None:
    here, there = (profile(Attention(dropout, bias=True), on_processor=o) for o in (True, False))
    plain = profile(Attention(0.0), on_processor=True)
    assert there.unused == here.unused == ()
    assert activation_bytes(there) == activation_bytes(plain)
    sums = 4 * HEADS * TOKENS  # one for each query
    assert activation_bytes(here) - activation_bytes(there) >= sums * TOKENS - sums


class Latent(nn.Module):
    """Attention whose queries and keys are half as wide again as its values, as DeepSeek's."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.wide, self.values = 3 * WIDTH // 2, WIDTH
        self.qkv = nn.Linear(WIDTH, 2 * self.wide + self.values)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in self.qkv(x).split([self.wide, self.wide, self.values], dim=-1)
        )
        out = F.scaled_dot_product_attention(q, k, v, None, self.dropout, is_causal=True)
        return out.transpose(1, 2).flatten(2)


def test_so_does_one_without_a_dimension_of_rows() -> None:
    """A bias (heads, T, T): a processor's kernel takes two dimensions or four, CUDA's three too."""
    model = Attention(0.0, bias=True)
    expected = activation_bytes(profile(model, on_processor=False))
    model.bias = nn.Parameter(torch.zeros(HEADS, TOKENS, TOKENS))
    assert activation_bytes(profile(model, on_processor=False)) == expected
    assert activation_bytes(profile(model, on_processor=True)) > 1.5 * expected


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_values_narrower_than_queries_keep_no_scores_on_accelerators(dropout: float) -> None:
    """Kept are queries, keys, values, the output and a sum for each query."""
    there, here = (profile(Latent(dropout), on_processor=o) for o in (False, True))
    rows = [4 * TOKENS * width for width in (3 * WIDTH // 2, 3 * WIDTH // 2, WIDTH, WIDTH)]
    assert activation_bytes(there) == sum(rows) + 4 * HEADS * TOKENS
    assert activation_bytes(here) - activation_bytes(there) >= 3 * HEADS * TOKENS * TOKENS
    (call,) = attention_calls(there)
    assert (call.width, call.value_width) == (3 * WIDTH // 2 // HEADS, WIDTH // HEADS)
    assert call.dropout == bool(dropout)
    assert not attention_calls(here)


def test_values_narrower_than_queries_are_attended_to_in_a_run_too() -> None:
    """A look at code that acts on values is a run, on copies."""
    q, k, v = (torch.randn(1, HEADS, 4, width, requires_grad=True) for width in (6, 6, 4))
    with AcceleratorOperators():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, expected)


class Grouped(nn.Module):
    """Causal self-attention of twice as many queries as keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = (t.unflatten(-1, (HEADS // 2, -1)).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("takes_groups", [False, True])
def test_of_grouped_queries_in_fp32_accelerators_keep_scores_before_torch_2_14(
    takes_groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an H200 (torch 2.11) a mixture of experts in fp32 kept 6.2 GiB more than by a kernel."""
    monkeypatch.setattr(attention_kernels, "FP32_TAKES_GROUPS", takes_groups)
    with torch.device("meta"):
        model = Grouped()
    for numerics in Numerics:
        both = [
            capture(
                model, torch.ones(2, TOKENS, WIDTH), numerics=(numerics,), on_processor=on_processor
            )
            for on_processor in (True, False)
        ]
        here, there = map(activation_bytes, both)
        if numerics is Numerics.AS_BUILT and not takes_groups:
            # Keys and values for all heads, in place of the output and of sums by query.
            assert there - here > 0.9 * 4 * HEADS * TOKENS * TOKENS
        else:
            assert there == here


@pytest.mark.parametrize("mask", ["none", "causal", "booleans", "numbers"])
def test_written_out_attention_is_torch_s(mask: str) -> None:
    """Outputs, gradients, and bytes that are saved for the backward."""
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, heads, 8, 4, generator=draw) for heads in (4, 2, 2))
    masks = {"booleans": torch.rand(8, 8, generator=draw) > 0.3, "numbers": torch.randn(8, 8)}
    given = {"attn_mask": masks.get(mask), "is_causal": mask == "causal", "enable_gqa": True}

    def run(attend: Callable[..., Tensor]) -> tuple[list[Tensor], int]:
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = attend(*leaves, **given)
        nbytes = sum(saved.values())
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)], nbytes

    with sdpa_kernel(SDPBackend.MATH):
        expected, saved = run(F.scaled_dot_product_attention)
    got, ours = run(_written_out)
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    assert ours == saved


class OfModules(nn.Module):
    """nn.MultiheadAttention, as nn.TransformerEncoderLayer calls it unless weights are wanted."""

    def __init__(self, dropout: float, *, need_weights: bool = False) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(WIDTH, HEADS, dropout=dropout, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x, x, x, need_weights=self.need_weights)[0]
        return out


def test_modules_of_torch_attend_in_the_kernel_too() -> None:
    dropped = activation_bytes(profile(OfModules(0.1), on_processor=False))
    assert dropped == activation_bytes(profile(OfModules(0.0), on_processor=True))
    written_out = activation_bytes(profile(OfModules(0.1), on_processor=True))
    assert written_out - dropped >= 5 * HEADS * TOKENS * TOKENS - 4 * HEADS * TOKENS


def test_weights_that_are_asked_for_are_written_out_on_both() -> None:
    here, there = (
        activation_bytes(profile(OfModules(0.1, need_weights=True), on_processor=o))
        for o in (True, False)
    )
    assert here == there


class Function(nn.Module):
    """A linear layer (B, C), and a function of what it gives."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x**3,  # keeps what it is of
        lambda x: torch.pow(x, 3.0),
        lambda x: F.softmax(x, -1),  # keeps its result
        lambda x: x.softmax(-1),
        torch.exp,
    ],
)
def test_under_autocast_functions_of_cuda_s_list_keep_four_bytes_for_two(
    function: Callable[[Tensor], Tensor],
) -> None:
    there, here = (
        capture(
            Function(function),
            torch.ones(2, WIDTH),
            numerics=[Numerics.BF16_AUTOCAST],
            on_processor=on_processor,
        )
        for on_processor in (False, True)
    )
    assert activation_bytes(there) - activation_bytes(here) == 2 * WIDTH


def test_in_fp32_they_are_as_on_a_processor() -> None:
    there, here = (
        capture(Function(torch.exp), torch.ones(2, WIDTH), on_processor=on_processor)
        for on_processor in (False, True)
    )
    assert without_cycles(there).units == without_cycles(here).units


def test_a_root_mean_square_norm_is_one_kernel_that_saves_its_input_on_accelerators() -> None:
    """A traced step of a decoder on an H200 has `_fused_rms_norm` for each, and one backward; with
    a weight of another dtype torch takes it apart there too."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    kinds = (Numerics.AS_BUILT, Numerics.BF16, Numerics.BF16_AUTOCAST)

    def norm(on_processor: bool) -> list[UnitCost]:
        sample = torch.zeros(2, TOKENS, WIDTH)
        units = capture(model, sample, numerics=kinds, on_processor=on_processor).units
        return [next(unit for unit in units if unit.name == "1").cost(kind) for kind in kinds]

    for cost, nbytes in zip(norm(False)[:2], (4, 2), strict=True):
        assert (cost.forward_kernels, cost.backward_kernels) == (1, 1)
        rows = 2 * nbytes * TOKENS  # mean and deviation of each
        assert cost.activation_bytes.per_sample == nbytes * TOKENS * WIDTH + rows
    assert norm(False)[2].forward_kernels > 4
    assert norm(True)[0].forward_kernels > 4


@pytest.mark.parametrize(
    "function",
    [lambda x: F.dropout(x, 0.1), lambda x: F.dropout(input=x, p=0.1, training=True)],
)
def test_dropout_keeps_a_mask_of_bytes_in_place_of_numbers(
    function: Callable[[Tensor], Tensor],
) -> None:
    there, here = (
        capture(
            Function(function),
            torch.ones(2, WIDTH),
            on_processor=on_processor,
        )
        for on_processor in (False, True)
    )
    assert activation_bytes(here) - activation_bytes(there) == 3 * WIDTH


def attention_calls(profile: ModelProfile) -> list[AttentionCall]:
    return [call for unit in profile.units for cost in unit.costs.values() for call in cost.calls()]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_calls_of_attention_say_whether_scores_are_dropped(dropout: float) -> None:
    calls = attention_calls(profile(Attention(dropout), on_processor=False))
    assert calls
    assert all(call.dropout == bool(dropout) for call in calls)


def products(profile: ModelProfile, kind: ProductKind, numerics: Numerics) -> list[Product]:
    noted = []
    for unit in profile.units:
        cost = unit.cost(numerics)
        noted += [p for p in cost.products if p.kind is kind]
        noted += [p for layer in cost.layers for p in layer.after.products if p.kind is kind]
    return noted


def test_attention_written_out_multiplies_in_fp32_on_accelerators_only() -> None:
    """Scores and values of each head, by fp32 under autocast: a trained bias that is not dense."""

    class Permuted(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            assert self.bias is not None
            y = F.scaled_dot_product_attention(q, k, v, self.bias.transpose(-1, -2), self.dropout)
            out: Tensor = self.out(y.transpose(1, 2).flatten(2))
            return out

    def made(*, on_processor: bool) -> list[Product]:
        captured = capture(
            Permuted(0.1, bias=True).train(),
            torch.ones(2, TOKENS, WIDTH),
            numerics=(Numerics.BF16_AUTOCAST,),
            on_processor=on_processor,
        )
        return products(captured, ProductKind.SCORES, Numerics.BF16_AUTOCAST)

    written = made(on_processor=False)
    assert len(written) == 2
    for product in written:
        assert product.is_wide
        assert product.needs_input_gradient
        assert product.forward_flop(3) == 3 * 2 * HEADS * TOKENS**2 * WIDTH / HEADS
    assert not made(on_processor=True)


def test_a_depthwise_convolution_is_a_product_of_each_channel() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.Flatten(), nn.LazyLinear(1))
    model(torch.ones(1, 4, 8, 8))
    captured = capture(model, torch.ones(2, 4, 8, 8), on_processor=False)
    (product,) = products(captured, ProductKind.CONVOLUTION, Numerics.AS_BUILT)
    assert (product.count, product.n, product.k) == (4, 1, 9)
    assert product.m.at(3) == 3 * 8 * 8
    assert not product.needs_input_gradient
    assert product.forward_bytes is not None
    assert product.forward_bytes.at(1) == 4 * (2 * 4 * 8 * 8 + 4 * 9)


@pytest.mark.parametrize(
    ("kernel", "channels_last", "turned"), [(3, False, True), (1, False, False), (3, True, False)]
)
def test_maps_in_16_bits_are_turned_around_convolutions_on_accelerators(
    kernel: int, channels_last: bool, turned: bool
) -> None:
    """Input and output of 4 x 8 x 8, each read and written once more."""
    model = nn.Sequential(
        nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, kernel, padding=kernel // 2), nn.Conv2d(4, 1, 1)
    )
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images = torch.ones(2, 4, 8, 8).to(memory_format=layout)

    def moved(*, on_processor: bool) -> float:
        captured = capture(
            model, images, numerics=(Numerics.BF16_AUTOCAST,), on_processor=on_processor
        )
        costs = [unit.cost(Numerics.BF16_AUTOCAST) for unit in captured.units]
        return sum(cost.forward_moved_bytes.at(1) for cost in costs)

    added = moved(on_processor=False) - moved(on_processor=True)
    assert added == (2 * 2 * (4 + 4) * 8 * 8 if turned else 0)


def test_products_that_do_not_grow_with_the_batch_leave_other_kinds_noted() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1, groups=4)
            self.left, self.right = (nn.Parameter(torch.ones(1, 4, 4)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x).mean((2, 3)) @ torch.bmm(self.left, self.right)[0]

    captured = capture(Mixed(), torch.ones(2, 4, 8, 8), on_processor=False)
    assert products(captured, ProductKind.CONVOLUTION, Numerics.AS_BUILT)
    assert not products(captured, ProductKind.SCORES, Numerics.AS_BUILT)
