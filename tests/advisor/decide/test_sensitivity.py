"""Sensitivity: the smallest changes that change the decision, checked by deciding again."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from advisor.cost import CostModel
from advisor.decide.choose import choose
from advisor.decide.comparison import kind
from advisor.decide.decision import Decision
from advisor.decide.sensitivity import OCTAVES, RESOLUTION, Sensitivity, flip
from advisor.inputs.changed_facts import Lever, value, varied
from advisor.inputs.facts import Facts
from advisor.search.ranking import Candidate
from engines.plan import Plan
from profiles.machine.cluster import AxisFits, Collective, LinkFit
from profiles.units import GIB
from tests.factories import facts, gpus, small_llama, transformer

MIDDLE = transformer(name="middle", layers=8, hidden=2048, ffn=5504, tokens=4096)
SMALL = small_llama()
DDP = Plan.parse("dp_replicate=8 microbatch_size=1")
FSDP = Plan.parse("dp_shard=8 microbatch_size=1")


@pytest.fixture(scope="module")
def decision() -> Decision:
    return choose(facts(MIDDLE, gpus(1, 8), batch=64))


@pytest.fixture(scope="module")
def sensitivity(decision: Decision) -> Sensitivity:
    return decision.flip()


def test_every_lever_is_answered_and_the_smallest_change_comes_first(
    sensitivity: Sensitivity,
) -> None:
    assert {item.lever for item in (*sensitivity.turns, *sensitivity.steady)} == set(Lever)
    changes = [max(turn.factor, 1 / turn.factor) for turn in sensitivity.turns]
    assert changes == sorted(changes)
    assert sensitivity.smallest == sensitivity.turns[0]


def test_both_sides_of_a_change_equal_decisions_on_the_changed_facts(
    decision: Decision, sensitivity: Sensitivity
) -> None:
    here = kind(decision.plan)
    assert sensitivity.turns
    for turn in sensitivity.turns:
        sides = [varied(decision.facts, turn.lever, x) for x in (turn.stays, turn.turns)]
        near, far = (choose(side).plan for side in sides)
        assert kind(near) == here
        assert kind(far) != here
        assert far == turn.plan


def test_a_change_is_located_within_the_resolution(sensitivity: Sensitivity) -> None:
    for turn in sensitivity.turns:
        if turn.lever is Lever.BATCH:
            assert abs(turn.turns - turn.stays) == 8  # one more sample for each of eight
        else:
            assert abs(turn.turns / turn.stays - 1) <= RESOLUTION


@dataclass(frozen=True)
class Threshold:
    """A decision that changes from DDP to FSDP where the value of `lever` reaches `at`."""

    lever: Lever
    at: float

    def __call__(self, whole: Facts) -> Candidate:
        plan = DDP if value(whole, self.lever) < self.at else FSDP
        return Candidate(plan, ESTIMATE)


ESTIMATE = choose(facts(MIDDLE, gpus(1, 8), batch=64)).estimate


@pytest.mark.parametrize(
    ("lever", "at"),
    [
        (Lever.LINKS_IN_NODE, 1000e9),
        (Lever.LINKS_BETWEEN_NODES, 77e9),
        (Lever.MEMORY, 61 * GIB),
        (Lever.BATCH, 300),
        (Lever.SEQUENCE, 2000),
    ],
)
def test_a_known_threshold_is_found(lever: Lever, at: float) -> None:
    whole = facts(SMALL, gpus(2, 8), batch=128)
    sensitivity = flip(whole, Threshold(lever, at), levers=[lever])
    assert [turn.lever for turn in sensitivity.turns] == [lever]
    turn = sensitivity.turns[0]
    low, high = sorted((turn.stays, turn.turns))
    assert low < at <= high
    step = {Lever.BATCH: 16, Lever.SEQUENCE: 128}.get(lever)
    assert high - low == step if step else high / low <= 1 + RESOLUTION


def test_the_nearest_of_several_changes_is_found_first() -> None:
    """FSDP from 100 to 160 GB/s and below 20: seen from 50, 2 times up or 2.5 times down."""

    def island(whole: Facts) -> Candidate:
        rate = value(whole, Lever.LINKS_IN_NODE) / 1e9
        return Candidate(FSDP if 100 <= rate < 160 or rate < 20 else DDP, ESTIMATE)

    whole = facts(SMALL, gpus(1, 8, intra_bytes_per_s=50e9), batch=64)
    turn = flip(whole, island).turns[0]
    assert turn.factor == pytest.approx(2, rel=RESOLUTION)
    assert (turn.before, turn.after) == ("DDP", "FSDP")


def test_no_plan_that_fits_counts_as_another_answer() -> None:
    def needs_memory(whole: Facts) -> Candidate | None:
        enough = value(whole, Lever.MEMORY) >= 40 * GIB
        return Candidate(DDP, ESTIMATE) if enough else None

    turn = flip(facts(SMALL, gpus(1, 8), batch=64), needs_memory).turns[0]
    assert turn.plan is None
    assert turn.turns == pytest.approx(40 * GIB, rel=RESOLUTION)
    assert "the answer becomes that nothing fits" in str(turn)


def test_levers_that_change_nothing_report_the_scanned_bounds() -> None:
    sensitivity = flip(facts(SMALL, gpus(1, 8), batch=64), lambda whole: Candidate(DDP, ESTIMATE))
    assert not sensitivity.turns
    said = {item.lever: item.because for item in sensitivity.steady}
    widest = 2.0**OCTAVES
    assert said[Lever.MEMORY] == (
        f"the answer stays from {79.6 / widest:.2f} GiB to {79.6 * widest:.1f} GiB"
    )
    assert said[Lever.LINKS_BETWEEN_NODES] == "cannot be varied: there is one node"
    assert "4096 tokens; 5760 tokens is not possible" in said[Lever.SEQUENCE]


def test_the_scan_ends_at_the_smallest_change() -> None:
    """Memory changes the answer 1.1 times away, links 2 times: the scan ends after memory."""

    def both(whole: Facts) -> Candidate:
        enough = value(whole, Lever.MEMORY) >= 72 * GIB
        slow = value(whole, Lever.LINKS_IN_NODE) < 720e9
        return Candidate(DDP if enough and slow else FSDP, ESTIMATE)

    sensitivity = flip(facts(SMALL, gpus(1, 8), batch=64), both)
    assert [turn.lever for turn in sensitivity.turns] == [Lever.MEMORY]
    links = next(item for item in sensitivity.steady if item.lever is Lever.LINKS_IN_NODE)
    assert links.because == "the answer stays from 255 GB/s to 509 GB/s; not scanned farther"


def test_a_single_lever_is_followed_to_its_change(decision: Decision) -> None:
    (memory,) = decision.flip(Lever.MEMORY).turns
    near, far = (
        choose(varied(decision.facts, Lever.MEMORY, amount)).plan
        for amount in (memory.stays, memory.turns)
    )
    assert kind(near) == kind(decision.plan) != kind(far)


def test_a_profile_of_a_module_says_that_its_sequences_cannot_be_varied(
    sensitivity: Sensitivity,
) -> None:
    said = next(item for item in sensitivity.steady if item.lever is Lever.SEQUENCE)
    assert str(said) == (
        "sequence length: cannot be varied: the profile of middle was taken of a module at 4096"
        " tokens, and is not known at other lengths"
    )


def test_measured_rates_vary_with_their_link() -> None:
    fit = {Collective.ALL_REDUCE: LinkFit(latency_s=1e-5, busbw_bytes_per_s=10e9)}
    axes = (
        AxisFits(group_size=8, stride=1, fits=fit),
        AxisFits(group_size=2, stride=8, fits=fit),
    )
    cluster = gpus(2, 8).model_copy(update={"axes": axes})
    changed = varied(facts(MIDDLE, cluster), Lever.LINKS_BETWEEN_NODES, 800e9).cluster
    assert [axis.fits[Collective.ALL_REDUCE].busbw_bytes_per_s for axis in changed.axes] == [
        10e9,
        20e9,
    ]
    assert changed.intra == cluster.intra


def test_sensitivity_is_saved_in_the_file_only_on_request(
    decision: Decision, sensitivity: Sensitivity
) -> None:
    assert decision.flipped is None
    saved = decision.with_flip()
    assert Decision.from_json(saved.to_json()).flip() == sensitivity
    assert saved.model_copy(update={"flipped": None}) == decision


@pytest.mark.parametrize("lever", Lever)
def test_shared_costs_equal_fresh_costs_of_the_changed_facts(lever: Lever) -> None:
    whole = facts(SMALL, gpus(2, 4), batch=16)
    amount = {Lever.BATCH: 32.0, Lever.SEQUENCE: 2048.0}.get(lever, 0.4 * value(whole, lever))
    changed = varied(whole, lever, amount)
    plan = Plan.parse("dp_shard=8 microbatch_size=2 precision=bf16")
    costs = CostModel(whole)
    before = costs.estimate(plan)
    assert costs.for_facts(changed).estimate(plan) == CostModel(changed).estimate(plan)
    assert costs.estimate(plan) == before
