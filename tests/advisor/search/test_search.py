"""Search: branch and bound against brute force over every plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from advisor.cost import CostModel
from advisor.decide.comparison import nearest_miss
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Objective, Policy
from advisor.search.cache import SearchCache
from advisor.search.columns import ROUNDING, unique
from advisor.search.legal import space_of, styles_of
from advisor.search.ranking import (
    FITS_HOST,
    Candidate,
    preferred,
    simplicity,
    simplicity_columns,
    weigh,
)
from advisor.search.search import Search
from advisor.search.stages import StageSearch
from engines.plan import Offload, OffloadTo, PartialPlan, Recompute, Schedule
from profiles.closed_forms.families import profile_from_config
from profiles.machine.cluster import SharedCores
from profiles.model.profile import ModelProfile, Numerics
from tests.factories import chain, cpus, exact, facts, gpus, transformer

MOST_ROWS = 60
MIDDLE = transformer(name="middle", layers=6, hidden=2048, ffn=5504, tokens=4096)


def searched(
    whole: Facts,
    policy: Policy,
    offload: Offload = Offload.NONE,
    to: OffloadTo = OffloadTo.HOST,
    **degrees: int | bool,
) -> Search:
    to_disk = {} if to is OffloadTo.HOST else {"offload_to": to}
    partial = PartialPlan.build({**to_disk, **degrees})
    styles = styles_of(whole, by_tokens=partial.sequence_parallel)
    space = space_of(whole, partial, styles=styles, offload=offload)
    cache = SearchCache(CostModel(whole))
    return Search(cache, policy, space, StageSearch(cache, PartialPlan(), policy))


def all_of(
    search: Search, whole: Facts, policy: Policy, rows: Sequence[int] | None = None
) -> list[Candidate]:
    costs = CostModel(whole)
    stages = StageSearch(SearchCache(costs), PartialPlan(), policy)
    rows = range(len(search.space)) if rows is None else rows
    return weigh([stages.plan(search.space, index) for index in rows], costs, policy)


def llama(layers: int, *, heads: int = 4, vocab: int = 1000) -> ModelProfile:
    """Small, with a flow: its stages and its split layers are in the space."""
    config = {
        "model_type": "llama",
        "hidden_size": 32 * heads,
        "intermediate_size": 96 * heads,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": vocab,
    }
    numerics = (Numerics.AS_BUILT, Numerics.BF16, Numerics.BF16_AUTOCAST)
    return profile_from_config(
        config, samples=1, sequence_length=128, name="llama", numerics=numerics
    )


LLAMAS = {(n, vocab): llama(n, vocab=vocab) for n in (1, 3) for vocab in (100, 20_000)}


@st.composite
def hybrids(draw: st.DrawFn) -> Facts:
    """Models whose stages and layers may be split, in memory that is often short."""
    model = LLAMAS[draw(st.sampled_from(sorted(LLAMAS)))]
    nodes, devices = draw(st.sampled_from(((1, 2), (1, 3), (2, 2), (1, 6))))
    local = draw(st.sampled_from((1, 2)))
    intra, inter = draw(st.sampled_from((1e9, 360e9))), draw(st.sampled_from((1e8, 400e9)))
    memory_gib = draw(st.floats(2.51, 2.75))
    cluster = gpus(
        nodes,
        devices,
        memory_gib=memory_gib / 0.95,
        intra_bytes_per_s=intra,
        inter_bytes_per_s=inter,
    )
    if draw(st.booleans()):
        alone, everywhere = draw(st.floats(1.2, 2.5)), draw(st.booleans())
        shared = SharedCores(alone=exact(alone), across_nodes=everywhere)
        cluster = cluster.model_copy(update={"shared_cores": shared})
    # Ranks on CPUs wait for what they receive.
    kind = draw(st.sampled_from(("cuda", "cpu")))
    device = cluster.device.model_copy(update={"kind": kind})
    cluster = cluster.model_copy(update={"device": device})
    return facts(model, cluster, batch=nodes * devices * local)


@st.composite
def situations(draw: st.DrawFn) -> Facts:
    nodes, devices = draw(st.integers(1, 2)), draw(st.sampled_from((1, 2, 3, 4, 8)))
    local = draw(st.integers(1, 12))
    if draw(st.integers(0, 5)) == 0:
        return facts(chain(units=5), cpus(devices), batch=devices * local, precision="fp32")
    memory_gib = draw(st.floats(14, 120))
    inter = draw(st.sampled_from((2e9, 25e9, 400e9)))
    cluster = gpus(nodes, devices, memory_gib=memory_gib, inter_bytes_per_s=inter)
    rates = cluster.device.flop_per_s
    device = cluster.device.model_copy(update={"flop_per_s": rates | {"float16": exact(3e14)}})
    cluster = cluster.model_copy(update={"device": device})
    precision = draw(st.sampled_from(("bf16", "fp16")))
    return facts(MIDDLE, cluster, batch=nodes * devices * local, precision=precision)


def assert_bounded(
    search: Search, whole: Facts, every: Sequence[Candidate], rows: Sequence[int] | None = None
) -> None:
    bounds, stages = (
        search.bounds,
        StageSearch(SearchCache(CostModel(whole)), PartialPlan(), Policy()),
    )
    rows = range(len(search.space)) if rows is None else rows
    for index, candidate in zip(rows, every, strict=True):
        cost = candidate.estimate
        high = cost.peak_high_bytes
        assert bounds.peak_high_bytes[index] <= high * (1 + ROUNDING), str(candidate.plan)
        with_borders = stages.least_peak_bytes(search.space, index)
        assert with_borders <= high * (1 + ROUNDING), str(candidate.plan)
        by_arithmetic = stages.several_peak_bytes(search.space, index)
        assert by_arithmetic <= high * (1 + ROUNDING), str(candidate.plan)
        rounding = ROUNDING * cost.step_s
        assert bounds.step_s[index] <= cost.step_s + rounding, str(candidate.plan)
        if candidate.fits:
            assert bounds.fitting_s[index] <= cost.step_s + rounding, str(candidate.plan)
        assert search.with_borders(index)[0] <= cost.step_s + rounding, str(candidate.plan)
        assert search.played_s(index) <= cost.step_s + rounding, str(candidate.plan)


MIXTURE = profile_from_config(
    {
        "model_type": "mixtral",
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 7,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "vocab_size": 1000,
    },
    samples=1,
    sequence_length=512,
    name="mixture",
    numerics=(Numerics.AS_BUILT, Numerics.BF16, Numerics.BF16_AUTOCAST),
)


@settings(max_examples=6, deadline=None)
# Launches of a backward that its forward hides are fewer in a stage than in the model.
@example(nodes=2, local=16, memory_gib=4.0, inter=1e8, ep=8, cp=1)
@given(
    nodes=st.sampled_from((1, 2, 4)),
    local=st.sampled_from((1, 3, 16)),
    memory_gib=st.floats(3, 12),
    inter=st.sampled_from((1e8, 25e9)),
    ep=st.sampled_from((2, 4, 8)),
    cp=st.sampled_from((1, 2, 4, 8)),
)
def test_no_estimate_with_expert_parallelism_is_below_its_bound(
    nodes: int, local: int, memory_gib: float, inter: float, ep: int, cp: int
) -> None:
    """Experts are sharded over ranks that hold the same ones (FSDP) or whole on each rank (HSDP);
    ranks of cp hold further copies."""
    cluster = gpus(nodes, 8, memory_gib=memory_gib, inter_bytes_per_s=inter)
    whole, policy = facts(MIXTURE, cluster, batch=nodes * 8 * local), Policy()
    search = searched(whole, policy, ep=ep, cp=cp)
    assert len(search.space) or nodes * 8 // cp % ep
    # Of spaces of up to 2,000 rows every few, so that situations are as many as with all of them.
    rows = range(local % 7, len(search.space), max(1, len(search.space) // MOST_ROWS))
    assert_bounded(search, whole, all_of(search, whole, policy, rows), rows)


@settings(max_examples=15, deadline=None)
@given(whole=hybrids(), offload=st.sampled_from(Offload))
def test_no_estimate_with_sequence_parallelism_is_below_its_bound(
    whole: Facts, offload: Offload
) -> None:
    policy = Policy()
    search = searched(whole, policy, offload, sequence_parallel=True)
    every = all_of(search, whole, policy)
    assert_bounded(search, whole, every)
    assert all(each.plan.sequence_parallel and each.plan.tp > 1 for each in every)
    assert every or whole.cluster.world_size % 2  # 128 tokens, 4 heads


IN_ROUNDS = (Schedule.GPIPE, Recompute.NONE)
"""Where each rank keeps all microbatches, which the bound of any borders counts too."""


def test_the_peak_of_stages_is_above_its_bound_and_close_to_it() -> None:
    """Activations are most of the memory here, under every schedule and recompute."""
    config = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 8}
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 4000}
    model = profile_from_config(
        {**config, **sizes, "num_hidden_layers": 8},
        samples=1,
        sequence_length=2048,
        name="llama",
        numerics=(Numerics.AS_BUILT, Numerics.BF16, Numerics.BF16_AUTOCAST),
    )
    whole, policy = facts(model, gpus(1, 4), batch=16), Policy()
    search = searched(whole, policy)
    search.refine(search.rows)
    stages = StageSearch(SearchCache(CostModel(whole)), PartialPlan(), policy)
    rows = np.flatnonzero(search.space.pp > 1)
    alike, group = unique(
        np.stack([getattr(search.space, name)[rows] for name in ("schedule", "recompute", "kind")])
    )
    for number in range(alike.shape[1]):
        of_kind = rows[group == number]
        for index in of_kind[:: max(1, len(of_kind) // 5)]:
            candidate = search.candidate(int(index))
            context = whole.cluster.device.context_bytes.high
            high = candidate.estimate.peak_high_bytes
            least = stages.least_peak_bytes(search.space, int(index))
            assert least <= high * (1 + ROUNDING), str(candidate.plan)
            assert least - context >= 0.7 * (high - context), str(candidate.plan)
            if (candidate.plan.schedule, candidate.plan.recompute) == IN_ROUNDS:
                of_any_borders = search.bounds.peak_high_bytes[index]
                assert of_any_borders - context >= 0.55 * (high - context), str(candidate.plan)


@settings(max_examples=12, deadline=None)
@given(
    whole=situations() | hybrids(),
    offload=st.sampled_from(Offload),
    to=st.sampled_from(OffloadTo),
    objective=st.sampled_from(Objective),
    margin=st.sampled_from((0.0, 0.05, 0.3)),
)
def test_no_estimate_is_below_its_bound_and_the_preferred_plan_equals_brute_force(
    whole: Facts, offload: Offload, to: OffloadTo, objective: Objective, margin: float
) -> None:
    """Every row is estimated once for both."""
    policy = Policy(objective=objective, simplicity_margin=margin)
    search = searched(whole, policy, offload, to)
    every = all_of(search, whole, policy)
    assert_bounded(search, whole, every)
    fitting = [candidate for candidate in every if candidate.fits]
    best = search.preferred(search.rows)
    if not fitting:
        assert best is None
        if every:  # this offload may be legal in no row
            assert search.nearest(search.rows) == nearest_miss(every)
        return
    assert best == preferred(fitting, policy)


def test_no_plan_is_estimated_whose_states_wait_in_main_memory_of_unknown_size() -> None:
    """The devices have room for each of them."""
    whole = facts(llama(3), gpus(1, 4, memory_gib=80.0), batch=8)
    unknown = whole.cluster.model_copy(update={"host_memory_bytes": None})
    whole = whole.model_copy(update={"cluster": unknown})
    search = searched(whole, Policy(), Offload.STATES)
    assert search.fastest(search.rows) is None
    assert not search.weighed
    every = all_of(search, whole, Policy())
    assert {candidate.finding and candidate.finding.rule for candidate in every} == {FITS_HOST}
    assert search.left_out == {FITS_HOST: len(every)}


def test_rows_are_as_simple_as_their_plans() -> None:
    whole = facts(MIDDLE, gpus(2, 4), batch=32)
    search = searched(whole, Policy())
    columns = np.stack(simplicity_columns(search.space))
    for index, candidate in enumerate(all_of(search, whole, Policy())):
        plan = simplicity(candidate.plan)
        assert simplicity(search.space.row(index)) == plan
        # Stages are counted there, and their borders here.
        staged = int(candidate.plan.pp > 0)
        assert (0, *columns[:4, index], columns[4, index] - staged, *columns[5:, index]) == plan
