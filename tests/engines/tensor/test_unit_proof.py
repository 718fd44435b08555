"""Verdicts of the proof on blocks with one trap each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from engines.tensor.styles import Style
from engines.tensor.unit_copy import UnitCopy, copy_unit
from engines.tensor.unit_kinds import unit_kinds
from engines.tensor.unit_proof import prove_unit
from tests.engines.tensor import units

HEADS = {"q": "column", "k": "column", "v": "column", "o": "row"}


def specimen(unit: nn.Module) -> UnitCopy:
    batch = torch.randn(2, 8, units.WIDTH, generator=torch.Generator().manual_seed(3))
    model = units.Stack([unit])
    (kind,) = unit_kinds(model, batch, ["blocks.0"], has_target=False)
    return copy_unit(model, kind)


def verdict(unit: nn.Module, styles: dict[str, str], size: int = 2) -> tuple[str, set[str]]:
    named = {
        path: tuple(Style.parse(word) for word in text.split()) for path, text in styles.items()
    }
    actual = prove_unit(specimen(unit), named, size=size)
    return actual.why_not, set(actual.partial)


def test_a_column_row_pair_around_attention_is_proved() -> None:
    assert verdict(units.Attention(), HEADS) == ("", set())


def test_columns_without_a_row_are_refused() -> None:
    why_not, _ = verdict(units.Attention(), {"q": "column"})
    assert "does not run" in why_not


def test_a_row_without_columns_is_refused() -> None:
    why_not, _ = verdict(units.Attention(), {"o": "row"})
    assert "does not run" in why_not


def test_counted_heads_are_refused_unless_the_count_is_split_too() -> None:
    why_not, _ = verdict(units.CountedHeads(), HEADS)
    assert "do not add up" in why_not  # not one operation complained
    assert verdict(units.CountedHeads(), {**HEADS, "": "sizes(num_heads)"}) == ("", set())


def test_a_norm_over_heads_has_partial_gradients() -> None:
    assert verdict(units.NormedHeads(), HEADS) == ("", {"q_norm.weight", "q_norm.bias"})


@pytest.mark.parametrize("kind", ["boolean", "numbers"])
def test_a_mask_hides_no_parameter_from_the_trial(kind: str) -> None:
    assert of_block(units.WithMask(kind)) == ("", {"scale"})


TAKEN: list[Tensor] = []


class Taken(units.NormedHeads):
    """Its output is taken within its call, as where forwards collect hidden states."""

    def forward(self, x: Tensor) -> Tensor:
        TAKEN.append(super().forward(x))
        return TAKEN[-1]


class TakesWithin(units.Stack):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return TAKEN.pop()


def of_block(model: nn.Module) -> tuple[str, set[str]]:
    batch = torch.randn(2, 8, units.WIDTH, generator=torch.Generator().manual_seed(3))
    (each,) = unit_kinds(model, batch, ["blocks.0"], has_target=False)
    styles = {path: (Style.parse(word),) for path, word in HEADS.items()}
    actual = prove_unit(copy_unit(model, each), styles, size=2)
    return actual.why_not, set(actual.partial)


def test_what_a_model_takes_within_a_call_is_proved_too() -> None:
    assert of_block(TakesWithin([Taken()])) == ("", {"q_norm.weight", "q_norm.bias"})


def test_a_forward_that_is_bound_to_the_module_that_was_copied_is_not_proved() -> None:
    block = units.NormedHeads()
    own = block.forward
    block.forward = lambda x: own(x)  # type: ignore[method-assign]
    why_not, _ = of_block(units.Stack([block]))
    assert why_not == "a copy of it computes nothing with its own parameters"


class Unreached(nn.Module):
    """A pair that multiplies nothing but zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(units.WIDTH, 32), nn.Linear(32, units.WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(x).clamp(max=-1e9) * 0)
        return out


def test_a_layer_that_no_numbers_reach_is_not_proved() -> None:
    why_not, _ = verdict(Unreached(), {"up": "column", "down": "row"})
    assert "no numbers were found on which `" in why_not


@pytest.mark.parametrize("unit", [units.Alibi, units.RelativeBias])
def test_values_indexed_by_head_are_refused(unit: Callable[[], nn.Module]) -> None:
    why_not, _ = verdict(unit(), HEADS)
    assert "does not run" in why_not


def test_fewer_key_heads_than_ranks_are_refused() -> None:
    assert verdict(units.Attention(kv_heads=2), HEADS, size=2) == ("", set())
    why_not, _ = verdict(units.Attention(kv_heads=2), HEADS, size=4)
    assert why_not


def test_each_of_few_key_heads_may_be_computed_by_several_ranks() -> None:
    """A rank's gradients of them are parts of a sum: those of the queries that it has."""
    few = {**HEADS, "k": "heads/2", "v": "heads/2"}
    partial = {"k.weight", "k.bias", "v.weight", "v.bias"}
    assert verdict(units.Attention(kv_heads=2), few, size=4) == ("", partial)
    assert verdict(units.Attention(), few, size=4)[0]  # it has four
    assert (
        "3 heads of 16 features"
        in verdict(units.Attention(kv_heads=2), {**few, "k": "heads/3"}, size=4)[0]
    )


def test_a_fused_weight_is_split_pack_by_pack() -> None:
    why_not, _ = verdict(units.FusedHeads(), {"qkv": "column", "o": "row"})
    assert "do not add up" in why_not  # it runs, on a mixture of queries, keys and values
    assert verdict(units.FusedHeads(), {"qkv": "column/3", "o": "row"}) == ("", set())


def test_a_weight_used_outside_its_layer_is_refused() -> None:
    pair = {"up": "column", "down": "row"}
    assert verdict(units.Direct(), pair)[0]
    assert verdict(units.Direct(), {"up": "gather"})[0]
    assert verdict(units.Direct(), {"down": "gather"}) == ("", set())


def test_gathered_layers_are_proved_where_splits_are_refused() -> None:
    gathered = dict.fromkeys(HEADS, "gather")
    for unit in (units.Alibi(), units.CountedHeads(), units.Attention(kv_heads=1)):
        assert verdict(unit, gathered, size=4) == ("", set())


class Block(nn.Module):
    """A norm, two layers, and a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(units.WIDTH)
        self.up = nn.Linear(units.WIDTH, 64)
        self.down = nn.Linear(64, units.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return out


PAIR = {"up": "column", "down": "row"}


def test_parameters_of_sequence_parallel_layers_have_partial_gradients() -> None:
    styles = {"": "sequence entry exit", **PAIR, "up": "column joined"}
    assert verdict(Block(), styles) == ("", {"norm.weight", "norm.bias", "down.bias"})


def test_sequence_shards_that_are_not_gathered_are_refused() -> None:
    why_not, _ = verdict(Block(), {"": "sequence entry exit", **PAIR})
    assert why_not


class Router(nn.Linear):
    """As that of Llama 4."""

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(input)
        return logits.sigmoid(), logits


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.out = Router(units.WIDTH, 4), nn.Linear(4, units.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        scores, logits = self.router(x)
        out: Tensor = x + self.out(scores * logits)
        return out


@pytest.mark.parametrize("style", ["column", "gather"])
def test_a_linear_layer_that_returns_several_tensors_stays_whole(style: str) -> None:
    why_not, _ = verdict(Routed(), {"router": style})
    assert "does not run" in why_not
