"""FLOP and bytes of calls by hand; the kept list against torch's own selective recompute."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from profiles.capture.capture import capture
from profiles.capture.operators.table import (
    flop_formulas,
    grouped_matmul,
    kept_operators,
    launches,
    moved_bytes,
    occupied_bytes,
)
from profiles.model.profile import Numerics
from tests.engines.cases import Block

aten = torch.ops.aten


class Blocks(nn.Module):
    """A stem and two blocks, recomputed selectively or not at all."""

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Block(32, 4) for _ in range(2))
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, list(kept_operators()))
        x = self.stem(x)
        for block in self.blocks:
            if self.recomputes:
                x = checkpoint(
                    block, x, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
                )
            else:
                x = block(x)
        return x


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # torch 2.11, of itself
def test_selective_recompute_saves_the_predicted_bytes() -> None:
    batch = torch.randn(3, 12, 32)
    model = Blocks(recomputes=True)
    model(batch).sum().backward()  # lazily made things are made
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        output = model(batch)
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    allocated = sum(event.nbytes() for event in events if event.name() == "[memory]")
    predicted = sum(
        unit.cost(Numerics.AS_BUILT).selective_activation_bytes.at(3)
        for unit in capture(Blocks(recomputes=False), batch).units
    )
    assert allocated == predicted + output.nbytes


def test_a_gather_reads_the_rows_asked_for_and_a_copy_does_not_read_its_target() -> None:
    table, ids = torch.zeros(1000, 8), torch.zeros(5, dtype=torch.long)
    rows = aten.embedding(table, ids)
    read_and_written = 2 * 5 * 8 * 4 + 5 * 8
    assert moved_bytes(aten.embedding.default, [table, ids], [rows]) == read_and_written
    assert moved_bytes(aten.copy_.default, [rows, rows.clone()], [rows]) == 2 * 5 * 8 * 4
    assert moved_bytes(aten.add.Tensor, [rows, rows], [rows]) == 3 * 5 * 8 * 4


def test_an_expanded_tensor_occupies_what_it_was_expanded_from() -> None:
    assert occupied_bytes(torch.zeros(1, 8).expand(100, 8)) == 8 * 4
    assert occupied_bytes(torch.zeros(100, 8)[:10]) == 10 * 8 * 4


def test_views_and_allocations_launch_nothing_and_writes_do() -> None:
    assert not launches(aten.view.default, makes_storage=False)
    assert not launches(aten.empty.memory_format, makes_storage=True)
    assert launches(aten.relu_.default, makes_storage=False)
    assert launches(aten.relu.default, makes_storage=True)


def test_grouped_matmuls_have_the_shape_and_gradients_of_the_real_one() -> None:
    groups, rows, inner, columns = 4, 16, 8, 12
    a = torch.randn(rows, inner, requires_grad=True)
    b = torch.randn(groups, inner, columns, requires_grad=True)
    ends = torch.tensor([3, 7, 9, 16], dtype=torch.int32)
    real = torch._grouped_mm(a, b, offs=ends)
    assert grouped_matmul(a, b, ends).shape == real.shape == (rows, columns)
    by_columns = torch._grouped_mm(a.detach().T.contiguous(), real.detach(), offs=ends)
    assert grouped_matmul(a.detach().T, real.detach(), ends).shape == by_columns.shape
    formula = flop_formulas()[aten._grouped_mm]
    # Every row meets one matrix; for the weights' gradient every row is summed into one group.
    assert formula(a, b, ends) == 2 * rows * inner * columns
    assert formula(a.T, real, ends) == 2 * rows * inner * columns
    assert formula(b, b.transpose(1, 2)) == 2 * groups * inner * columns * inner


def test_attention_on_the_cpu_counts_two_matmuls_forward_and_five_backward() -> None:
    batch, heads, queries, keys, size = 2, 4, 6, 10, 8
    q, k = torch.zeros(batch, heads, queries, size), torch.zeros(batch, heads, keys, size)
    product = 2 * batch * heads * queries * keys * size
    formulas = flop_formulas()
    forward = formulas[aten._scaled_dot_product_flash_attention_for_cpu]
    backward = formulas[aten._scaled_dot_product_flash_attention_for_cpu_backward]
    assert forward(q, k, k) == 2 * product
    assert backward(q, q, k, k) == 5 * product


class Experts(nn.Module):
    """16 rows of a sample shared out to four experts."""

    def __init__(self, *, is_trained: bool) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.zeros(4, 8, 24), requires_grad=is_trained)

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.zeros(4, dtype=torch.int32, device=x.device)
        return torch._grouped_mm(self.before(x).reshape(-1, 8), self.weight, offs=ends)


@pytest.mark.parametrize("is_trained", [True, False])
def test_products_of_experts_are_noted_with_the_rows_of_each(is_trained: bool) -> None:
    """Two samples; frozen weights take one product back, and all FLOP are of these products."""
    profile = capture(Experts(is_trained=is_trained), torch.zeros(2, 16, 8))
    (cost,) = (unit.cost(Numerics.AS_BUILT) for unit in profile.units if unit.name == "(glue)")
    (product,) = cost.products
    assert (product.m.at(1), product.k, product.n, product.count) == (4, 8, 24, 4)
    assert product.needs_input_gradient == is_trained
    assert cost.forward_flop.at(1) == product.forward_flop(1)
    assert cost.backward_flop.at(1) == (1 + is_trained) * product.forward_flop(1)


@pytest.mark.parametrize(
    ("layer", "rows", "n", "k"),
    [
        (weight_norm(nn.Conv1d(8, 12, 3)), 14, 12, 8 * 3),
        (nn.ConvTranspose1d(8, 12, 4, 2, 1), 16, 12 * 4, 8),
    ],
)
def test_a_convolution_that_is_no_layer_s_own_is_a_product_of_its_positions(
    layer: nn.Module, rows: int, n: int, k: int
) -> None:
    """A parametrised weight is none of the module's parameters; a transposed one multiplies the
    positions of its input."""
    model = nn.Sequential(nn.Conv1d(8, 8, 1), layer)
    profile = capture(model, torch.zeros(2, 8, 16), on_processor=False)
    cost = profile.units[1].cost(Numerics.AS_BUILT)
    (product,) = cost.products
    assert (product.m.per_sample, product.n, product.k) == (rows, n, k)
    assert product.forward_flop(1) == cost.forward_flop.at(1)
    maps = 4 * (8 * 16 + 12 * (14 if rows == 14 else 32))
    assert product.forward_bytes is not None
    assert product.forward_bytes.per_sample == pytest.approx(maps)
