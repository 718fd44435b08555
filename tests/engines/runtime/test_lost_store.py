"""Ranks that wait for a word of another one: of one that failed, or that took the store along."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from engines.apply import proofs
from engines.runtime.failures import wait_for_text, why_absent
from profiles import torch_compat
from profiles.errors import RankError
from tests.engines.cases import CASES
from tests.engines.parity import spread
from tests.workers import Pool

PATIENCE_S = 600.0
AT_ONCE_S = 10.0


def lost_store() -> dist.Store:
    """A connection to a store whose process is gone, as under launchers that keep none."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=PATIENCE_S)
    line = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False, timeout=limit)
    del server
    return dist.PrefixStore("default_pg", line)


def took_s(call: Callable[[], object]) -> float:
    begun = time.monotonic()
    call()
    return time.monotonic() - begun


def test_a_wait_for_a_rank_ends_with_the_store() -> None:
    store = lost_store()
    answers: list[str | None] = []
    took = took_s(
        lambda: answers.append(wait_for_text(store, "plan", rank=0, timeout_s=PATIENCE_S))
    )
    assert answers == [None]
    assert took < AT_ONCE_S
    assert "store does not answer" in why_absent(0, store)


def test_a_second_connection_is_not_sought_for_as_long_as_a_job_may_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_compat, "SECOND_LINE", timedelta(seconds=1))
    store = lost_store()

    def connect() -> None:
        with pytest.raises(dist.DistError):
            torch_compat.second_line(store)

    assert took_s(connect) < AT_ONCE_S
    assert store.timeout == timedelta(seconds=PATIENCE_S)  # type: ignore[attr-defined]


def _fails_to_look() -> tuple[str, float]:
    """The first rank looks at the sample alone, and its code raises there."""

    def fails(*args: object, **options: object) -> None:
        raise ValueError("no such sample")

    if dist.get_rank() == 0:
        proofs.seen_on, own = fails, proofs.seen_on  # type: ignore[assignment]
    begun = time.monotonic()
    try:
        spread(CASES["gpt"], "dp_replicate=2")
        said = "nothing"
    except (RankError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
    took = time.monotonic() - begun
    if dist.get_rank() == 0:
        proofs.seen_on = own
    summed = torch.ones(())
    dist.all_reduce(summed)  # the groups are as they were
    assert summed == 2
    return said, took


@pytest.mark.dist
def test_an_error_where_one_rank_looks_alone_is_told_to_the_others(pool: Pool) -> None:
    (first, _), (second, took) = pool.run(_fails_to_look, world_size=2)
    assert first == "ValueError: no such sample"
    assert "rank 0 failed: ValueError: no such sample" in second
    assert took < AT_ONCE_S
