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
"""Brute force weighs every plan: the data-parallel family alone keeps that short."""

PLAIN = {"zero": 0, "recompute": "none"}


def weighed(whole: Facts, **settings: object) -> list[Candidate]:
    return weigh(legal_plans(whole, DATA.fixing(**settings)), CostModel(whole), Policy())


def fits(whole: Facts, **settings: object) -> bool:
    return any(c.fits for c in weighed(whole, **settings))


class TestDevices:
    WHOLE = facts(MIDDLE, gpus(1, 16, memory_gib=8.8), batch=16)

    def test_the_fewest_are_what_trying_every_number_finds(self) -> None:
        def on(count: int) -> Facts:
            workload = Workload(global_batch_size=-(-16 // count) * count, precision="bf16")
            cluster = resized(self.WHOLE.cluster, count)
            return Facts(model=MIDDLE, cluster=cluster, workload=workload)

        enough = [count for count in range(1, 17) if fits(on(count))]
        found = fewest_devices(self.WHOLE, partial=DATA)
        assert found.value == enough[0]
        assert found.plan.world_size == enough[0]
        assert 1 < enough[0] < 16
        before = enough[0] - 1
        assert found.verified[0].startswith(f"{before} devices: ")
        assert "does not fit: needs up to" in found.verified[0]
        assert found.low <= found.value == found.high

    def test_the_number_goes_on_in_whole_nodes(self) -> None:
        """70 B parameters, 16 bytes each: 1,045 GiB of states on devices of 75.6 GiB usable."""
        seventy = transformer(name="70b", layers=80, hidden=8192, ffn=28672, vocab=128256)
        found = fewest_devices(facts(seventy, gpus(2, 8)), partial=DATA)
        assert found.value % 8 == 0
        assert found.value >= 16
        before = resized(gpus(2, 8), int(found.value) - 8)
        assert not fits(facts(seventy, before, batch=before.world_size * 4))

    def test_what_the_states_alone_fill_is_not_tried_and_said(self) -> None:
        found = fewest_devices(facts(transformer(), gpus(1, 8)), partial=DATA)
        assert found.value == 2
        assert found.verified == (
            "below 2 devices the model states alone, 100.4 GiB, do not fit (75.6 GiB each)",
        )

    def test_a_batch_that_so_many_do_not_share_is_rounded_up_and_said(self) -> None:
        found = fewest_devices(facts(transformer(), gpus(1, 8), batch=7), partial=DATA)
        assert found.plan.global_batch_size == 8
        assert found.notes == ("with a global batch of 8: 7 cannot be shared out among so many",)

    def test_one_device_that_is_enough_has_no_smaller_neighbour(self) -> None:
        found = fewest_devices(facts(MIDDLE, gpus(1, 8)), partial=DATA)
        assert (found.value, found.verified) == (1, ("there is no smaller number",))

    def test_a_node_that_is_not_enough_is_refused_with_the_nearest_miss(self) -> None:
        with pytest.raises(NoPlanError, match="8 devices of this kind are not enough") as caught:
            fewest_devices(facts(transformer(), gpus(1, 8, memory_gib=14), batch=8), partial=DATA)
        assert "too much" in caught.value.what


class TestCutModels:
    """Pipelines and split layers are answers too."""

    WHOLE = facts(SMALL, gpus(1, 4), batch=4)

    def tight(self, memory_gib: float) -> Facts:
        return facts(SMALL, gpus(1, 4, memory_gib=memory_gib), batch=4)

    def test_a_pipeline_needs_a_multiple_of_its_stages(self) -> None:
        found = fewest_devices(self.WHOLE, partial=PartialPlan(pp=2, tp=1))
        assert (found.value, found.plan.pp) == (2, 2)
        assert found.verified == ("1 device: plan needs 2 ranks (pp=2), 1 of 1x4xH100-like has 1",)

    def test_all_axes_need_no_more_devices_than_one_kind(self) -> None:
        whole = self.tight(3.6)
        assert fewest_devices(whole).value <= fewest_devices(whole, partial=DATA).value

    def test_the_largest_microbatch_of_a_pipeline_is_what_trying_every_size_finds(self) -> None:
        partial = PartialPlan.build(
            {"pp": 2, "tp": 1, "dp_replicate": 2, "recompute": "none", "schedule": "gpipe"}
        )
        whole = self.tight(5.0)

        def at(size: int) -> bool:
            changed = varied(whole, Lever.BATCH, 4 * size)
            plans = legal_plans(changed, partial.fixing(microbatch_size=size))
            return any(c.fits for c in weigh(plans, CostModel(changed), Policy()))

        by_hand = next(size for size in range(1, 200) if not at(size + 1))
        assert largest_microbatch(whole, partial=partial).value == by_hand

    def test_split_layers_need_a_faster_link_than_stages(self) -> None:
        """They exchange activations in every layer, stages once for all of theirs."""
        whole = facts(SMALL, gpus(1, 2), batch=8)
        stages = bandwidth_needed(whole, Lever.LINKS_IN_NODE, partial=PartialPlan(pp=2))
        split = bandwidth_needed(whole, Lever.LINKS_IN_NODE, partial=PartialPlan(tp=2))
        assert stages.value < split.value
        assert (stages.plan.pp, split.plan.tp) == (2, 2)


class TestLargest:
    WHOLE = facts(SMALL, gpus(1, 2, memory_gib=9), batch=8)

    def test_the_largest_microbatch_is_what_trying_every_size_finds(self) -> None:
        def at(size: int) -> bool:
            workload = Workload(global_batch_size=2 * size, precision="bf16")
            whole = Facts(model=SMALL, cluster=self.WHOLE.cluster, workload=workload)
            return fits(whole, microbatch_size=size)

        by_hand = next(size for size in range(1, 2000) if not at(size + 1))
        found = largest_microbatch(self.WHOLE, partial=DATA)
        assert found.value == by_hand
        assert found.plan.microbatch_size == by_hand
        assert found.verified[0].startswith(f"{by_hand + 1} samples: ")
        assert found.high >= found.value

    def test_a_strategy_can_be_named(self) -> None:
        kept = largest_microbatch(self.WHOLE, partial=DATA.fixing(recompute="none", zero=0))
        assert kept.plan.recompute == "none"
        assert kept.value < largest_microbatch(self.WHOLE, partial=DATA).value

    def test_the_longest_sequence_fits_and_the_next_does_not(self) -> None:
        tight = facts(SMALL, gpus(1, 2, memory_gib=4.2), batch=2)
        found = largest_sequence(tight, partial=DATA.fixing(**PLAIN))
        by_hand = [
            length
            for length in range(128, 2561, 128)
            if fits(varied(tight, Lever.SEQUENCE, length), **PLAIN)
        ]
        assert found.value == by_hand[-1]
        assert 1024 < found.value < 2560
        assert found.verified[0].startswith(f"{by_hand[-1] + 128} tokens: ")

    def test_a_sequence_that_ends_at_the_positions_says_so(self) -> None:
        found = largest_sequence(facts(SMALL, gpus(1, 2), batch=2), partial=DATA)
        assert found.value == 8192
        assert found.verified == (
            "8320 tokens: 8320 tokens, but the positions of this model go to 8192",
        )

    def test_a_module_has_one_length(self) -> None:
        with pytest.raises(InputError, match="is not known at other lengths"):
            largest_sequence(facts(MIDDLE, gpus(1, 2), batch=2))

    def test_the_largest_model_is_what_trying_every_width_finds(self) -> None:
        whole = facts(SMALL, gpus(1, 2, memory_gib=5), batch=2)
        by_hand = [
            heads
            for heads in range(2, 25, 2)
            if fits(whole.model_copy(update={"model": scaled(SMALL, heads)}))
        ]
        found = largest_model(whole, partial=DATA)
        assert found.value == scaled(SMALL, by_hand[-1]).parameters
        assert 8 < by_hand[-1] < 24
        assert found.verified[0].startswith(f"{by_hand[-1] + 2} heads: ")
        assert f"{by_hand[-1]} heads, 8 now" in found.notes[0]

    def test_nothing_that_fits_is_refused(self) -> None:
        with pytest.raises(NoPlanError, match=r"one sample is too much: .* too much"):
            largest_microbatch(facts(transformer(), gpus(1, 1)), partial=DATA)


class TestBandwidth:
    WHOLE = facts(MIDDLE, gpus(2, 4), batch=64)

    def step_s(self, rate: float, **settings: object) -> float:
        whole = varied(self.WHOLE, Lever.LINKS_BETWEEN_NODES, rate)
        return min(c.estimate.step_s for c in weighed(whole, **settings) if c.fits)

    @pytest.mark.parametrize("settings", [{"dp_shard": 8}, {"dp_replicate": 8}, {"zero": 1}])
    def test_at_the_answer_nothing_waits_and_just_below_it_does(
        self, settings: dict[str, object]
    ) -> None:
        found = bandwidth_needed(
            self.WHOLE, Lever.LINKS_BETWEEN_NODES, partial=DATA.fixing(**settings)
        )
        free = self.step_s(1e18, **settings)
        assert self.step_s(found.value, **settings) <= 1.05 * free
        assert self.step_s(found.value / 1.02, **settings) > 1.05 * free
        assert found.low < found.value < found.high

    def test_machines_of_twice_the_speed_in_all_else_need_twice_the_link(self) -> None:
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

    def test_replicas_over_one_node_need_no_network(self) -> None:
        with pytest.raises(InputError, match="there is one node"):
            bandwidth_needed(facts(MIDDLE, gpus(1, 4)), Lever.LINKS_BETWEEN_NODES)

    def test_the_answer_says_whether_the_link_is_enough(self) -> None:
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

    def test_by_hand(self) -> None:
        """64 M tokens are 1,000 steps: 2,000 s, 16,000 device-seconds."""
        found = budget(
            self.PLAN,
            self.ESTIMATE,
            tokens=64e6,
            tokens_per_sample=1000,
            watts_per_device=given(500),
            price_per_device_hour=given(3.6),
        )
        assert found.steps == 1000
        assert (found.seconds.low, found.seconds.value, found.seconds.high) == (1500, 2000, 3000)
        assert found.device_hours.value == pytest.approx(16_000 / 3600)
        assert found.energy_j is not None
        assert found.energy_j.value == pytest.approx(500 * 16_000)
        assert found.money is not None
        assert (found.money.low, found.money.high) == pytest.approx((12.0, 24.0))
        assert found.notes == (
            "energy: at 500 W a device (you)",
            "money: at 3.6 a device-hour (you)",
        )

    def test_the_last_step_is_a_whole_one(self) -> None:
        assert budget(self.PLAN, self.ESTIMATE, samples=65).steps == 2

    def test_what_is_not_known_is_said_and_not_invented(self) -> None:
        found = budget(self.PLAN, self.ESTIMATE, samples=64)
        assert (found.energy_j, found.money) == (None, None)
        assert found.notes == (
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
        """The money of every number of devices that is in time."""
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

    def test_the_cheapest_is_what_trying_every_number_finds(self) -> None:
        deadline_s = 1000 * 1.2
        prices = {"H100-like": given(3.0), "half": given(1.2)}
        found = cheapest_device(
            self.WHOLE,
            [self.FAST, self.SLOW],
            deadline_s=deadline_s,
            samples=self.SAMPLES,
            prices=prices,
            partial=DATA,
        )
        for offer, cluster in zip(
            sorted(found.offers, key=lambda o: o.device), (self.FAST, self.SLOW), strict=True
        ):
            every = list(self.by_hand(cluster, deadline_s, prices[offer.device].value))
            assert offer.budget is not None
            assert offer.budget.money is not None
            # Not every number is tried, and several cost nearly the same.
            least = min(every)
            assert (1 - 1e-12) * least <= offer.budget.money.value <= 1.005 * least
        assert found.best == found.offers[0].device

    def test_without_prices_device_hours_are_given_and_no_winner(self) -> None:
        found = cheapest_device(
            self.WHOLE,
            [self.FAST, self.SLOW],
            deadline_s=1e5,
            samples=self.SAMPLES,
            partial=DATA,
        )
        assert found.best is None
        assert found.because == (
            "no price of H100-like or half is known: they cannot be compared in money"
        )
        assert all(offer.budget and offer.budget.money is None for offer in found.offers)

    def test_a_deadline_that_nobody_keeps_says_how_long_it_takes(self) -> None:
        found = cheapest_device(
            self.WHOLE, [self.FAST], deadline_s=1.0, samples=self.SAMPLES, partial=DATA
        )
        assert (found.best, found.because) == (None, "none is in time")
        assert found.offers[0].because.startswith("8 devices: takes ")

    def test_a_deadline_of_nothing_is_refused(self) -> None:
        with pytest.raises(InputError, match="`deadline_s` = 0: more than 0 is wanted"):
            cheapest_device(self.WHOLE, [self.FAST], deadline_s=0, samples=1)


def test_machines_come_in_devices_of_a_node_and_then_whole_nodes() -> None:
    assert list(counts(gpus(2, 4), 16)) == [1, 2, 3, 4, 8, 12, 16]
    assert list(counts(gpus(1, 4), 16)) == [1, 2, 3, 4]
    assert resized(gpus(2, 4), 12).num_nodes == 3
    assert resized(gpus(2, 4), 3).inter is None
    with pytest.raises(InputError, match="6 devices are no whole nodes of 4"):
        resized(gpus(2, 4), 6)
    with pytest.raises(InputError, match="nothing is known of a network"):
        resized(gpus(1, 4), 8)
