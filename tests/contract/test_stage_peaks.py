"""The most that each rank of a pipeline holds in a step, with its estimate."""

from __future__ import annotations

from functools import cache

import pytest

from advisor.cost.model import CostModel
from engines.apply import apply_plan
from engines.plan import Plan
from profiles.capture.capture import capture
from profiles.model.profile import ModelProfile
from tests.contract.fake_world import fake_rank
from tests.contract.hybrids import ROWS, STAGES
from tests.contract.subjects import Decoder, batch_of
from tests.contract.watch import LiveBytes, facts_of, local, optimizer_states
from tests.engines.cases import cpu_ranks, token_loss
from tests.nightly import nightly
from tests.workers import Pool

TOKENS = 256  # so many that most bytes are activations and messages
LOWEST, HIGHEST = 0.95, 1.09
OFTEN = (
    ("pp=4 schedule=1f1b microbatches=16", 1),
    ("pp=4 schedule=1f1b microbatches=16", 3),
    ("pp=4 schedule=gpipe microbatches=8", 2),
    ("pp=2 schedule=interleaved microbatches=16", 1),
    ("pp=2 schedule=zbv microbatches=16", 1),
    ("pp=4 schedule=zero_bubble microbatches=16", 2),
)
SELDOM = (
    *(("pp=4 schedule=1f1b microbatches=16", rank) for rank in (0, 2)),
    *(("pp=4 schedule=1f1b microbatches=16 recompute=full", rank) for rank in range(4)),
    *(("pp=2 schedule=1f1b microbatches=8 recompute=full recompute_blocks=1", n) for n in (0, 1)),
    *(("pp=4 schedule=gpipe microbatches=8", rank) for rank in (0, 1, 3)),
    *(("pp=4 schedule=naive microbatches=8", rank) for rank in range(4)),
    ("pp=2 schedule=interleaved microbatches=16", 0),
    ("pp=2 schedule=zbv microbatches=16", 0),
    *(("pp=4 schedule=zero_bubble microbatches=16", rank) for rank in (0, 1, 3)),
)


@cache
def _profile() -> ModelProfile:
    return capture(Decoder(), batch_of(ROWS, tokens=TOKENS), loss_fn=token_loss)


def _plan(text: str) -> Plan:
    plan = Plan.parse(f"{text} microbatch_size={ROWS}")
    several = "interleaved" in text or "zbv" in text
    return plan.model_copy(update={"stages": STAGES[plan.pp * (1 + several)]})


def _measured(plan: Plan, rank: int) -> int:
    with fake_rank(rank, plan.world_size):
        return _peak_bytes(plan, _profile())


def _peak_bytes(plan: Plan, profile: ModelProfile) -> int:
    """Bytes of the third step: the first one makes states, and buffers of torch's stages."""
    parallel = apply_plan(
        Decoder(),
        plan,
        profile=profile,
        cluster=cpu_ranks(plan.world_size),
        loss_fn=token_loss,
        sample=batch_of(ROWS, tokens=TOKENS),
    )
    batch = batch_of(ROWS * plan.forwards, tokens=TOKENS)
    parallel.train_step(batch)
    parallel.train_step(batch)
    parameters = map(local, parallel.parameters())
    watched = LiveBytes([*parameters, *parallel.buffers(), *optimizer_states(parallel), *batch])
    with watched:
        parallel.train_step(batch)
    return watched.peak_bytes


@pytest.mark.parametrize(("text", "rank"), [*OFTEN, *nightly(*SELDOM)])
def test_the_peak_of_a_stage_is_near_its_estimate(text: str, rank: int) -> None:
    plan = _plan(text)
    cost = CostModel(facts_of(plan, _profile())).estimate(plan)
    predicted = next(stage for stage in cost.stages if stage.rank == rank).peak_bytes
    measured = _measured(plan, rank)
    assert LOWEST <= (predicted - cost.memory.context) / measured <= HIGHEST


def test_what_a_stage_receives_lasts_until_its_backward() -> None:
    """torch's stages have buffers for every microbatch of a round, and the last one's losses hold
    what it received: rank 3 took twice as much for four times the microbatches."""
    for rank in (2, 3):
        few, many = (
            _measured(_plan(f"pp=4 schedule=1f1b microbatches={n}"), rank)
            - sum(tensor.nbytes for tensor in batch_of(ROWS * n, tokens=TOKENS))
            for n in (4, 16)
        )
        assert many == pytest.approx(few, rel=1e-3)


@pytest.mark.dist
@pytest.mark.parametrize("schedule", ["interleaved", *nightly("zbv", "zero_bubble")])
def test_what_a_rank_has_sent_is_freed_when_the_receiver_has_it(pool: Pool, schedule: str) -> None:
    """gloo holds a message until somebody waits for it, which torch's schedules of several stages
    do when the step is over. Between ranks that are made up nothing is held."""
    plan = _plan(f"pp=2 schedule={schedule} microbatches=16")
    peaks = pool.run(_peak_bytes, plan, _profile(), world_size=2)
    for rank, peak in enumerate(peaks):
        assert peak == pytest.approx(_measured(plan, rank), rel=0.02)
