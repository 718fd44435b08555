"""Messages beside the passes of replicas, and how much of them a step still waits for."""

from __future__ import annotations

import pytest

from advisor.cost import estimate
from advisor.inputs.facts import Facts
from engines.plan import Plan
from profiles.machine.cluster import Overlap
from tests.factories import chain, cpus, exact, facts

REPLICAS = "dp_replicate=2 microbatch_size=1"


def known(slower: float | None) -> Facts:
    """Two CPU ranks whose computing and messages take so many times as long at once."""
    cluster = cpus(2)
    if slower is not None:
        overlap = Overlap(computing=exact(slower), communication=exact(slower))
        cluster = cluster.model_copy(update={"overlap": overlap})
    return facts(chain(), cluster, batch=2, precision="fp32")


def test_counts_and_losses_of_replicas_are_not_waited_for() -> None:
    """They are sent beside the passes; those of sharded plans are not."""
    cost = estimate(Plan.parse(REPLICAS), known(None))
    sent = {each.purpose: each.seconds for each in cost.traffic if each.purpose != "gradients"}
    assert sent.keys() == {"sample count", "loss"}
    gradients = sum(each.seconds for each in cost.traffic if each.purpose == "gradients")
    assert cost.time.exposed_s == pytest.approx(gradients)
    sharded = estimate(Plan.parse("dp_shard=2 microbatch_size=1"), known(None))
    assert sharded.time.exposed_s == pytest.approx(sum(each.seconds for each in sharded.traffic))


def test_what_a_processor_hides_is_what_its_bench_says() -> None:
    """16 MB go in DDP's first bucket of 1 MiB and one of the rest, which is full at the end: the
    first one hides behind the backward, at twice its time where both take twice as long."""
    whole, free, halved = (
        estimate(Plan.parse(REPLICAS), known(slower)).time.exposed_s for slower in (None, 1.0, 2.0)
    )
    first, last = (
        each.seconds
        for each in estimate(Plan.parse(REPLICAS), known(None)).traffic
        if each.purpose == "gradients"
    )
    assert whole == pytest.approx(first + last)
    assert last <= free < last + first / 2  # its units' shares are sent one by one
    # A second of overlap lasts two, in which the other one does one second's work: one is lost.
    assert halved == pytest.approx(whole)
