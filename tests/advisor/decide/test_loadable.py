"""Loading: a plan that fits the devices is of no use where the nodes cannot load the model."""

from __future__ import annotations

import pytest

from advisor.decide.choose import choose
from advisor.decide.decision import Decision
from advisor.inputs.facts import Facts
from advisor.report.html import page
from advisor.report.view import view_of
from advisor.search.ranking import Loadable, deferred_bytes_per_node, loading
from engines.plan import PartialPlan
from profiles.units import GIB
from tests.factories import cpus, exact, facts, gpus, small_llama, transformer

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
    [
        (None, "it fits"),
        (64_000, "it fits"),
        (2048, "fits, built deferred"),
        (32, "cannot be loaded"),
    ],
)
def test_title_and_verdict_say_where_a_plan_cannot_be_loaded(
    sharded: Facts, memory_gib: float | None, verdict: str
) -> None:
    """69 B parameters in fp32 are 257 GiB; eight ranks of a node build eight of them, 2,057 GiB, of
    two thirds of 2,048. Built deferred, each has the largest tensor in main memory."""
    decision: Decision = choose(of(memory_gib, sharded))
    view = view_of(decision)
    assert view.verdict == verdict
    cannot = verdict == "cannot be loaded"
    assert view.title.endswith(", too large to load") == cannot
    assert any("does not fit, built deferred too" in hint for hint in view.hints) == cannot
    needs_it = verdict == "fits, built deferred"
    assert any("with advisor.deferred():" in hint for hint in view.hints) == needs_it
    text = page(decision)
    assert ('class="doubt"' in text) == (verdict != "it fits")
    first = str(decision).splitlines()[0]
    assert ("it fits" in first) == (verdict == "it fits")


def test_ranks_of_cpus_make_their_shards_in_main_memory() -> None:
    """Of 4 stages a rank has a quarter, and for a moment the largest tensor; GPUs hold their own
    shards themselves."""
    model = small_llama()
    largest = max(shape.nbytes for unit in model.units for shape in unit.shapes)
    for devices, of_rank in (
        (cpus(4), model.parameter_bytes / 4 + largest),
        (gpus(1, 4), largest),
    ):
        whole = facts(model, devices, batch=8)
        decision = choose(whole, partial=PartialPlan(pp=4))
        needed = deferred_bytes_per_node(decision.plan, whole)
        assert needed == pytest.approx(4 * (of_rank + model.buffer_bytes))
        usable = 2 / 3  # a third of main memory is left
        verdicts = [
            loading(
                decision.plan, decision.estimate, of(nbytes / usable / GIB, whole), decision.policy
            )
            for nbytes in (1.01 * 4 * decision.estimate.load_bytes, 1.01 * needed, 0.99 * needed)
        ]
        assert verdicts == [Loadable.WHOLE, Loadable.DEFERRED, Loadable.TOO_LARGE]
