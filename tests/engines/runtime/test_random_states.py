"""The recorded state of numpy's generator is its state, however it came about."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from engines.runtime.random_states import random_states, restore_random_states


@pytest.fixture(autouse=True)
def own_generator() -> Iterator[None]:
    state = np.random.get_state()
    yield
    np.random.set_state(state)


def _is_recorded() -> bool:
    recorded, own = random_states()["numpy"], np.random.get_state(legacy=False)
    np.random.set_state(recorded)
    return str(np.random.get_state(legacy=False)) == str(own)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: None,
        np.random.rand,
        np.random.randn,  # in pairs: every second one changes none of the numbers
        lambda: np.random.randn(2),
        lambda: np.random.seed(3),
    ],
    ids=["nothing", "uniform", "normal", "pair", "seed"],
)
def test_a_state_is_recorded_after_any_draw(draw: Callable[[], object]) -> None:
    for _ in range(4):
        draw()
        assert _is_recorded()


def test_draws_after_a_restore_are_those_after_the_record() -> None:
    np.random.seed(1)
    np.random.randn()
    states = random_states()
    drawn = np.random.randn(5)
    restore_random_states(states)
    assert random_states()["numpy"][3] == 1
    assert (np.random.randn(5) == drawn).all()


def test_half_of_a_pair_that_waits_is_recorded_after_a_restore() -> None:
    """To draw it changes none of the generator's numbers."""
    np.random.seed(1)
    np.random.randn()
    states = random_states()
    np.random.randn()
    assert random_states()["numpy"][3] == 0
    restore_random_states(states)
    assert random_states()["numpy"][3] == 1
