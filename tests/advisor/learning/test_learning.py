"""Constants refitted from runs: by hand where one is unknown, by construction where several are."""

from __future__ import annotations

from math import exp, log, sqrt

import pytest

from advisor.cost import estimate
from advisor.decide.choose import choose
from advisor.decide.decision import Decision
from advisor.inputs.facts import Facts
from advisor.learning.learning import parts_of, refit, undisturbed_s
from advisor.learning.run_log import run_of
from advisor.report.view import view_of
from engines.plan import PartialPlan, Plan
from profiles.machine.cluster import ClusterProfile, Constant
from profiles.provenance import Source, Timing
from profiles.timing.runs import ConstantShare, Machine, PeakRecord, TrainingRun
from tests.factories import chain, cpus, exact, facts, gpus, transformer

HERE = Machine(
    device="cpu", processor="one of ours", threads=1, ranks_per_node=1, torch="2.13", ours="1"
)
# Parameters and tokens of a unit: from bound by memory to bound by products.
SHAPES = [(2**power * 10_000, tokens) for power in range(10) for tokens in (1, 16, 256, 2048)]


def took(median_s: float, *, spread: float = 0.0) -> Timing:
    low, high = median_s * (1 - spread), median_s * (1 + spread)
    return Timing(median_s=median_s, low_s=low, high_s=high, repeats=20)


def products_only(
    factor: float, *, number: int = 0, spread: float = 0.0, **other: object
) -> TrainingRun:
    """A step of a second, all of it matrix products on cpus(1): 50 GFLOP/s, 80 % of them."""
    return TrainingRun.build(
        {
            "machine": HERE,
            "model": "products",
            "fingerprint": str(number),
            "plan": "microbatch_size=1",
            "dtype": "float32",
            "predicted_s": 1.0,
            "parts": {Constant.PRODUCTS: ConstantShare(seconds=1.0, unit_s=1 / 40e9)},
            "step": took(factor, spread=spread),
            "ended_at": "2026-01-01T00:00:00+00:00",
            **other,
        }
    )


def doubted(error: float) -> ClusterProfile:
    """Return cpus(1) with that error of its matmul fraction."""
    device = cpus(1).device
    fraction = device.matmul_fraction.model_copy(update={"relative_error": error})
    changed = device.model_copy(update={"matmul_fraction": fraction})
    return cpus(1).model_copy(update={"device": changed})


def slowness(cluster: ClusterProfile) -> float:
    """Return the logarithm of the slowdown of products against cpus(1)."""
    return log(0.8 / cluster.device.matmul_fraction.value)


def test_one_run_moves_a_constant_by_its_share_of_the_variance() -> None:
    # Before: 0.3 of the constant and 0.15 of the roofline; the run: 0.15. Variances add up.
    prior, noise = 0.3**2 + 0.15**2, 0.15**2
    refitted = refit(doubted(0.3), [products_only(1.2)], dtype="float32")
    assert slowness(refitted) == pytest.approx(log(1.2) * prior / (prior + noise))
    quantity = refitted.device.matmul_fraction
    assert quantity.relative_error == pytest.approx(sqrt(prior * noise / (prior + noise)))
    assert quantity.source is Source.MEASURED
    assert quantity.origin == "refitted from 1 run"


def test_runs_predicted_with_older_constants_are_rescaled_to_current_ones() -> None:
    # Predicted with half of today's speed: the step took twice what today's constant predicts.
    then = products_only(
        1.0, parts={Constant.PRODUCTS: ConstantShare(seconds=1.0, unit_s=1 / 20e9)}
    )
    now = products_only(
        1.0, predicted_s=0.5, parts={Constant.PRODUCTS: ConstantShare(seconds=0.5, unit_s=1 / 40e9)}
    )
    assert slowness(refit(doubted(0.3), [then], dtype="float32")) == pytest.approx(
        slowness(refit(doubted(0.3), [now], dtype="float32"))
    )


def test_repeated_runs_of_one_model_count_once() -> None:
    once = refit(doubted(0.3), [products_only(1.2)], dtype="float32")
    factors = (7.0, 1.2, 1.1, 1.4, 5.0)
    often = refit(doubted(0.3), [products_only(f) for f in factors], dtype="float32")
    assert slowness(often) == pytest.approx(slowness(once))
    assert often.learned is not None
    assert often.learned.runs == {Constant.PRODUCTS: 5}


def test_runs_under_load_do_not_make_an_idle_machine_look_slow() -> None:
    """Most steps of each run take twice as long under load; a tenth run on an idle machine."""

    def loaded(number: int, low_s: float) -> TrainingRun:
        step = Timing(median_s=2.0, low_s=low_s, high_s=2.2, repeats=20)
        return products_only(1.0, number=number, step=step)

    alone = [loaded(number, 1.0) for number in range(9)]
    never = [loaded(number, 2.0) for number in range(9)]
    quiet = slowness(refit(doubted(0.3), alone, dtype="float32"))
    assert 0 < quiet < 0.55 * slowness(refit(doubted(0.3), never, dtype="float32"))
    # A quartile: 15 of the 40 percentiles from 1.0 to 2.0.
    assert undisturbed_s(alone[0]) == pytest.approx(1.375)


def test_one_quiet_run_of_a_model_counts_more_than_its_loaded_ones() -> None:
    quiet = [products_only(f) for f in (2.0, 1.0, 2.1, 1.9)]
    assert slowness(refit(doubted(0.3), quiet, dtype="float32")) == pytest.approx(0.0, abs=1e-9)


def test_an_outlier_changes_little_among_many_runs_and_not_everything_alone() -> None:
    runs = [products_only(1.0, number=number) for number in range(9)]
    odd = products_only(5.0, number=9)
    spoilt = refit(doubted(0.3), [*runs, odd], dtype="float32")
    assert 0 < slowness(spoilt) < 0.02  # the mean of the logarithms is 0.16
    alone = refit(doubted(0.3), [odd], dtype="float32")
    assert slowness(alone) < 0.5 * log(5)
    assert alone.device.matmul_fraction.relative_error <= 0.3  # as before
    agreed = [products_only(5.0, number=number) for number in range(9)]
    assert slowness(refit(doubted(0.3), agreed, dtype="float32")) > 0.95 * log(5)


def test_a_range_is_never_narrower_than_the_scatter_of_runs() -> None:
    factors = [exp(0.25 * (-1) ** number) for number in range(30)]
    scattered = [products_only(f, number=n) for n, f in enumerate(factors)]
    refitted = refit(doubted(0.3), scattered, dtype="float32")
    assert refitted.device.matmul_fraction.relative_error == pytest.approx(0.25 * 1.645, rel=0.02)
    restless = [products_only(1.0, number=n, spread=0.2) for n in range(30)]
    refitted = refit(doubted(0.3), restless, dtype="float32")
    assert refitted.device.matmul_fraction.relative_error == pytest.approx(0.2)


def test_constants_without_runs_stay_unchanged() -> None:
    before = doubted(0.3)
    refitted = refit(before, [products_only(1.2)], dtype="float32")
    assert refitted.device.launch_s.source is before.device.launch_s.source
    assert refitted.learned is not None
    assert list(refitted.learned.runs) == [Constant.PRODUCTS]


def test_runs_in_another_dtype_and_no_runs_change_nothing() -> None:
    before = doubted(0.3)
    assert refit(before, [], dtype="float32") is before
    assert refit(before, [products_only(1.2)], dtype="bfloat16") is before
    refitted = refit(before, [products_only(1.2)], dtype="float32")
    assert refit(refitted, [products_only(1.2)], dtype="float32") is refitted


def slower_by_hand(factor: float) -> ClusterProfile:
    cluster = cpus(1)
    device = cluster.device.model_copy(
        update={
            "matmul_fraction": exact(0.8 / factor),
            "memory_bandwidth_bytes_per_s": exact(10e9 / factor),
            "launch_s": exact(5e-6 * factor),
        }
    )
    return cluster.model_copy(update={"device": device})


def trained(
    shape: tuple[int, int], cluster: ClusterProfile, real: ClusterProfile
) -> tuple[TrainingRun, Decision]:
    """A run that was predicted for `cluster` and took what it takes on `real`."""
    parameters, tokens = shape
    model = chain(parameters=parameters, tokens=tokens, width=100)
    decision = choose(facts(model, cluster, batch=4, precision="fp32"))
    step_s = estimate(decision.plan, facts(model, real, batch=4, precision="fp32")).step_s
    return run_of(decision, HERE, step=took(step_s)), decision


def missed(decision: Decision, cluster: ClusterProfile, real: ClusterProfile) -> float:
    def step_s(machines: ClusterProfile) -> float:
        changed = decision.facts.model_copy(update={"cluster": machines})
        return estimate(decision.plan, changed).step_s

    return abs(log(step_s(real) / step_s(cluster)))


@pytest.mark.parametrize("factor", [0.6, 1.5])
def test_a_uniform_slowdown_is_learned_from_runs(factor: float) -> None:
    real = slower_by_hand(factor)
    *learnt, (_, unseen) = [trained(shape, cpus(1), real) for shape in SHAPES]
    runs = [run for run, _ in learnt]
    errors = [
        missed(unseen, refit(cpus(1), runs[:count], dtype="float32"), real) for count in (0, 1, 39)
    ]
    assert errors[0] == pytest.approx(abs(log(factor)))
    assert errors[1] < errors[0]
    assert errors[2] < 0.1 * errors[0]


def test_a_slower_network_is_distinguished_from_slower_devices() -> None:
    before, real = gpus(2, 8, inter_bytes_per_s=40e9), gpus(2, 8, inter_bytes_per_s=20e9)
    runs = []
    for hidden in (1024, 2048, 3072, 4096):
        known = facts(transformer(hidden=hidden), before, batch=16)
        for recompute in ("none", "full"):
            partial = PartialPlan.build(
                {"dp_shard": 16, "microbatch_size": 1, "recompute": recompute}
            )
            decision = choose(known, partial=partial)
            actual = facts(transformer(hidden=hidden), real, batch=16)
            runs.append(run_of(decision, HERE, step=took(estimate(decision.plan, actual).step_s)))
    refitted = refit(before, runs, dtype="bfloat16")
    assert refitted.inter is not None
    assert refitted.inter.bandwidth_bytes_per_s.value == pytest.approx(20e9, rel=0.15)
    assert refitted.inter.bandwidth_bytes_per_s.source is Source.MEASURED
    assert refitted.device.matmul_fraction.value == pytest.approx(0.8, rel=0.03)
    assert refitted.device.matmul_fraction.source is Source.DATASHEET


@pytest.mark.parametrize(
    "text",
    ["dp_replicate=16", "dp_replicate=16 zero=1", "dp_shard=16", "dp_replicate=2 dp_shard=8"],
)
def test_the_parts_of_a_step_add_up_to_it(text: str) -> None:
    known = facts(batch=32)
    plan = Plan.parse(f"{text} precision=bf16 microbatch_size=1 accumulation=2")
    parts = parts_of(plan, known)
    assert sum(part.seconds for part in parts.values()) == pytest.approx(
        estimate(plan, known).step_s, rel=0.01
    )


def test_a_device_that_performs_as_predicted_is_predicted_the_same_again() -> None:
    known = facts(transformer(), gpus(1, 1, memory_gib=800), batch=8)
    decision = choose(known)
    run = run_of(decision, HERE, step=took(decision.estimate.step_s))
    refitted = refit(known.cluster, [run], dtype="bfloat16")
    assert refitted.device.matmul_fraction.source is Source.MEASURED
    changed = Facts(model=known.model, cluster=refitted, workload=known.workload)
    again = estimate(decision.plan, changed)
    assert again.step_s == pytest.approx(decision.estimate.step_s, rel=1e-3)


def remembered(missed_bytes: float, *, number: int, offset_bytes: float = 0.0) -> TrainingRun:
    """A run that took as long as predicted, with a higher peak than predicted."""
    peak = PeakRecord(
        predicted_bytes=1e9 + offset_bytes,
        measured_bytes=1e9 + missed_bytes,
        doubt_bytes=0.0,
        offset_bytes=offset_bytes,
    )
    return products_only(1.0, number=number, peak=peak)


def with_context(error: float) -> ClusterProfile:
    device = cpus(1).device
    context = exact(1e9).model_copy(update={"relative_error": error})
    return cpus(1).model_copy(
        update={"device": device.model_copy(update={"context_bytes": context})}
    )


def test_the_context_of_a_process_is_learned_from_peaks() -> None:
    # Before: 0.2 of 1 GB; each process: half of that. One run takes 4 / 5 of its miss.
    refitted = refit(with_context(0.2), [remembered(50e6, number=0)], dtype="float32")
    assert refitted.device.context_bytes.value == pytest.approx(1e9 + 0.8 * 50e6)
    runs = [remembered(50e6, number=number) for number in range(20)]
    refitted = refit(with_context(0.2), runs, dtype="float32")
    assert refitted.device.context_bytes.value == pytest.approx(1e9 + 50e6, rel=0.002)
    assert refitted.device.context_bytes.relative_error == pytest.approx(0.1 / 1.05, rel=0.01)


def test_a_learned_context_is_not_added_twice() -> None:
    plain = refit(with_context(0.2), [remembered(50e6, number=0)], dtype="float32")
    assert plain.learned is not None
    learnt = remembered(50e6, number=0, offset_bytes=plain.learned.context_offset_bytes)
    again = refit(with_context(0.2), [learnt], dtype="float32")
    assert again.device.context_bytes == plain.device.context_bytes


def test_the_report_names_the_runs() -> None:
    runs = [products_only(1.2, number=number) for number in range(3)]
    refitted = refit(doubted(0.3), [*runs, remembered(5e6, number=4)], dtype="float32")
    decision = choose(facts(chain(), refitted, batch=2, precision="fp32"))
    lines = {basis.what.split(":")[0]: basis.source for basis in view_of(decision).basis}
    assert lines["matrix products"].startswith("measured +-")
    assert lines["matrix products"].endswith("(4 runs)")
    assert lines["context of a process"].endswith("(1 run)")
    assert "run" not in lines["launching an operation"]


def test_a_refitted_profile_survives_its_file() -> None:
    refitted = refit(doubted(0.3), [products_only(1.2), remembered(5e6, number=1)], dtype="float32")
    assert ClusterProfile.from_json(refitted.to_json()) == refitted
    run = remembered(5e6, number=1)
    assert TrainingRun.from_json(run.to_json()) == run
