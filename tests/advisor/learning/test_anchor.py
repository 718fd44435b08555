"""Anchors: a simulated machine whose terms are known multiples of the estimate is predicted exactly
after one measured step of one plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from advisor.cost import CostModel, Estimate, estimate
from advisor.decide.candidates import searched
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Objective, Policy
from advisor.learning.anchor import Anchor, Links, Term, anchored, fits
from advisor.learning.residuals import StepMeasurement, anchor_of, busy_s, products_s
from advisor.learning.run_log import anchor_here, keep_anchor
from advisor.search.cache import SearchCache
from engines.plan import PartialPlan, Plan
from profiles.errors import InputError
from profiles.machine.cluster import AxisFits, ClusterProfile, Collective, LinkFit
from profiles.model.profile import Affine, ModelProfile, Numerics
from profiles.model.work import AttentionCall, attention_cost
from profiles.provenance import Timing
from profiles.timing.runs import Machine, machine_of
from profiles.workload.optimizers import OPTIMIZERS
from profiles.workload.stack import Stack
from tests.factories import chain, cpus, exact, facts, gpus, link, transformer

HERE = Machine(
    device="cpu", processor="one of ours", threads=1, ranks_per_node=2, torch="2.13", ours="1"
)
COMPUTING, UPDATE, SENDING, ACTIVATIONS = 1.7, 2.0, 3.0, 1.5
CONTEXT_BYTES = 100e6
MEASURED = "dp_replicate=2 microbatch_size=4"
OTHERS = (
    "dp_shard=2 microbatch_size=4",
    "dp_replicate=2 zero=1 microbatch_size=2 accumulation=2",
    "dp_replicate=2 recompute=full microbatch_size=4",
    "pp=2 schedule=1f1b microbatch_size=2 microbatches=4 stages=layers.2",
)


def took(seconds: float, *, spread: float = 0.0) -> Timing:
    low, high = seconds * (1 - spread), seconds * (1 + spread)
    return Timing(median_s=seconds, low_s=low, high_s=high, repeats=10)


def predicted(*, tokens: int = 32, units: int = 4) -> Facts:
    return facts(
        chain(parameters=20_000_000, tokens=tokens, width=100_000, units=units),
        cpus(2),
        batch=8,
        precision="fp32",
    )


def real(known: Facts) -> Facts:
    """The same work on a machine where every term takes its own multiple of the prediction."""
    device = cpus(2).device.model_copy(
        update={
            "matmul_fraction": exact(0.8 / COMPUTING),
            "memory_bandwidth_bytes_per_s": exact(10e9 / COMPUTING),
            "launch_s": exact(5e-6 * COMPUTING),
            "context_bytes": exact(cpus(2).device.context_bytes.value + CONTEXT_BYTES),
        }
    )
    intra = link("loopback", 1e9 / SENDING, 50e-6 * SENDING, error=0.1)
    adamw = OPTIMIZERS["adamw"]
    slower = {"moved_bytes_per_element": adamw.moved_bytes_per_element * UPDATE}
    optimizer = adamw.model_copy(update=slower)
    return Facts(
        model=_with_larger_activations(known.model),
        cluster=known.cluster.model_copy(update={"device": device, "intra": intra}),
        workload=known.workload.model_copy(update={"optimizer": optimizer}),
    )


def _with_larger_activations(model: ModelProfile) -> ModelProfile:
    def larger(amount: Affine) -> Affine:
        return Affine(per_sample=amount.per_sample * ACTIVATIONS)

    units = []
    for unit in model.units:
        cost = unit.cost(Numerics.AS_BUILT)
        names = (
            "activation_bytes",
            "selective_activation_bytes",
            "forward_transient_bytes",
            "backward_transient_bytes",
        )
        grown = cost.model_copy(update={name: larger(getattr(cost, name)) for name in names})
        units.append(unit.model_copy(update={"costs": {Numerics.AS_BUILT: grown}}))
    return model.model_copy(update={"units": tuple(units)})


def measured(known: Facts, text: str = MEASURED, *, spread: float = 0.0) -> StepMeasurement:
    """Return the measurement of a step of the plan on the real machine."""
    plan = Plan.parse(text)
    truth = estimate(plan, real(known))
    less = estimate(plan.model_copy(update={"microbatch_size": 2}), real(known))
    alone_s = truth.time.compute_s + truth.time.recompute_s + truth.time.launch_s
    return StepMeasurement(
        step=took(truth.step_s, spread=spread),
        alone=took(alone_s + truth.time.optimizer_s, spread=spread),
        update=took(truth.time.optimizer_s, spread=spread),
        peak_bytes=truth.peak_bytes,
        smaller=(2, less.peak_bytes),
    )


def anchor(known: Facts, text: str = MEASURED, *, spread: float = 0.0) -> Anchor:
    return anchor_of(Plan.parse(text), known, measured(known, text, spread=spread), HERE)


def missed(cost: Estimate, truth: Estimate) -> list[float]:
    pairs = (
        (cost.step_s, truth.step_s),
        (cost.time.optimizer_s, truth.time.optimizer_s),
        (cost.peak_bytes, truth.peak_bytes),
    )
    return [abs(one / other - 1) for one, other in pairs]


@pytest.mark.parametrize("text", OTHERS)
@pytest.mark.parametrize(("tokens", "units"), [(32, 4), (16, 8)])
def test_every_other_plan_and_size_is_exact_after_one_step(
    text: str, tokens: int, units: int
) -> None:
    plan, other = Plan.parse(text), predicted(tokens=tokens, units=units)
    truth = estimate(plan, real(other))
    before = missed(estimate(plan, other), truth)
    after = missed(estimate(plan, anchored(other, anchor(predicted()))), truth)
    assert before[0] > 0.3
    assert before[2] > 0.02
    assert max(after) < 1e-4


def test_the_residual_of_each_term_equals_the_multiple_of_the_machine() -> None:
    terms = anchor(predicted()).terms
    ratios = {term: residual.ratio for term, residual in terms.items()}
    assert ratios[Term.COMPUTING] == pytest.approx(COMPUTING)
    assert ratios[Term.UPDATE] == pytest.approx(COMPUTING * UPDATE)
    assert ratios[Term.SENDING] == pytest.approx(SENDING)
    assert terms[Term.COMPUTING].is_outside


def test_timing_the_machine_again_does_not_change_anchored_estimates() -> None:
    known = predicted()
    device = known.cluster.device.model_copy(update={"matmul_fraction": exact(0.5)})
    again = known.model_copy(
        update={"cluster": known.cluster.model_copy(update={"device": device})}
    )
    plan, known_anchor = Plan.parse(OTHERS[0]), anchor(known)
    ours, theirs = (estimate(plan, anchored(each, known_anchor)) for each in (known, again))
    assert theirs.step_s == pytest.approx(ours.step_s)


def test_anchored_ranges_combine_the_scatter_and_half_of_the_prior_error() -> None:
    known, plan = predicted(), Plan.parse(OTHERS[0])
    before = estimate(plan, known)
    after = estimate(plan, anchored(known, anchor(known, spread=0.02)))
    assert before.compute_error == pytest.approx(0.15)
    assert after.compute_error == pytest.approx((0.02**2 + 0.075**2) ** 0.5)
    assert after.communication_error == pytest.approx((0.02**2 + 0.125**2) ** 0.5)
    quiet = estimate(plan, anchored(known, anchor(known)))
    assert quiet.compute_error == pytest.approx(0.075)
    truth = estimate(plan, real(known))
    assert quiet.step_low_s <= truth.step_s <= quiet.step_high_s


def test_an_anchor_of_one_rank_leaves_links_unchanged() -> None:
    known = facts(transformer(), gpus(4, 8), batch=64)
    plan = Plan.parse("dp_shard=32 precision=bf16 microbatch_size=2")
    before = estimate(plan, known)
    busy_s = before.time.compute_s + before.time.recompute_s + before.time.launch_s
    alone_s = 1.4 * busy_s + before.time.optimizer_s
    measurement = StepMeasurement(
        step=None,
        alone=took(alone_s),
        update=took(before.time.optimizer_s),
        peak_bytes=before.reserved_bytes,
        allocated_bytes=before.memory.total - before.memory.context,
    )
    machine = HERE.model_copy(update={"device": "H100-like"})
    anchor = anchor_of(plan, known, measurement, machine)
    assert anchor.is_one_rank
    assert Term.STEP not in anchor.terms
    corrected = anchored(known, anchor)
    after = estimate(plan, corrected)
    assert after.time.compute_s == pytest.approx(1.4 * before.time.compute_s)
    assert after.time.optimizer_s == pytest.approx(before.time.optimizer_s)
    assert after.peak_bytes == pytest.approx(before.peak_bytes, rel=1e-4)
    assert corrected.cluster.inter == known.cluster.inter
    assert after.communication_error == before.communication_error


def with_attention(model: ModelProfile) -> ModelProfile:
    """Add a call of FlashAttention to every unit."""
    call = AttentionCall(
        heads=32, kv_heads=32, queries=8192, keys=8192, width=128, value_width=128, is_causal=True
    )
    work = attention_cost(call, call.kernel)
    units = []
    for unit in model.units:
        cost = unit.cost(Numerics.AS_BUILT)
        more = {
            "attention": (call,),
            "forward_flop": Affine(per_sample=cost.forward_flop.per_sample + work.forward_flop),
            "backward_flop": Affine(per_sample=cost.backward_flop.per_sample + work.backward_flop),
        }
        units.append(
            unit.model_copy(update={"costs": {Numerics.AS_BUILT: cost.model_copy(update=more)}})
        )
    return model.model_copy(update={"units": tuple(units)})


def test_attention_takes_the_multiple_of_matrix_products() -> None:
    plain, called = (
        facts(model, gpus(1, 8), batch=8, precision="fp32")
        for model in (transformer(), with_attention(transformer()))
    )
    plan = Plan.parse("dp_shard=8 microbatch_size=1")
    before = estimate(plan, called)
    # Much of it is attention.
    assert before.time.compute_s > 1.5 * estimate(plan, plain).time.compute_s
    busy = before.time.compute_s + before.time.recompute_s + before.time.launch_s
    measured_update = took(before.time.optimizer_s)
    measurement = StepMeasurement(
        step=None, alone=took(1.4 * busy + before.time.optimizer_s), update=measured_update
    )
    anchor = anchor_of(plan, called, measurement, HERE.model_copy(update={"device": "H100-like"}))
    for known in (plain, called):
        own = estimate(plan, known)
        after = estimate(plan, anchored(known, anchor))
        assert after.time.compute_s == pytest.approx(1.4 * own.time.compute_s, rel=1e-3)


@pytest.mark.parametrize("text", OTHERS)
def test_products_and_other_operations_have_separate_multiples(text: str) -> None:
    known, plan = predicted(), Plan.parse(MEASURED)
    device = known.cluster.device.model_copy(
        update={
            "matmul_fraction": exact(0.8 / 1.2),
            "memory_bandwidth_bytes_per_s": exact(10e9 / 4),
            "launch_s": exact(5e-6 * 4),
        }
    )
    cluster = known.cluster.model_copy(update={"device": device})
    slow = known.model_copy(update={"cluster": cluster})
    before, truth = estimate(plan, known), estimate(plan, slow)
    measurement = StepMeasurement(
        step=took(truth.step_s),
        alone=took(busy_s(truth) + truth.time.optimizer_s),
        update=took(truth.time.optimizer_s),
        products_share=1.2 * products_s(plan, known) / busy_s(truth),
    )
    assert busy_s(truth) / busy_s(before) > 1.3
    other = Plan.parse(text)
    after = estimate(other, anchored(known, anchor_of(plan, known, measurement, HERE)))
    wanted = estimate(other, slow)
    assert busy_s(after) == pytest.approx(busy_s(wanted), rel=1e-4)
    assert after.step_s == pytest.approx(wanted.step_s, rel=1e-4)


def timed_links(known: Facts, *, waiting: float) -> tuple[Facts, StepMeasurement]:
    """Build a machine whose collectives differ, and whose ranks wait a share of their computing."""
    fits = {
        kind: LinkFit(latency_s=1e-3 * (1 + number), busbw_bytes_per_s=1e9 / (1 + number))
        for number, kind in enumerate(Collective)
    }
    intra = link("loopback", 1e9, 50e-6).model_copy(update={"fits": fits})
    axes = (AxisFits(group_size=2, stride=1, fits=fits),)
    slow = known.model_copy(
        update={"cluster": known.cluster.model_copy(update={"intra": intra, "axes": axes})}
    )
    truth = estimate(Plan.parse(MEASURED), slow)
    measurement = StepMeasurement(
        step=took(truth.step_s + waiting * busy_s(truth)),
        alone=took(busy_s(truth) + truth.time.optimizer_s),
        update=took(truth.time.optimizer_s),
        links=Links.of(slow.cluster),
    )
    return slow, measurement


@pytest.mark.parametrize("text", OTHERS[:3])
def test_timed_links_and_waiting_are_separated(text: str) -> None:
    known, other = predicted(), Plan.parse(text)
    slow, measurement = timed_links(known, waiting=0.2)
    anchor = anchor_of(Plan.parse(MEASURED), known, measurement, HERE)
    assert anchor.corrections.waiting == pytest.approx(0.2)
    after, wanted = estimate(other, anchored(known, anchor)), estimate(other, slow)
    assert after.time.exposed_s == pytest.approx(wanted.time.exposed_s)
    assert after.time.straggling_s == pytest.approx(0.2 * busy_s(wanted))
    assert after.step_s == pytest.approx(wanted.step_s + 0.2 * busy_s(wanted))


def test_links_timed_slower_than_in_the_step_are_scaled_to_the_step() -> None:
    known, plan = predicted(), Plan.parse(MEASURED)
    slow, measurement = timed_links(known, waiting=0.0)
    truth = estimate(plan, slow)
    shorter_s = truth.step_s - truth.time.exposed_s / 2
    anchor = anchor_of(plan, known, replace(measurement, step=took(shorter_s)), HERE)
    after = estimate(plan, anchored(known, anchor))
    assert anchor.corrections.waiting == 0
    assert after.time.exposed_s == pytest.approx(truth.time.exposed_s / 2, rel=1e-4)


def test_links_of_other_clusters_are_left_unchanged() -> None:
    known = predicted()
    _, measurement = timed_links(known, waiting=0.0)
    anchor = anchor_of(Plan.parse(MEASURED), known, measurement, HERE)
    larger = known.model_copy(update={"cluster": cpus(4)})
    assert anchored(larger, anchor).cluster.intra == larger.cluster.intra


def test_without_the_busy_time_of_a_rank_everything_takes_the_same_multiple() -> None:
    known = predicted()
    plan = Plan.parse(MEASURED)
    before = estimate(plan, known)
    rest_s = before.step_s - before.time.optimizer_s
    measurement = StepMeasurement(
        step=took(2 * rest_s + before.time.optimizer_s),
        alone=None,
        update=took(before.time.optimizer_s),
        peak_bytes=before.peak_bytes,
    )
    after = estimate(plan, anchored(known, anchor_of(plan, known, measurement, HERE)))
    assert after.time.compute_s == pytest.approx(2 * before.time.compute_s)
    assert after.time.exposed_s == pytest.approx(2 * before.time.exposed_s)
    assert after.time.optimizer_s == pytest.approx(before.time.optimizer_s)
    # The error of computing stays, that of the update is halved.
    times = after.time.compute_s, after.time.optimizer_s
    doubt = (0.15 * times[0] + 0.075 * times[1]) / sum(times)
    assert after.compute_error == pytest.approx(doubt)


def test_an_update_below_the_clocks_resolution_does_not_make_updates_free() -> None:
    known, plan = predicted(), Plan.parse(MEASURED)
    measurement = replace(measured(known), update=took(0.0))
    after = estimate(plan, anchored(known, anchor_of(plan, known, measurement, HERE)))
    assert after.time.optimizer_s > 0


def test_links_within_the_scatter_of_a_step_stay_unchanged() -> None:
    known = predicted()
    assert anchored(known, anchor(known, spread=0.2)).cluster.intra == known.cluster.intra
    assert anchored(known, anchor(known)).cluster.intra != known.cluster.intra


def test_the_busy_time_of_a_rank_is_limited_by_the_step() -> None:
    known, plan = predicted(), Plan.parse(MEASURED)
    step = took(10.0)
    measurement = StepMeasurement(step=step, alone=took(13.0), update=took(1.0))
    after = estimate(plan, anchored(known, anchor_of(plan, known, measurement, HERE)))
    assert after.time.compute_s + after.time.launch_s == pytest.approx(9.0)
    assert after.time.optimizer_s == pytest.approx(1.0)


def test_the_search_equals_brute_force_under_an_anchor() -> None:
    """The bounds of the search use the same corrected terms as estimates."""
    known = predicted()
    slow = anchor(known)
    fast = slow.model_copy(
        update={
            "constants": {c: unit_s / 20 for c, unit_s in slow.constants.items()},
            "corrections": slow.corrections.model_copy(update={"update": 0.1, "activations": 0.2}),
        }
    )
    for each in (slow, fast):
        corrected = anchored(known, each)
        search = searched(
            SearchCache(CostModel(corrected)), PartialPlan(), Policy(objective=Objective.TIME)
        )
        best = search.fastest(search.rows)
        assert best is not None
        search.weigh_all()
        for index, candidate in enumerate(search.weighed):
            cost = candidate.estimate
            assert search.bounds.step_s[index] <= cost.step_s * (1 + 1e-9)
            assert search.bounds.peak_high_bytes[index] <= cost.peak_high_bytes * (1 + 1e-9)
        fitting = [candidate for candidate in search.weighed if candidate.fits]
        assert best.estimate.step_s == min(each.estimate.step_s for each in fitting)


def test_anchors_of_other_models_devices_software_and_dtypes_are_refused() -> None:
    known_anchor = anchor(predicted())
    assert fits(predicted(tokens=64, units=2), known_anchor)
    with pytest.raises(InputError, match="whose units are of other kinds"):
        anchored(facts(transformer(), cpus(2), precision="fp32"), known_anchor)
    with pytest.raises(InputError, match="a step on cpu, the plan is for H100-like"):
        anchored(facts(chain(), gpus(), precision="fp32"), known_anchor)
    elsewhere = predicted().model_copy(update={"stack": Stack(name="another")})
    with pytest.raises(InputError, match="a step under torch, the plan is under another"):
        anchored(elsewhere, known_anchor)
    bf16 = known_anchor.model_copy(update={"dtype": "bfloat16"})
    with pytest.raises(InputError, match="a step in bfloat16, the plan is in float32"):
        anchored(predicted(), bf16)


def test_an_anchor_is_cached_for_the_machine_that_it_was_measured_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    known = predicted()
    assert anchor_here(known) is None
    keep_anchor(anchor(known))  # of a processor that is not this one
    assert anchor_here(known) is None
    here = anchor(known).model_copy(update={"machine": machine_of(known.cluster)})
    keep_anchor(here)
    assert anchor_here(predicted(tokens=64)) == here
    assert anchor_here(facts(transformer(), cpus(2), precision="fp32")) is None
    assert anchor_here(known.model_copy(update={"stack": Stack(name="another")})) is None


def test_anchors_and_anchored_clusters_survive_their_files() -> None:
    known = predicted()
    saved = anchor(known, spread=0.1)
    assert Anchor.from_json(saved.to_json()) == saved
    cluster = anchored(known, saved).cluster
    assert ClusterProfile.from_json(cluster.to_json()) == cluster
