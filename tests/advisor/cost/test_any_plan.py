"""Every legal plan of every model has an estimate: nothing raises, all numbers are finite."""

from __future__ import annotations

import math
from functools import cache

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from advisor.cost import estimate
from advisor.inputs.networks import network_profile
from advisor.search.legal import segment_starts
from advisor.search.space import divisors, stages_per_rank
from engines.legality import problems
from engines.plan import Aggregation, Compression, DataParallel, Offload, Plan, Recompute, Schedule
from engines.tensor.rules import proposed_styles
from profiles.closed_forms.families import profile_from_config
from profiles.machine.cluster import ClusterProfile
from profiles.machine.clusters import cluster_from_name
from profiles.model.profile import ModelProfile, Numerics
from tests.factories import facts
from tests.profiles.closed_forms import family_configs

CONFIGS = {
    "gpt2": family_configs.GPT2,
    "bert": family_configs.BERT,
    "t5": family_configs.T5,
    "mixtral": family_configs.MIXTRAL,
    "llama": {**family_configs.GROUPED, "model_type": "llama"},
}
MODELS = (*CONFIGS, "resnet18-32px")
CLUSTERS = ("2xL4-24GB", "6xA100-SXM-80GB", "8xH100-SXM-80GB", "2x8xH100-SXM-80GB", "72xGB200")
KINDS = (
    DataParallel.REPLICATE, DataParallel.ZERO1, DataParallel.ZERO2, DataParallel.FULL_SHARD,
    DataParallel.HYBRID_SHARD,
)  # fmt: skip


@cache
def profile(name: str) -> ModelProfile:
    if name not in CONFIGS:
        return network_profile(name, samples=2)
    numerics = (Numerics.AS_BUILT, Numerics.BF16, Numerics.BF16_AUTOCAST)
    return profile_from_config(
        CONFIGS[name], samples=2, sequence_length=24, name=name, numerics=numerics
    )


@cache
def cluster(name: str) -> ClusterProfile:
    return cluster_from_name(name)


@st.composite
def plans(draw: st.DrawFn, name: str, cluster_name: str) -> Plan:
    """Draw degrees that use all devices, and other settings at random."""
    model, machines = profile(name), cluster(cluster_name)
    left = machines.world_size
    degrees = {"pp": 1, "tp": 1, "cp": 1}
    shared = ["cp"] if model.tokens_per_sample and draw(st.booleans()) else ["pp"]
    for axis in (*shared, "tp"):
        degrees[axis] = draw(st.sampled_from([n for n in divisors(left) if n <= 8]))
        left //= degrees[axis]
    update: dict[str, object] = {**degrees, **_data_parallel(draw, left)}
    update |= {
        "microbatch_size": draw(st.integers(1, 3)),
        "microbatches": draw(st.integers(1, 3)) * degrees["pp"],
        "accumulation": draw(st.integers(1, 3)),
        "recompute": draw(st.sampled_from(list(Recompute))),
        "recompute_blocks": draw(st.one_of(st.none(), st.integers(1, 2))),
        "precision": draw(st.sampled_from(["fp32", "bf16"] if name in CONFIGS else ["fp32"])),
    }
    if update.get("data_parallel") is DataParallel.REPLICATE and draw(st.booleans()):
        update["aggregation"] = draw(st.sampled_from(list(Aggregation)))
        update["compression"] = draw(st.sampled_from(list(Compression)))
    elif degrees["pp"] == 1 and draw(st.booleans()):
        update["offload"] = draw(st.sampled_from(list(Offload)))
    elif name == "mixtral" and left > 1 and set(degrees.values()) == {1}:
        update["ep"] = draw(st.sampled_from([2, 4]))
    pp, tp = degrees["pp"], degrees["tp"]
    if tp > 1:
        update["tensor_styles"] = proposed_styles(model, tp)
    if pp > 1:
        schedule = draw(st.sampled_from(list(Schedule)))
        places = segment_starts(model, machines)[1:]
        counts = [n * pp - 1 for n in stages_per_rank(schedule, pp, len(places) + 1)]
        counts = [n for n in counts if n <= len(places)]
        assume(counts)
        count = draw(st.sampled_from(counts))
        chosen = draw(st.sets(st.sampled_from(places), min_size=count, max_size=count))
        update["schedule"] = schedule
        update["stages"] = tuple(place for place in places if place in chosen)
    return Plan(**update)  # type: ignore[arg-type]


def _data_parallel(draw: st.DrawFn, ranks: int) -> dict[str, object]:
    if ranks == 1:
        return {}
    kind = draw(st.sampled_from(KINDS))
    replicate = ranks
    if kind is DataParallel.FULL_SHARD:
        replicate = 1
    elif kind is DataParallel.HYBRID_SHARD:
        inner = divisors(ranks)[1:-1]
        assume(inner)
        replicate = draw(st.sampled_from(inner))
    shard = ranks // replicate
    return {"data_parallel": kind, "dp_replicate": replicate, "dp_shard": shard}


@settings(
    max_examples=300,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(data=st.data(), name=st.sampled_from(MODELS), machines=st.sampled_from(CLUSTERS))
def test_every_legal_plan_has_an_estimate(data: st.DataObject, name: str, machines: str) -> None:
    model, devices = profile(name), cluster(machines)
    plan = data.draw(plans(name, machines))
    assume(not problems(plan, model, devices))
    batch = plan.global_batch_size
    assert batch is not None
    cost = estimate(plan, facts(model, devices, batch=batch, precision=plan.precision.value))
    for number in (cost.step_s, cost.peak_bytes, cost.peak_high_bytes):
        assert math.isfinite(number)
        assert number > 0
    assert cost.peak_bytes <= cost.peak_high_bytes
