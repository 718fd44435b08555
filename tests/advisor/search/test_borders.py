"""Borders of stages: as good as the best of all splits, tried one by one."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.cost import CostModel
from advisor.decide.candidates import searched
from advisor.inputs.policy import Policy
from advisor.search.borders import Matrix, Places, cut, largest, refined, spans
from advisor.search.cache import SearchCache
from advisor.search.ranking import Candidate
from engines.plan import PartialPlan, Recompute, Schedule
from profiles.errors import PlanError
from profiles.model.flow import LOSS, Edge, Flow, UnitCall, Value
from profiles.model.profile import Affine, ModelProfile, Numerics
from tests.counting import count_calls
from tests.factories import chain, cpus, facts


def every_cut(pieces: int, stages: int) -> list[list[tuple[int, int]]]:
    """List all splits, as (first piece, piece after the last) of each stage."""
    return [
        list(zip([0, *places], [*places, pieces], strict=True))
        for places in combinations(range(1, pieces), stages - 1)
    ]


@given(data=st.data(), pieces=st.integers(1, 7))
def test_no_split_is_faster_within_memory_and_no_equally_fast_one_smaller(
    data: st.DataObject, pieces: int
) -> None:
    stages = data.draw(st.integers(1, pieces))
    numbers = st.lists(st.integers(0, 9), min_size=pieces, max_size=pieces)
    took, states, activations = data.draw(numbers), data.draw(numbers), data.draw(numbers)
    usable = data.draw(st.integers(0, 40))
    in_flight = range(stages, 0, -1)

    best = cut(
        spans(took), spans(states), largest(activations), in_flight=in_flight, usable_bytes=usable
    )

    tried = []
    for parts in every_cut(pieces, stages):
        slowest = max(sum(took[i:j]) for i, j in parts)
        fullest = max(
            sum(states[i:j]) + n * max(activations[i:j])
            for n, (i, j) in zip(in_flight, parts, strict=True)
        )
        tried.append((slowest, fullest))
    fitting = [one for one in tried if one[1] <= usable]
    expected = min(fitting) if fitting else min(tried, key=lambda one: one[1])
    assert best.nbytes == expected[1]
    if fitting:
        assert best.seconds == expected[0]
    assert len(best.starts) == stages - 1
    assert list(best.starts) == sorted(set(best.starts))


@given(data=st.data(), pieces=st.integers(1, 24))
def test_stages_slower_than_most_are_left_out_only_where_no_best_split_has_one(
    data: st.DataObject, pieces: int
) -> None:
    """The same split, with all its ties, as when stages of any length are looked at."""
    stages = data.draw(st.integers(1, pieces))
    numbers = st.lists(st.integers(0, 3), min_size=pieces, max_size=pieces)
    took, states, saved = (spans(data.draw(numbers)) for _ in range(3))
    alike = st.just([data.draw(st.integers(1, 3))] * stages)
    settings = {
        "in_flight": data.draw(alike | st.just(list(range(stages, 0, -1)))),
        "usable_bytes": float(data.draw(st.integers(0, 200))),
    }
    best = cut(took, states, saved, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("advisor.search.borders._NEAR", 1e9)
        assert cut(took, states, saved, **settings) == best


def test_a_head_as_slow_as_four_blocks_gets_a_stage_of_its_own() -> None:
    """Twelve blocks of 1 s and a head of 4 s on four stages: 4 s are the mean and possible."""
    took = [1.0] * 12 + [4.0]
    nothing = spans([0.0] * 13)
    best = cut(spans(took), nothing, nothing, in_flight=[1] * 4, usable_bytes=1.0)
    assert best.seconds == 4.0
    assert best.starts == (4, 8, 12)


def test_short_memory_moves_a_border() -> None:
    """Stage 0 holds two microbatches: two of four equal pieces do not fit there."""
    took, activations = [1.0] * 4, [1.0] * 4
    roomy = cut(
        spans(took), 0 * spans(activations), spans(activations), in_flight=[2, 1], usable_bytes=4.0
    )
    tight = cut(
        spans(took), 0 * spans(activations), spans(activations), in_flight=[2, 1], usable_bytes=3.0
    )
    assert (roomy.starts, roomy.seconds) == ((2,), 2.0)
    assert (tight.starts, tight.seconds, tight.nbytes) == ((1,), 3.0, 3.0)


def test_of_equally_fast_splits_the_smaller_and_then_the_earlier_is_taken() -> None:
    """0.1 s between two pieces of 0.3 s: either side of it takes 0.4 s, but for rounding."""
    took = spans([0.3, 0.1, 0.3])
    assert 0 < took[0, 2] - took[1, 3] < 1e-15

    def starts(states: list[float]) -> tuple[int, ...]:
        return cut(took, spans(states), 0 * took, in_flight=[1, 1], usable_bytes=9.0).starts

    assert starts([0.0, 1.0, 2.0]) == (2,)
    assert starts([2.0, 1.0, 0.0]) == (1,)
    assert starts([1.0, 0.0, 1.0]) == (1,)


def test_more_stages_than_pieces_are_refused_with_the_numbers() -> None:
    with pytest.raises(PlanError, match=r"3 stages need as many units .* there are 2"):
        cut(
            spans([1.0, 1.0]),
            spans([0.0, 0.0]),
            spans([0.0, 0.0]),
            in_flight=[1] * 3,
            usable_bytes=1.0,
        )


def test_a_hundred_and_twenty_six_blocks_on_sixteen_stages_take_few_passes() -> None:
    """A few passes over matrices for each stage: no loop over pieces."""
    took, activations = spans([0.1, *[1.0] * 126, 2.0]), spans([1.0] * 128)
    best, calls = count_calls(
        lambda: cut(
            took, 0 * activations, activations, in_flight=range(16, 0, -1), usable_bytes=np.inf
        )
    )
    assert calls < 16 * 20
    assert best.seconds == pytest.approx(8.1)


@pytest.mark.parametrize(("stages", "slowest"), [(4, 251), (16, 63), (150, 8)])
def test_many_segments_are_cut_in_passes_that_see_few_places(stages: int, slowest: float) -> None:
    """A thousand equal blocks and a head as slow as two: the slowest stage has its share of 1,002,
    rounded up; one block more on 150 stages (6.7)."""
    took = [1.0] * 1000 + [2.0]
    most = 0

    def entries(rows: Places, columns: Places) -> tuple[Matrix, Matrix, Matrix]:
        nonlocal most
        most = max(most, len(rows) * len(columns))
        seconds = spans(took, rows, columns)
        return seconds, 0 * seconds, 0 * seconds

    best = refined(len(took), entries, in_flight=[1] * stages, usable_bytes=1.0)
    assert best.seconds <= slowest
    assert len(best.starts) == stages - 1
    assert most < 300 * 300
    ends = [0, *best.starts, len(took)]
    assert max(sum(took[i:j]) for i, j in pairwise(ends)) == best.seconds


def wide_in_the_middle() -> ModelProfile:
    """Eight equal units, but for the output of the fourth, which is 16 times as large."""
    units, calls = [], []
    for number, unit in enumerate(chain(units=8).units):
        cost = unit.cost(Numerics.AS_BUILT)
        wide = Affine(per_sample=cost.output_bytes.per_sample * (16 if number == 3 else 1))
        costs = {Numerics.AS_BUILT: cost.model_copy(update={"output_bytes": wide})}
        units.append(unit.model_copy(update={"costs": costs}))
        value = Value(shape=(1, 512, 1000), dtype="float32", bytes=wide)
        calls.append(UnitCall(unit=unit.name, values=(value,)))
    edges = tuple(Edge(source=n, value=0, target=n + 1) for n in range(8))
    flow = Flow(calls=(*calls, UnitCall(unit=LOSS)), edges=edges)
    return chain().model_copy(update={"units": tuple(units), "flow": flow, "has_loss": True})


def test_a_border_goes_where_what_16_microbatches_sent_fits() -> None:
    """33 MB of each microbatch on either side: half a GiB in the middle, a sixteenth elsewhere."""

    def cut_in(memory_gib: float) -> Candidate:
        known = facts(
            wide_in_the_middle(), cpus(2, memory_gib=memory_gib), batch=16, precision="fp32"
        )
        partial = PartialPlan(
            pp=2,
            schedule=Schedule.GPIPE,
            microbatch_size=1,
            microbatches=16,
            recompute=Recompute.NONE,
        )
        search = searched(SearchCache(CostModel(known)), partial, Policy())
        (index,) = range(len(search.space))
        return search.candidate(index)

    assert cut_in(4.0).plan.stages == ("layers.4",)
    tight = cut_in(0.8)
    assert tight.plan.stages != ("layers.4",)
    assert tight.fits
