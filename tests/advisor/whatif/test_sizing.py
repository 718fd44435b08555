"""Inverse questions, against trying every number one by one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from advisor.cost import CostModel
from advisor.decide.candidates import legal_plans
from advisor.decide.choose import choose
from advisor.inputs.changed_facts import Lever, varied
from advisor.inputs.facts import Facts
from advisor.inputs.model_sizes import scaled
from advisor.inputs.policy import Policy
from advisor.inputs.resize import counts, resized
from advisor.search.ranking import Candidate, weigh
from advisor.whatif.sizing import (
    bandwidth_needed,
    budget,
    cheapest_device,
    fewest_devices,
    largest_microbatch,
    largest_model,
    largest_sequence,
)
from engines.plan import PartialPlan, Plan
from profiles.closed_forms.families import profile_from_config
from profiles.errors import InputError, NoPlanError
from profiles.machine.cluster import ClusterProfile
from profiles.model.profile import Numerics
from profiles.provenance import Quantity, Source
from profiles.workload.workload import Workload
from tests.factories import facts, gpus, transformer

MIDDLE = transformer(name="middle", layers=8, hidden=2048, ffn=5504, tokens=4096)
LLAMA = {
    "model_type": "llama",
    "vocab_size": 4000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
}
SMALL = profile_from_config(
    LLAMA, samples=1, sequence_length=1024, name="small", numerics=tuple(Numerics)
)
DATA = PartialPlan.build({"pp": 1, "tp": 1})
"""Brute force estimates every plan; data parallelism alone keeps that short."""

PLAIN = {"zero": 0, "recompute": "none"}


def weighed(whole: Facts, **settings: object) -> list[Candidate]:
    return weigh(legal_plans(whole, DATA.fixing(**settings)), CostModel(whole), Policy())


def fits(whole: Facts, **settings: object) -> bool:
    return any(c.fits for c in weighed(whole, **settings))


class TestDevices:
    WHOLE = facts(MIDDLE, gpus(1, 16, memory_gib=8.8), batch=16)

    def test_the_fewest_devices_equal_a_search_over_every_number(self) -> None:
        def on(count: int) -> Facts:
            workload = Workload(global_batch_size=-(-16 // count) * count, precision="bf16")
            cluster = resized(self.WHOLE.cluster, count)
            return Facts(model=MIDDLE, cluster=cluster, workload=workload)

        enough = [count for count in range(1, 17) if fits(on(count))]
        fewest = fewest_devices(self.WHOLE, partial=DATA)
        assert fewest.value == enough[0]
        assert fewest.plan.world_size == enough[0]
        assert 1 < enough[0] < 16
        before = enough[0] - 1
        assert fewest.verified[0].startswith(f"{before} devices: ")
        assert "does not fit: needs up to" in fewest.verified[0]
        assert fewest.low <= fewest.value == fewest.high

    def test_numbers_beyond_a_node_are_whole_nodes(self) -> None:
        """70 B parameters, 16 bytes each: 1,045 GiB of states on devices of 75.6 GiB usable."""
        seventy = transformer(name="70b", layers=80, hidden=8192, ffn=28672, vocab=128256)
        fewest = fewest_devices(facts(seventy, gpus(2, 8)), partial=DATA)
        assert fewest.value % 8 == 0
        assert fewest.value >= 16
        before = resized(gpus(2, 8), int(fewest.value) - 8)
        assert not fits(facts(seventy, before, batch=before.world_size * 4))

    def test_numbers_too_small_for_the_states_are_reported_without_a_trial(self) -> None:
        fewest = fewest_devices(facts(transformer(), gpus(1, 8)), partial=DATA)
        assert fewest.value == 2
        assert fewest.verified == (
            "below 2 devices the model states alone, 100.4 GiB, do not fit (75.6 GiB each)",
        )

    def test_a_batch_that_does_not_divide_is_rounded_up_with_a_note(self) -> None:
        fewest = fewest_devices(facts(transformer(), gpus(1, 8), batch=7), partial=DATA)
        assert fewest.plan.global_batch_size == 8
        assert fewest.notes == ("with a global batch of 8: 7 cannot be shared out among so many",)

    def test_one_device_that_suffices_has_no_smaller_number(self) -> None:
        fewest = fewest_devices(facts(MIDDLE, gpus(1, 8)), partial=DATA)
        assert (fewest.value, fewest.verified) == (1, ("there is no smaller number",))

    def test_a_node_that_does_not_suffice_is_refused_with_the_nearest_miss(self) -> None:
        with pytest.raises(NoPlanError, match="8 devices of this kind are not enough") as caught:
            fewest_devices(facts(transformer(), gpus(1, 8, memory_gib=14), batch=8), partial=DATA)
        assert "too much" in caught.value.what


class TestCutModels:
    """Sizing of pipelines and of tensor parallelism."""

    WHOLE = facts(SMALL, gpus(1, 4), batch=4)

    def tight(self, memory_gib: float) -> Facts:
        return facts(SMALL, gpus(1, 4, memory_gib=memory_gib), batch=4)

    def test_a_pipeline_needs_a_multiple_of_its_stages(self) -> None:
        fewest = fewest_devices(self.WHOLE, partial=PartialPlan(pp=2, tp=1))
        assert (fewest.value, fewest.plan.pp) == (2, 2)
        assert fewest.verified == ("1 device: plan needs 2 ranks (pp=2), 1 of 1x4xH100-like has 1",)

    def test_all_axes_need_no_more_devices_than_data_parallelism(self) -> None:
        whole = self.tight(3.6)
        assert fewest_devices(whole).value <= fewest_devices(whole, partial=DATA).value

    def test_the_largest_microbatch_of_a_pipeline_equals_a_search_over_every_size(self) -> None:
        partial = PartialPlan.build(
            {
                "pp": 2, "tp": 1, "dp_replicate": 2, "recompute": "none", "schedule": "gpipe",
                "loss_chunks": 1,
            }
        )  # fmt: skip
        whole = self.tight(5.0)

        def at(size: int) -> bool:
            changed = varied(whole, Lever.BATCH, 4 * size)
            plans = legal_plans(changed, partial.fixing(microbatch_size=size))
            return any(c.fits for c in weigh(plans, CostModel(changed), Policy()))

        by_hand = next(size for size in range(1, 200) if not at(size + 1))
        assert largest_microbatch(whole, partial=partial).value == by_hand

    def test_split_layers_need_a_faster_link_than_stages(self) -> None:
        """Split layers exchange activations in every layer, a stage once for all its layers."""
        whole = facts(SMALL, gpus(1, 2), batch=8)
        stages = bandwidth_needed(whole, Lever.LINKS_IN_NODE, partial=PartialPlan(pp=2))
        split = bandwidth_needed(whole, Lever.LINKS_IN_NODE, partial=PartialPlan(tp=2))
        assert stages.value < split.value
        assert (stages.plan.pp, split.plan.tp) == (2, 2)


class TestLargest:
    WHOLE = facts(SMALL, gpus(1, 2, memory_gib=9), batch=8)

    def test_the_largest_microbatch_equals_a_search_over_every_size(self) -> None:
        def at(size: int) -> bool:
            workload = Workload(global_batch_size=2 * size, precision="bf16")
            whole = Facts(model=SMALL, cluster=self.WHOLE.cluster, workload=workload)
            return fits(whole, microbatch_size=size)

        by_hand = next(size for size in range(1, 2000) if not at(size + 1))
        largest = largest_microbatch(self.WHOLE, partial=DATA)
        assert largest.value == by_hand
        assert largest.plan.microbatch_size == by_hand
        assert largest.verified[0].startswith(f"{by_hand + 1} samples: ")
        assert largest.high >= largest.value

    def test_the_largest_microbatch_of_a_given_strategy_is_smaller(self) -> None:
        replicated = largest_microbatch(self.WHOLE, partial=DATA.fixing(recompute="none", zero=0))
        assert replicated.plan.recompute == "none"
        assert replicated.value < largest_microbatch(self.WHOLE, partial=DATA).value

    def test_the_longest_sequence_fits_and_the_next_does_not(self) -> None:
        tight = facts(SMALL, gpus(1, 2, memory_gib=4.2), batch=2)
        longest = largest_sequence(tight, partial=DATA.fixing(**PLAIN))
        by_hand = [
            length
            for length in range(1024, 2561, 128)
            if fits(varied(tight, Lever.SEQUENCE, length), **PLAIN)
        ]
        assert longest.value == by_hand[-1]
        assert 1024 < longest.value < 2560
        assert longest.verified[0].startswith(f"{by_hand[-1] + 128} tokens: ")

    def test_a_sequence_limited_by_the_positions_says_so(self) -> None:
        longest = largest_sequence(facts(SMALL, gpus(1, 2), batch=2), partial=DATA)
        assert longest.value == 8192
        assert longest.verified == (
            "8320 tokens: 8320 tokens, but the positions of this model go to 8192",
        )

    def test_sequences_of_a_captured_module_cannot_vary(self) -> None:
        with pytest.raises(InputError, match="is not known at other lengths"):
            largest_sequence(facts(MIDDLE, gpus(1, 2), batch=2))

    def test_the_largest_model_equals_a_search_over_every_width(self) -> None:
        whole = facts(SMALL, gpus(1, 2, memory_gib=5), batch=2)
        by_hand = [
            heads
            for heads in range(2, 25, 2)
            if fits(whole.model_copy(update={"model": scaled(SMALL, heads)}))
        ]
        largest = largest_model(whole, partial=DATA)
        assert largest.value == scaled(SMALL, by_hand[-1]).parameters
        assert 8 < by_hand[-1] < 24
        assert largest.verified[0].startswith(f"{by_hand[-1] + 2} heads: ")
        assert f"{by_hand[-1]} heads, 8 now" in largest.notes[0]

    def test_a_model_that_fits_no_sample_is_refused(self) -> None:
        with pytest.raises(NoPlanError, match=r"one sample is too much: .* too much"):
            largest_microbatch(facts(transformer(), gpus(1, 1)), partial=DATA)


class TestBandwidth:
    WHOLE = facts(MIDDLE, gpus(2, 4), batch=64)

    def step_s(self, rate: float, **settings: object) -> float:
        whole = varied(self.WHOLE, Lever.LINKS_BETWEEN_NODES, rate)
        return min(c.estimate.step_s for c in weighed(whole, **settings) if c.fits)

    @pytest.mark.parametrize("settings", [{"dp_shard": 8}, {"dp_replicate": 8}, {"zero": 1}])
    def test_the_needed_bandwidth_hides_all_traffic_and_slightly_less_does_not(
        self, settings: dict[str, object]
    ) -> None:
        needed = bandwidth_needed(
            self.WHOLE, Lever.LINKS_BETWEEN_NODES, partial=DATA.fixing(**settings)
        )
        free = self.step_s(1e18, **settings)
        assert self.step_s(needed.value, **settings) <= 1.05 * free
        assert self.step_s(needed.value / 1.02, **settings) > 1.05 * free
        assert needed.low < needed.value < needed.high

    def test_machines_of_twice_the_speed_need_twice_the_bandwidth(self) -> None:
        def times(cluster: ClusterProfile, factor: float) -> ClusterProfile:
            def faster(quantity: Quantity, by: float = factor) -> Quantity:
                return quantity.model_copy(update={"value": quantity.value * by})

            device = cluster.device
            update: dict[str, object] = {
                "flop_per_s": {name: faster(rate) for name, rate in device.flop_per_s.items()},
                "memory_bandwidth_bytes_per_s": faster(device.memory_bandwidth_bytes_per_s),
                "launch_s": faster(device.launch_s, 1 / factor),
            }
            links = {}
            for tier in ("intra", "inter"):
                link = getattr(cluster, tier)
                parts = {
                    "bandwidth_bytes_per_s": faster(link.bandwidth_bytes_per_s),
                    "latency_s": faster(link.latency_s, 1 / factor),
                }
                links[tier] = link.model_copy(update=parts)
            return cluster.model_copy(update={"device": device.model_copy(update=update), **links})

        def needed(factor: float) -> float:
            whole = self.WHOLE.model_copy(update={"cluster": times(self.WHOLE.cluster, factor)})
            partial = DATA.fixing(dp_shard=8, microbatch_size=8)
            return bandwidth_needed(whole, Lever.LINKS_BETWEEN_NODES, partial=partial).value

        assert needed(2) / needed(1) == pytest.approx(2, rel=0.02)

    def test_one_node_needs_no_network(self) -> None:
        with pytest.raises(InputError, match="there is one node"):
            bandwidth_needed(facts(MIDDLE, gpus(1, 4)), Lever.LINKS_BETWEEN_NODES)

    def test_the_answer_says_whether_the_link_suffices(self) -> None:
        slow = facts(MIDDLE, gpus(2, 4, inter_bytes_per_s=1e9), batch=64)
        partial = DATA.fixing(dp_shard=8)
        assert bandwidth_needed(slow, Lever.LINKS_BETWEEN_NODES, partial=partial).notes == (
            "here: 1.00 GB/s, too slow",
        )


def given(value: float) -> Quantity:
    return Quantity(value=value, source=Source.USER)


class TestBudget:
    """A step of exactly 2 s (1.5 to 3) on eight devices, 64 samples of 1,000 tokens."""

    PLAN = Plan(dp_replicate=8, microbatch_size=8)
    ESTIMATE = choose(facts(MIDDLE, gpus(1, 8), batch=64)).estimate.model_copy(
        update={"step_s": 2.0, "step_low_s": 1.5, "step_high_s": 3.0}
    )

    def test_a_budget_equals_sums_done_by_hand(self) -> None:
        """64 M tokens are 1,000 steps: 2,000 s, 16,000 device-seconds."""
        needs = budget(
            self.PLAN,
            self.ESTIMATE,
            tokens=64e6,
            tokens_per_sample=1000,
            watts_per_device=given(500),
            price_per_device_hour=given(3.6),
        )
        assert needs.steps == 1000
        assert (needs.seconds.low, needs.seconds.value, needs.seconds.high) == (1500, 2000, 3000)
        assert needs.device_hours.value == pytest.approx(16_000 / 3600)
        assert needs.energy_j is not None
        assert needs.energy_j.value == pytest.approx(500 * 16_000)
        assert needs.money is not None
        assert (needs.money.low, needs.money.high) == pytest.approx((12.0, 24.0))
        assert needs.notes == (
            "energy: at 500 W a device (you)",
            "money: at 3.6 a device-hour (you)",
        )

    def test_the_last_step_counts_as_a_whole_one(self) -> None:
        assert budget(self.PLAN, self.ESTIMATE, samples=65).steps == 2

    def test_unknown_energy_and_money_are_reported_as_unknown(self) -> None:
        needs = budget(self.PLAN, self.ESTIMATE, samples=64)
        assert (needs.energy_j, needs.money) == (None, None)
        assert needs.notes == (
            "energy: unknown, as no power of a device was given",
            "money: unknown, as no price of a device-hour was given",
        )

    @pytest.mark.parametrize(
        ("amounts", "message"),
        [
            ({}, "give one of `tokens` and `samples`"),
            ({"tokens": 1.0, "samples": 1.0}, "give one of `tokens` and `samples`"),
            ({"samples": 0}, "`samples` = 0: more than 0 is wanted"),
            ({"samples": -3}, "`samples` = -3: more than 0 is wanted"),
            ({"tokens": float("nan")}, "`tokens` = nan: more than 0 is wanted"),
            ({"tokens": 5.0}, "the samples are no text"),
        ],
    )
    def test_impossible_amounts_are_refused(self, amounts: dict[str, float], message: str) -> None:
        with pytest.raises(InputError, match=message):
            budget(self.PLAN, self.ESTIMATE, **amounts)


class TestCheapest:
    FAST = gpus(1, 8)
    SLOW = FAST.model_copy(
        update={
            "device": FAST.device.model_copy(
                update={
                    "name": "half",
                    "flop_per_s": {
                        name: rate.model_copy(update={"value": rate.value / 2})
                        for name, rate in FAST.device.flop_per_s.items()
                    },
                }
            )
        }
    )
    WHOLE = facts(MIDDLE, FAST, batch=64)
    SAMPLES = 64_000.0

    def by_hand(self, cluster: object, deadline_s: float, price: float) -> Iterator[float]:
        """Yield the cost of every number of devices that meets the deadline."""
        for count in range(1, 9):
            at = resized(cluster, count)  # type: ignore[arg-type]
            batch = -(-64 // count) * count
            whole = Facts(
                model=MIDDLE,
                cluster=at,
                workload=Workload(global_batch_size=batch, precision="bf16"),
            )
            best = min(
                (c for c in weighed(whole) if c.fits), key=lambda c: c.estimate.step_s
            ).estimate
            steps = -(-self.SAMPLES // batch)
            if steps * best.step_high_s <= deadline_s:
                yield price * steps * best.step_s * count / 3600

    def test_the_cheapest_device_equals_a_search_over_every_number(self) -> None:
        deadline_s = 1000 * 1.2
        prices = {"H100-like": given(3.0), "half": given(1.2)}
        cheapest = cheapest_device(
            self.WHOLE,
            [self.FAST, self.SLOW],
            deadline_s=deadline_s,
            samples=self.SAMPLES,
            prices=prices,
            partial=DATA,
        )
        for offer, cluster in zip(
            sorted(cheapest.offers, key=lambda o: o.device), (self.FAST, self.SLOW), strict=True
        ):
            every = list(self.by_hand(cluster, deadline_s, prices[offer.device].value))
            assert offer.budget is not None
            assert offer.budget.money is not None
            # Not every number is tried, and several cost nearly the same.
            least = min(every)
            assert (1 - 1e-12) * least <= offer.budget.money.value <= 1.005 * least
        assert cheapest.best == cheapest.offers[0].device

    def test_without_prices_device_hours_are_given_and_no_winner(self) -> None:
        cheapest = cheapest_device(
            self.WHOLE,
            [self.FAST, self.SLOW],
            deadline_s=1e5,
            samples=self.SAMPLES,
            partial=DATA,
        )
        assert cheapest.best is None
        assert cheapest.because == (
            "no price of H100-like or half is known: they cannot be compared in money"
        )
        assert all(offer.budget and offer.budget.money is None for offer in cheapest.offers)

    def test_a_missed_deadline_reports_the_time_needed(self) -> None:
        cheapest = cheapest_device(
            self.WHOLE, [self.FAST], deadline_s=1.0, samples=self.SAMPLES, partial=DATA
        )
        assert (cheapest.best, cheapest.because) == (None, "none is in time")
        assert cheapest.offers[0].because.startswith("8 devices: takes ")

    def test_a_deadline_of_zero_is_refused(self) -> None:
        with pytest.raises(InputError, match="`deadline_s` = 0: more than 0 is wanted"):
            cheapest_device(self.WHOLE, [self.FAST], deadline_s=0, samples=1)


def test_clusters_are_resized_to_parts_of_a_node_or_whole_nodes() -> None:
    assert list(counts(gpus(2, 4), 16)) == [1, 2, 3, 4, 8, 12, 16]
    assert list(counts(gpus(1, 4), 16)) == [1, 2, 3, 4]
    assert resized(gpus(2, 4), 12).num_nodes == 3
    assert resized(gpus(2, 4), 3).inter is None
    with pytest.raises(InputError, match="6 devices are no whole nodes of 4"):
        resized(gpus(2, 4), 6)
    with pytest.raises(InputError, match="nothing is known of a network"):
        resized(gpus(1, 4), 8)
