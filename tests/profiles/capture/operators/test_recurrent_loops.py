"""Operations that a loop in C++ launches count for less, in the forward and in the backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from profiles.capture.capture import capture
from profiles.model.profile import Numerics, UnitCost
from profiles.trace import scopes

STEPS, ROWS, WIDTH = 12, 3, 8


class Tagger(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.layer(x)[0])
        return outputs


def costs(layer: nn.Module) -> dict[str, UnitCost]:
    profile = capture(Tagger(layer), torch.zeros(ROWS, STEPS, WIDTH))
    return {unit.name: unit.cost(Numerics.AS_BUILT) for unit in profile.units}


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_launches_of_a_loop_count_for_a_share_and_others_for_all(
    kind: type[nn.RNNBase], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = kind(WIDTH, WIDTH, batch_first=True)
    counted, share = costs(layer), scopes.LOOPED
    monkeypatch.setattr(scopes, "LOOPED", 1.0)
    every = costs(layer)
    forward, backward = every["layer"].forward_kernels, every["layer"].backward_kernels
    assert forward > 3 * STEPS
    # Initial states are made outside the loop.
    assert counted["layer"].forward_kernels == pytest.approx(share * forward, abs=2)
    assert counted["layer"].backward_kernels == pytest.approx(share * backward, abs=2)
    assert counted["head"] == every["head"]
    assert counted["layer"].forward_flop == every["layer"].forward_flop


def test_an_lstm_is_few_kernels_and_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)
    counted = costs(layer)
    monkeypatch.setattr(scopes, "LOOPED", 1.0)
    assert counted["layer"] == costs(layer)["layer"]
