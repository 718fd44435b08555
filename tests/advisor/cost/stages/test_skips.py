"""Bytes that cross the borders of pipeline stages, and those that a stage retains of them."""

from __future__ import annotations

import pytest
import torch

from advisor.cost.stages.stage_borders import StageBorders
from profiles.capture.batch.call import call_model
from profiles.capture.capture import capture
from profiles.model.profile import Numerics
from tests.engines.cases import CASES, WIRINGS, Case, cpu_ranks, profile_of

# Of a sample of 8 x 8 pixels: `enter` makes 8 channels, `down` 16 of half the side, `bottom` 16.
# `up` takes what `bottom` and `down` made, `leave` what `up` and `enter` made.
HIGH, LOW, BOTTOM = 8 * 8 * 8 * 4, 16 * 4 * 4 * 4, 16 * 4 * 4 * 4


@pytest.fixture(scope="module")
def borders() -> tuple[StageBorders, dict[str, int]]:
    case = WIRINGS["unet"]
    profile = profile_of(case, case.build())
    return (
        StageBorders(profile, cpu_ranks(3)),
        {unit.name: place for place, unit in enumerate(profile.units)},
    )


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        # It made all three.
        ("enter", "up", (0, HIGH + LOW + BOTTOM)),
        # `down` and `bottom` took the other two in the stage before, which has them saved.
        ("up", None, (BOTTOM, 0)),
        # What `enter` made is handed through: it stays where it was received.
        ("bottom", "up", (LOW, BOTTOM)),
        ("enter", "bottom", (0, HIGH + LOW)),
        ("down", "up", (HIGH, LOW + BOTTOM)),
    ],
)
def test_a_stage_retains_what_it_takes_first_and_what_it_made(
    first: str,
    last: str | None,
    expected: tuple[int, int],
    borders: tuple[StageBorders, dict[str, int]],
) -> None:
    stages, places = borders
    end = len(places) if last is None else places[last]
    start = 0 if first == "enter" else places[first]
    actual = stages.retained(start, end, numerics=Numerics.AS_BUILT, samples=3)
    assert actual == tuple(3 * nbytes for nbytes in expected)


@pytest.mark.parametrize(
    ("case", "border"), [(WIRINGS["unet"], "up"), (CASES["gpt"], "blocks.1")], ids=["unet", "gpt"]
)
def test_what_crosses_a_border_under_autocast_has_the_dtypes_of_a_real_forward(
    case: Case, border: str
) -> None:
    numerics = (Numerics.AS_BUILT, Numerics.BF16_AUTOCAST)
    model, batch = case.build(), case.batch(2)
    profile = capture(model, batch, loss_fn=case.loss_fn, numerics=numerics)
    order = profile.flow.order
    sent: dict[str, int] = {}
    for name in list(order)[: order[border]]:
        model.get_submodule(name).register_forward_hook(
            lambda _, args, output, name=name: sent.update({name: output.nbytes})
        )
    with torch.autocast("cpu", torch.bfloat16):
        call_model(model, batch, has_target=True)
    start = profile.flow.first_calls[border]
    crossing = [
        profile.flow.calls[call].unit for *_, (call, _) in profile.flow.crossing_terms(start)
    ]
    places = [unit.name for unit in profile.units]
    actual = StageBorders(profile, cpu_ranks(2)).crossing(
        places.index(border), numerics=Numerics.BF16_AUTOCAST, samples=2
    )
    assert actual == (expected := sum(sent[name] for name in crossing), expected)
