"""After an anchor at one plan the error of four others is at most half: two ranks, by the clock.

All plans are trained in turns, a step of each at a time, in several rounds; other work on the
machine then falls on all of them alike. In between, links are timed.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from math import log

import pytest
import torch

from advisor.auto.check import links, products_share
from advisor.auto.parallelize import auto_parallelize
from advisor.cost import estimate
from advisor.decide.decision import Decision
from advisor.inputs.bundled.gpt import GPT, GPTConfig, loss
from advisor.inputs.facts import Facts
from advisor.learning.anchor import anchored
from advisor.learning.residuals import StepMeasurement, anchor_of
from engines.parallel import ParallelModel
from engines.plan import Plan
from engines.runtime.steps import WARM_UP_STEPS
from profiles.machine.cluster import ClusterProfile
from profiles.machine.probe import probe
from profiles.provenance import Timing
from profiles.timing.runs import machine_of
from tests.workers import Pool

SHAPE = GPTConfig(vocab_size=512, context=64, num_layers=4, num_heads=4, width=256)
BATCH, LENGTH, RANKS = 16, 64, 2
STEPS, ROUNDS = 8, 3
ANCHOR = "dp_replicate=2"
OTHERS = (
    "dp_shard=2",
    "dp_replicate=2 zero=1 microbatch_size=4",
    "tp=2",
    "dp_replicate=2 recompute=full microbatch_size=2",
)


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.arange(rows * LENGTH).view(rows, LENGTH) % SHAPE.vocab_size
    return ids, ids


def machines() -> dict[str, ClusterProfile]:
    return {"as assumed": probe(), "as timed": probe(measure=True)}


@dataclass(frozen=True)
class Seconds:
    """Medians of some steps of one plan."""

    step: float
    alone: float
    update: float


def trained(
    cluster: ClusterProfile,
) -> tuple[dict[str, Seconds], float, dict[str, Plan], Facts]:
    """Train a step of every plan in turn, and time the products of the anchor's plan."""
    known = {
        text: auto_parallelize(
            GPT(SHAPE),
            sample=batch(BATCH // RANKS),
            loss_fn=loss,
            plan=text,
            cluster=cluster,
            global_batch_size=BATCH,
            learns=False,
        )
        for text in (ANCHOR, *OTHERS)
    }
    seconds = _in_turns(known)
    products = products_share(known[ANCHOR], batch(BATCH // RANKS), torch.device("cpu"))
    assert products is not None
    plans = {text: parallel.plan for text, parallel in known.items()}
    decision = known[ANCHOR].decision
    assert isinstance(decision, Decision)
    return seconds, products, plans, decision.facts


def _in_turns(known: dict[str, ParallelModel]) -> dict[str, Seconds]:
    for _ in range(WARM_UP_STEPS + STEPS):
        for parallel in known.values():
            parallel.train_step(batch(BATCH // parallel.data_world_size))
    medians = {}
    for text, parallel in known.items():
        notes = parallel.steps
        step, alone, update = notes.timing(), notes.busy_timing(), notes.update_timing()
        assert step is not None
        assert alone is not None
        assert update is not None
        medians[text] = Seconds(step.median_s, alone.median_s, update.median_s)
    return medians


def timing(seconds: list[float]) -> Timing:
    return Timing(
        median_s=statistics.median(seconds),
        low_s=min(seconds),
        high_s=max(seconds),
        repeats=len(seconds),
    )


@dataclass(frozen=True)
class Steps:
    """Predicted and measured step times.

    Attributes:
        facts: with the constants of a processor as they are assumed, and as they were timed.
    """

    facts: dict[str, Facts]
    plans: dict[str, Plan]
    steps: dict[str, Timing]
    measured: StepMeasurement


@pytest.fixture(scope="module")
def steps(pool: Pool) -> Steps:
    clusters = pool.run(machines, world_size=RANKS)[0]
    rounds, products = [], []
    timed = None
    for _ in range(ROUNDS):
        results = pool.run(trained, clusters["as timed"], world_size=RANKS, timeout_s=300)[0]
        seconds, product_s, plans, facts = results
        rounds.append(seconds)
        products.append(product_s)
        if timed is None:  # between the rounds
            timed = pool.run(links, plans[ANCHOR], facts, world_size=RANKS)[0]
    taken = {text: timing([each[text].step for each in rounds]) for text in plans}
    return Steps(
        facts={
            name: facts.model_copy(update={"cluster": cluster})
            for name, cluster in clusters.items()
        },
        plans=plans,
        steps=taken,
        measured=StepMeasurement(
            step=taken[ANCHOR],
            alone=timing([each[ANCHOR].alone for each in rounds]),
            update=timing([each[ANCHOR].update for each in rounds]),
            products_share=statistics.median(products),
            links=timed,
        ),
    )


@pytest.mark.timed
@pytest.mark.parametrize("constants", ["as assumed", "as timed"])
def test_after_a_step_of_one_plan_the_error_of_four_others_is_at_most_half(
    constants: str, steps: Steps
) -> None:
    known, plan = steps.facts[constants], steps.plans[ANCHOR]
    anchor = anchor_of(plan, known, steps.measured, machine_of(known.cluster))

    def errors(facts: Facts) -> dict[str, float]:
        return {
            text: log(steps.steps[text].median_s / estimate(steps.plans[text], facts).step_s)
            for text in OTHERS
        }

    before, after = errors(known), errors(anchored(known, anchor))
    middle = [statistics.median(map(abs, each.values())) for each in (before, after)]
    ratios = {str(term): residual.ratio for term, residual in anchor.terms.items()}
    assert middle[1] <= middle[0] / 2, f"{before}\n{after}\n{ratios}\n{anchor}"
