"""The collectives that a step is charged for are the collectives that the engines call."""

from __future__ import annotations

from collections import Counter
from math import ceil, prod

import pytest
from torch import Tensor, nn

from engines.apply import apply_plan
from engines.plan import DataParallel, Plan
from profiles.capture.capture import capture
from profiles.machine.cluster import Collective
from profiles.model.profile import GLUE, ModelProfile, Numerics, UnitProfile
from tests.contract.watch import Calls, Collectives, prediction
from tests.engines.cases import CASES, cpu_ranks
from tests.workers import Pool

pytestmark = pytest.mark.dist

ROWS = 2  # of a microbatch
CUTS = ("", " accumulation=2", " recompute=full")
TWO = ("dp_replicate=2", "dp_replicate=2 zero=1", "dp_replicate=2 zero=2", "dp_shard=2")
HYBRID = "dp_replicate=2 dp_shard=2"
BOTH = " accumulation=2 recompute=full"
MIXED = " accumulation=2 precision=bf16"
PLANS = {
    # The vocabulary of 61 divides neither by 2 nor by 4: shards are padded.
    ("gpt", 2): (*(k + cut for k in TWO for cut in CUTS), *(k + MIXED for k in TWO[1:])),
    ("gpt", 4): (
        *(HYBRID + cut for cut in CUTS),
        HYBRID + MIXED,
        "dp_shard=4",
        "dp_shard=4 recompute=full recompute_blocks=1",
    ),
    ("tied-frozen-unused", 2): tuple(kind + BOTH for kind in TWO),
    ("tied-frozen-unused", 4): (HYBRID + MIXED,),
}
EACH = [(name, plan) for (name, _), plans in PLANS.items() for plan in plans]


def _plan(text: str) -> Plan:
    return Plan.parse(f"{text} microbatch_size={ROWS}")


def _profile(name: str) -> ModelProfile:
    case = CASES[name]
    batch, kinds = case.batch(ROWS), tuple(Numerics)
    return capture(case.build(), batch, loss_fn=case.loss_fn, numerics=kinds, name=name)


def _called(
    name: str, plans: tuple[str, ...], profile: ModelProfile, norm: float | None
) -> list[Calls]:
    """For each plan the collectives of one step, after DDP has settled on its buckets."""
    results = []
    for text in plans:
        case, plan = CASES[name], _plan(text)
        parallel = apply_plan(
            case.build(),
            plan,
            profile=profile,
            cluster=cpu_ranks(plan.world_size),
            loss_fn=case.loss_fn,
            max_grad_norm=norm,
        )
        batch = case.batch(ROWS * plan.forwards)
        parallel.train_step(batch)
        parallel.train_step(batch)
        with Collectives() as watched:
            parallel.train_step(batch)
        results.append(watched.calls)
    return results


@pytest.fixture(scope="module")
def profiles() -> dict[str, ModelProfile]:
    return {name: _profile(name) for name, _ in PLANS}


@pytest.fixture(scope="module")
def called(pool: Pool, profiles: dict[str, ModelProfile]) -> dict[tuple[str, str], list[Calls]]:
    """The collectives of every rank, by model and plan."""
    results = {}
    for (name, ranks), plans in PLANS.items():
        calls_of_ranks = pool.run(
            _called, name, plans, profiles[name], None, world_size=ranks, timeout_s=120
        )
        results |= {
            (name, plan): list(of)
            for plan, of in zip(plans, zip(*calls_of_ranks, strict=True), strict=True)
        }
    return results


@pytest.mark.parametrize(("name", "text"), EACH)
def test_predicted_collectives_equal_those_called(
    name: str,
    text: str,
    called: dict[tuple[str, str], list[Calls]],
    profiles: dict[str, ModelProfile],
) -> None:
    for calls in called[name, text]:
        assert calls == _charged(name, _plan(text), profiles[name])


def test_clipping_adds_one_small_reduction_where_gradients_are_sharded(
    pool: Pool, profiles: dict[str, ModelProfile], called: dict[tuple[str, str], list[Calls]]
) -> None:
    """It is no part of a plan, so nothing is charged: one number, the square of a rank's norm."""
    plans = ("dp_replicate=2", "dp_shard=2")
    replicated, sharded = pool.run(_called, "gpt", plans, profiles["gpt"], 1.0, world_size=2)[0]
    assert replicated == called["gpt", "dp_replicate=2"][0]
    norms = Counter({(Collective.ALL_REDUCE, 4): 1})
    assert sharded == called["gpt", "dp_shard=2"][0] + norms


def _charged(name: str, plan: Plan, profile: ModelProfile) -> Calls:
    """Estimated traffic, for a model whose shards are padded as FSDP2 pads them."""
    model = CASES[name].build()
    trainable = [p for p in model.parameters() if p.requires_grad]
    calls: Calls = Counter()
    for item in prediction(plan, _padded(profile, model, plan)).traffic:
        payload = item.payload_bytes
        if item.purpose == "unused parameters":  # charged as one number, it is one for each tensor
            payload *= len(trainable)
        calls[item.kind, round(payload)] += item.count
    return calls


def _padded(profile: ModelProfile, model: nn.Module, plan: Plan) -> ModelProfile:
    """FSDP2 divides first dimensions, rounded up; unused parameters are reduced as zeros."""
    if not plan.data_parallel.is_sharded:
        return profile
    is_zero = plan.data_parallel in (DataParallel.ZERO1, DataParallel.ZERO2)
    degree = plan.dp_replicate if is_zero else plan.dp_shard
    owners: dict[str, list[Tensor]] = {unit.name: [] for unit in profile.units}
    for path, parameter in model.named_parameters():
        parts = path.split(".")
        names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
        owner = next((name for name in names if name in owners), GLUE)
        owners[owner].append(parameter)

    def size(parameter: Tensor, multiple: int) -> int:
        first, *rest = parameter.shape
        return ceil(first / multiple) * multiple * prod(rest) * parameter.element_size()

    def padded(unit: UnitProfile) -> UnitProfile:
        own = owners[unit.name]
        assert unit.parameter_bytes == sum(size(p, 1) for p in own)
        update = {
            "parameter_bytes": sum(size(p, degree) for p in own),
            "gradient_bytes": sum(size(p, degree) for p in own if p.requires_grad),
        }
        return unit.model_copy(update=update)

    return profile.model_copy(update={"units": tuple(map(padded, profile.units))})
