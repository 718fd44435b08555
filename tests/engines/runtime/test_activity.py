"""The late rank is found by the messages that each rank began, group by group."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest

from engines.runtime.activity import Activity, ActivityLog, late_ranks
from engines.runtime.step_bound import StepBound
from engines.runtime.steps import Steps
from engines.runtime.world import DEFAULT_TIMEOUT_S, World
from tests.engines.parity import alone


def rank(messages: Mapping[str, int], *stack: str, has_uneven_groups: bool = False) -> Activity:
    """A rank in its fifth step."""
    return Activity(
        step=5,
        stood_s=61,
        bound_s=60,
        messages=dict(messages),
        stack=stack,
        has_uneven_groups=has_uneven_groups,
    )


def test_the_rank_with_the_fewest_messages_is_late() -> None:
    assert late_ranks({0: rank({"all": 7}), 1: rank({"all": 6}), 2: rank({"all": 7})}) == [1]


def test_a_rank_that_waits_itself_in_another_group_is_not_the_cause() -> None:
    ranks = {  # 0 waits for 1 in the group of rows; 1 waits for 3 in that of columns
        0: rank({"row 0": 9, "column 0": 4}),
        1: rank({"row 0": 8, "column 1": 5}),
        2: rank({"row 2": 8, "column 0": 4}),
        3: rank({"row 2": 8, "column 1": 4}),
    }
    assert late_ranks(ranks) == [3]


def test_ranks_that_are_all_in_the_same_place_are_not_late() -> None:
    assert late_ranks({0: rank({"all": 7}), 1: rank({"all": 7})}) == []


def test_of_stages_the_one_that_is_in_no_wait_is_late() -> None:
    waits = "/lib/torch/distributed/distributed_c10d.py:1 in recv: work.wait()"
    ranks = {
        0: rank({}, "train.py:1 in main", waits, has_uneven_groups=True),
        1: rank({}, "model.py:9 in forward: while True:", has_uneven_groups=True),
    }
    assert late_ranks(ranks) == [1]
    assert late_ranks(ranks | {1: ranks[0]}) == []


def test_the_activity_names_the_step_what_is_exchanged_and_the_place_in_the_code() -> None:
    log, entered, leave = ActivityLog(), threading.Event(), threading.Event()

    def endless_loop() -> None:
        entered.set()
        leave.wait(30)

    def train() -> None:
        with log.in_step(5, bound_s=0.0), log.doing("exchanging gradients"):
            endless_loop()

    thread = threading.Thread(target=train)
    thread.start()
    assert entered.wait(30)
    now = log.now()
    leave.set()
    thread.join()
    assert str(now).startswith("in step 5, exchanging gradients")
    assert now.is_waiting
    assert any("in endless_loop: leave.wait(30)" in line for line in now.stack)
    assert str(log.now()) == "between two steps"


@pytest.mark.parametrize(
    ("measured_s", "predicted_s", "wanted_s"),
    [(0.1, 0.0, 60.0), (0.1, 12.0, 240.0), (10.0, 12.0, 240.0), (20.0, 1.0, 400.0), (99.0, 0, 600)],
)
def test_the_bound_is_twenty_times_the_longest_step_from_one_minute_to_ten(
    measured_s: float, predicted_s: float, wanted_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, parallel = alone("gpt")
    bound, steps = parallel.step_bound, parallel.steps
    bound.predicted_s = predicted_s
    assert bound.next_s() == DEFAULT_TIMEOUT_S  # a first step allocates, connects and compiles
    steps._laps.extend([measured_s] * 3)
    assert bound.next_s() == wanted_s


def test_a_limit_that_the_user_chose_stays_what_it_is() -> None:
    _, parallel = alone("gpt")
    steps: Steps = parallel.steps
    steps._laps.extend([0.1] * 3)
    chosen = World(rank=0, size=2, device=parallel._world.device, timeout_s=1000)
    assert StepBound(steps, chosen, is_compiled=False).next_s() == 1000
