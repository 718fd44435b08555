"""Loading: a plan that fits the devices is of no use where the nodes cannot load the model."""

from __future__ import annotations

import pytest

from advisor.decide.choose import choose
from advisor.decide.decision import Decision
from advisor.inputs.facts import Facts
from advisor.report.html import page
from advisor.report.view import view_of
from advisor.search.ranking import Loadable, loading
from engines.plan import PartialPlan
from profiles.units import GIB
from tests.factories import exact, facts, gpus, small_llama, transformer

SEVENTY = transformer(name="70b", layers=80, hidden=8192, ffn=28672, vocab=128256)


def of(nodes_memory_gib: float | None, whole: Facts) -> Facts:
    memory = None if nodes_memory_gib is None else exact(nodes_memory_gib * GIB)
    cluster = whole.cluster.model_copy(update={"host_memory_bytes": memory})
    return whole.model_copy(update={"cluster": cluster})


@pytest.fixture(scope="module")
def sharded() -> Facts:
    return facts(SEVENTY, gpus(8, 8), batch=64)


@pytest.mark.parametrize(
    ("memory_gib", "verdict"),
    [(None, "it fits"), (64_000, "it fits"), (2048, "cannot be loaded")],
)
def test_title_and_verdict_say_where_a_plan_cannot_be_loaded(
    sharded: Facts, memory_gib: float | None, verdict: str
) -> None:
    """69 B parameters in fp32 are 257 GiB; eight ranks of a node build eight of them, 2,057 GiB, of
    two thirds of 2,048."""
    decision: Decision = choose(of(memory_gib, sharded))
    view = view_of(decision)
    assert view.verdict == verdict
    cannot = verdict != "it fits"
    assert view.title.endswith(", too large to load") == cannot
    assert any(hint.startswith("loading does not fit: 8 ranks") for hint in view.hints) == cannot
    text = page(decision)
    assert ('class="doubt"' in text) == cannot
    first = str(decision).splitlines()[0]
    assert ("it fits" in first) != cannot


def test_stages_are_loaded_one_by_one_where_one_of_them_has_room() -> None:
    whole = facts(small_llama(), gpus(1, 4), batch=8)
    decision = choose(whole, partial=PartialPlan(pp=4))
    needed = decision.estimate.load_bytes * 4
    usable = 2 / 3  # a third of main memory is left
    verdicts = {
        share: loading(
            decision.plan,
            decision.estimate,
            of(share * needed / usable / GIB, whole),
            decision.policy,
        )
        for share in (1.01, 0.5, 0.26, 0.24)
    }
    assert list(verdicts.values()) == [
        Loadable.WHOLE,
        Loadable.BY_STAGE,
        Loadable.BY_STAGE,
        Loadable.TOO_LARGE,
    ]
