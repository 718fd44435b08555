"""Blocks that only look equal: what is stood in for has to be what running every block shows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import nn

from profiles.capture.capture import capture
from tests.nightly import half
from tests.profiles.capture.odd import modes, states, streams
from tests.profiles.capture.odd.chain import ROWS, WIDTH


def _cases() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    for build in (*streams.MODELS, *states.MODELS, *modes.MODELS):
        yield build.__name__, build
    for context in modes.CONTEXTS:
        yield context.__name__, partial(modes.two_modes, context)
    for kind in (states.Counts, states.Slotted):
        yield f"a_counter_for_all, {kind.__name__}", partial(states.a_counter_for_all, kind)
    for number in (1, 5):
        build_spare = partial(streams.a_spare_parameter_that_the_model_uses, number)
        yield f"a_spare_parameter_of_{number}_that_the_model_uses", build_spare
    for first in (0, 4):
        for use_reentrant in (True, False):
            name = f"checkpointed from {first}, {'' if use_reentrant else 'not '}reentrant"
            yield name, partial(modes.checkpointed, use_reentrant=use_reentrant, first=first)


CASES = dict(_cases())


@pytest.mark.parametrize("case", half(CASES))
def test_similar_blocks_that_differ_are_captured_one_by_one(case: str) -> None:
    random.seed(0)
    model, sample = CASES[case](), torch.randn(ROWS, WIDTH)
    profile = capture(model, sample)
    random.seed(0)
    assert profile == capture(model, sample, every_block=True)
