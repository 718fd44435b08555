"""Bounds and rows of searches under stacks, those with model states of their own among them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.cost import CostModel
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Policy
from advisor.search.cache import SearchCache
from advisor.search.columns import ROUNDING
from advisor.search.legal import space_of, styles_of
from advisor.search.ranking import preferred, weigh
from advisor.search.search import Search
from advisor.search.stages import StageSearch
from engines.plan import Offload, PartialPlan, Schedule
from profiles.closed_forms.transformer import TransformerShape, transformer_profile
from profiles.workload.stack import Stack, States, stack_named
from tests.factories import facts, gpus

STACKS = (
    "torchtitan-compiled",
    "deepspeed",
    "megatron-2020",
    "megatron-2022",
    "megatron-core-0.12",
    "nemo",
)
ODD = Stack(
    name="odd",
    states=States(weight=2, gradient=4, master=0, moments=2),
    bucket_bytes=1e8,
    overlap_gradients=False,
)

SPACING = 8
"""One row in so many is estimated by itself too, since rows share most of their sums."""


@st.composite
def shapes(draw: st.DrawFn) -> TransformerShape:
    heads, width = draw(st.sampled_from((2, 4))), draw(st.sampled_from((16, 64)))
    is_llama = draw(st.booleans())
    return TransformerShape(
        kind="llama" if is_llama else "dense_gpt",
        layers=draw(st.integers(1, 4)),
        hidden=heads * width,
        heads=heads,
        kv_heads=draw(st.sampled_from((heads // 2, heads))) if is_llama else heads,
        ffn=4 * heads * width,
        vocab=draw(st.sampled_from((100, 20_000))),
        length=draw(st.sampled_from((128, 1024))),
        gated=is_llama,
        tied=draw(st.booleans()),
        head_width=width,
        dropout=draw(st.booleans()),
    )


@st.composite
def situations(draw: st.DrawFn) -> Facts:
    model = transformer_profile(draw(shapes()), name="small")
    nodes, devices = draw(st.sampled_from(((1, 1), (1, 2), (2, 2), (1, 4))))
    cluster = gpus(
        nodes,
        devices,
        memory_gib=draw(st.floats(2.51, 3.5)) / 0.95,
        intra_bytes_per_s=draw(st.sampled_from((1e9, 360e9))),
        inter_bytes_per_s=draw(st.sampled_from((1e8, 400e9))),
    )
    batch = nodes * devices * draw(st.sampled_from((1, 2, 4)))
    stack = draw(st.sampled_from((*map(stack_named, STACKS), ODD)))
    return facts(model, cluster, batch=batch, stack=stack)


def searched(whole: Facts, offload: Offload = Offload.NONE) -> Search:
    space = space_of(whole, PartialPlan(), styles=styles_of(whole), offload=offload)
    cache = SearchCache(CostModel(whole))
    return Search(cache, Policy(), space, StageSearch(cache, PartialPlan(), Policy()))


@settings(max_examples=10, deadline=None)
@given(whole=situations(), offload=st.sampled_from(Offload), first=st.integers(0, SPACING - 1))
def test_no_estimate_is_below_its_bound_and_the_preferred_plan_equals_brute_force(
    whole: Facts, offload: Offload, first: int
) -> None:
    """Every row is estimated once for both."""
    search, costs = searched(whole, offload), CostModel(whole)
    stages = StageSearch(SearchCache(costs), PartialPlan(), Policy())
    plans = [stages.plan(search.space, index) for index in range(len(search.space))]
    every = weigh(plans, costs, Policy())
    assert len(every) == len(plans)
    for index, candidate in enumerate(every):
        cost, plan = candidate.estimate, candidate.plan
        high, step_s = cost.peak_high_bytes * (1 + ROUNDING), cost.step_s * (1 + ROUNDING)
        assert search.bounds.peak_high_bytes[index] <= high, str(plan)
        assert stages.least_peak_bytes(search.space, index) <= high, str(plan)
        assert search.bounds.step_s[index] <= step_s, str(plan)
        assert search.bounds.fitting_s[index] <= step_s or not candidate.fits, str(plan)
        assert search.with_borders(index)[0] <= step_s, str(plan)
        assert search.played_s(index) <= step_s, str(plan)
    fitting = [candidate for candidate in every if candidate.fits]
    assert search.preferred(search.rows) == (preferred(fitting, Policy()) if fitting else None)
    for candidate in every[first::SPACING]:
        # By a fresh cost model: sums that rows share change no estimate.
        assert candidate.estimate == CostModel(whole).estimate(candidate.plan)


def test_a_schedule_without_output_buffers_is_not_charged_those_of_another() -> None:
    """DeepSpeed's engine holds inputs and outputs of stages in 1F1B only."""
    shape = TransformerShape(
        kind="dense_gpt", layers=2, hidden=32, heads=2, kv_heads=2, ffn=128, vocab=100,
        length=128, gated=False, tied=False, head_width=16,
    )  # fmt: skip
    whole = facts(
        transformer_profile(shape, name="small"),
        gpus(1, 2),
        batch=4,
        stack=stack_named("deepspeed"),
    )
    search, costs = searched(whole), CostModel(whole)
    rows = StageSearch(SearchCache(costs), PartialPlan(), Policy())
    staged = [rows.plan(search.space, n) for n in np.flatnonzero(search.space.pp > 1)[:12]]
    assert {plan.schedule for plan in staged} >= {Schedule.ONE_F_ONE_B, Schedule.GPIPE}
    alone = [CostModel(whole).estimate(plan) for plan in staged]
    assert [costs.estimate(plan) for plan in staged] == alone


@pytest.mark.parametrize("name", STACKS[1:])
def test_bounds_are_at_least_70_percent_of_the_peaks(name: str) -> None:
    """Activations are most of the memory here; a bound of states alone would be far below."""
    shape = TransformerShape(
        kind="llama", layers=8, hidden=512, heads=8, kv_heads=8, ffn=2048, vocab=4000,
        length=2048, gated=True, tied=False, head_width=64,
    )  # fmt: skip
    stack = stack_named(name).model_copy(update={"bucket_bytes": None})
    model = transformer_profile(shape, name="llama")
    whole = facts(model, gpus(1, 4), batch=16, stack=stack)
    search = searched(whole)
    context = whole.cluster.device.context_bytes.high
    space = search.space
    for index in np.linspace(0, len(space) - 1, 60).astype(int):
        high = search.candidate(int(index)).estimate.peak_high_bytes - context
        if space.pp[index] > 1:
            least = search.with_borders(int(index))[1] - context
        else:
            least = search.bounds.peak_high_bytes[index] - context
        assert least >= 0.7 * high, str(search.candidate(int(index)).plan)
