"""Traffic and memory of context-parallel ranks in a fake world, beside their estimates."""

from __future__ import annotations

from functools import cache

import pytest

from advisor.cost.model import CostModel
from engines.apply import apply_plan
from engines.plan import Plan
from profiles.capture.capture import capture
from profiles.machine.cluster import Collective
from profiles.model.profile import ModelProfile
from tests.contract.fake_world import fake_rank
from tests.contract.hybrids import _states, charged
from tests.contract.subjects import Decoder, batch_of
from tests.contract.watch import Messages, facts_of
from tests.engines.cases import cpu_ranks, token_loss

TOKENS = 64
PASSING = ("keys and values", "gradients of keys and values")


@cache
def _profile() -> ModelProfile:
    return capture(Decoder(), batch_of(2, tokens=TOKENS), loss_fn=token_loss)


@pytest.mark.parametrize(
    "text",
    [
        "dp_replicate=64 cp=8",
        "dp_replicate=4 dp_shard=2 cp=4 recompute=full",
        "dp_replicate=2 cp=4 zero=1 accumulation=2",
    ],
)
def test_predicted_messages_and_states_of_context_parallelism_equal_those_measured(
    text: str,
) -> None:
    plan = Plan.parse(f"{text} microbatch_size=2")
    sample = batch_of(2, tokens=TOKENS)
    profile = _profile()
    states = []
    with fake_rank(0, plan.world_size):
        parallel = apply_plan(
            Decoder(),
            plan,
            profile=profile,
            cluster=cpu_ranks(plan.world_size),
            loss_fn=token_loss,
            sample=sample,
        )
        batch = batch_of(2 * plan.forwards, tokens=TOKENS)
        parallel.train_step(batch)
        parallel.train_step(batch)  # DDP has settled on its buckets
        hook = parallel.optimizer.register_step_pre_hook(
            lambda *_: states.append(_states(parallel))
        )
        with Messages() as messages:
            parallel.train_step(batch)
        hook.remove()
    model = CostModel(facts_of(plan, profile))
    estimate = model.estimate(plan)
    assert states == [estimate.states_bytes]
    passed = {k: n for k, n in messages.sent.items() if k[0] is Collective.SEND_RECV}
    bytes_passed = sum(payload * count for (_, payload, _, _), count in passed.items())
    ring = [item for item in estimate.traffic if item.purpose in PASSING]
    assert {item.group_size for item in ring} == {plan.cp}
    assert bytes_passed == sum(item.bus_bytes for item in ring)
    others = {k: n for k, n in messages.sent.items() if k[0] is not Collective.SEND_RECV}
    of_ring = {(i.kind, round(i.payload_bytes), i.group_size, i.stride) for i in ring}
    wanted = {k: n for k, n in charged(model, plan, 0).items() if k not in of_ring}

    def totals(sent: dict[tuple[Collective, int, int, int], int]) -> dict[object, int]:
        """Bytes by kind and group; buckets are not looked at one by one."""
        results: dict[object, int] = {}
        for (kind, payload, size, stride), count in sent.items():
            results[kind, size, stride] = results.get((kind, size, stride), 0) + payload * count
        return results

    assert totals(others) == totals(wanted)
