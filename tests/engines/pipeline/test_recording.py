"""Code that looks at values while its calls are recorded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from engines.pipeline.recording import ReturnedTensor, intercepted, record
from profiles.capture.capture import capture
from profiles.errors import ModelError
from profiles.torch_compat import CALL

SAMPLE = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))


class Masked(nn.Module):
    """Asks a mask of its own whether it hides anything, as Longformer does; or its input."""

    def __init__(self, *, asks_input: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.asks_input = asks_input

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[:2], dtype=torch.long).masked_fill(torch.zeros(1).bool(), 0)
        hides = (x[..., 0] > 0 if self.asks_input else mask < 1).flatten().any().item()
        for layer in self.layers[1:] if hides else self.layers:
            x = layer(x)
        return x.mean()


def test_a_forward_may_read_what_is_the_same_for_every_batch() -> None:
    model = Masked()
    profile = capture(model, SAMPLE)
    assert profile.reads == ()
    recording = record(model, profile.flow, SAMPLE, has_target=False)
    assert [call.unit for call in recording.calls] == ["layers.0", "layers.1", "layers.2"]
    first = recording.calls[0].leaves[0]
    assert isinstance(first, ReturnedTensor)
    assert first.shape == (4, 6, 8)


def test_a_forward_that_reads_its_batch_is_refused_by_name() -> None:
    model = Masked(asks_input=True)
    profile = capture(model, SAMPLE)
    assert [read.operation for read in profile.reads] != []
    with pytest.raises(ModelError, match="depends on values of tensors"):
        record(model, profile.flow, SAMPLE, has_target=False)


def test_calls_that_units_had_of_their_own_are_back_when_a_forward_is_over() -> None:
    """Those of `module.compile()`, say."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    own = model[0]._call_impl
    vars(model[0])[CALL] = own
    with intercepted(model, ["0", "1"], lambda name, call, args, kwargs: call(*args, **kwargs)):
        model(torch.ones(2, 3))
        assert vars(model[0])[CALL] is not own
    assert vars(model[0])[CALL] is own
    assert CALL not in vars(model[1])
