"""Captures of an LSTM against what oneDNN allocates, and against a run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from profiles.capture.capture import capture
from profiles.capture.operators.lstm_kernels import workspace_bytes
from profiles.model.profile import Numerics

LSTM_MODE = 2


def allocated(steps: int, rows: int, inputs: int, hidden: int) -> int:
    """Bytes of the workspace that the kernel itself returns."""
    state = torch.zeros(rows, hidden)
    weights = torch.randn(4 * hidden, inputs), torch.randn(4 * hidden, hidden)
    bias = torch.zeros(4 * hidden)
    *_, workspace = torch.ops.aten.mkldnn_rnn_layer(
        torch.randn(steps, rows, inputs), *weights, bias, bias, state, state, False, [],
        LSTM_MODE, hidden, 1, True, False, False, True,
    )  # fmt: skip
    return int(workspace.nbytes)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize(("steps", "rows"), [(1, 8), (10, 3), (48, 16)])
@pytest.mark.parametrize(
    ("inputs", "hidden"),
    [
        (7, 5),
        (16, 128),
        (128, 128),
        (512, 128),
        (128, 256),
        (128, 64),
        (48, 96),
        (300, 200),
        (512, 512),
    ],
)
def test_a_workspace_is_as_large_as_the_kernels(
    steps: int, rows: int, inputs: int, hidden: int
) -> None:
    wanted = allocated(steps, rows, inputs, hidden)
    assert workspace_bytes(steps, rows, inputs, hidden) == wanted


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 48, 2, batch_first=True, bidirectional=True, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lstm(x)[0]
        return out


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_activations_are_those_that_a_run_saves() -> None:
    model, x = Tagger(), torch.randn(8, 20, 64)
    saved: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def note(tensor: Tensor) -> Tensor:
        # oneDNN's tensors of reordered weights have no storage.
        if tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = model(x)
    saved.pop(x.untyped_storage().data_ptr(), None)
    profile = capture(model, x)
    (unit,) = [unit for unit in profile.units if unit.parameters]
    cost = unit.cost(Numerics.AS_BUILT)
    assert cost.activation_bytes.at(8) == sum(saved.values())
    _, (hidden, cell) = model.lstm(x)
    assert cost.output_bytes.at(8) == out.nbytes + hidden.nbytes + cell.nbytes


@pytest.mark.parametrize("biases", [False, True])
def test_weights_are_read_once_however_many_steps_there_are(biases: bool) -> None:
    rows, inputs, hidden = 5, 4, 8
    lstm = nn.LSTM(inputs, hidden, bias=biases, batch_first=True)
    kernels = set()
    for steps in (12, 24):
        profile = capture(lstm, torch.ones(rows, steps, inputs))
        (unit,) = [unit for unit in profile.units if unit.parameters]
        cost = unit.cost(Numerics.AS_BUILT)
        assert cost.forward_flop.per_sample == steps * 2 * 4 * hidden * (inputs + hidden)
        assert cost.backward_flop.per_sample == 2 * cost.forward_flop.per_sample
        assert cost.forward_moved_bytes.fixed == 4 * 4 * hidden * (inputs + hidden)
        kernels.add((cost.forward_kernels, cost.backward_kernels))
    assert len(kernels) == 1
