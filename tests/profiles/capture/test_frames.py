"""The line of a model's code that an error or a value came from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from profiles.capture.batch.call import call_model
from profiles.capture.frames import model_line


class Raising(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("width")


def test_the_line_is_that_of_the_code_which_a_model_runs() -> None:
    with pytest.raises(KeyError) as caught:
        call_model(Raising(), torch.zeros(1), has_target=False)
    assert model_line(caught.value).partition(":")[0].endswith("test_frames.py")


def test_a_library_is_named_where_the_model_is_its_own() -> None:
    """Not the line of the script that gave the model."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    model, batch = transformers.LlamaForCausalLM(config), {"inputs_embeds": torch.zeros(1, 2, 9)}
    with pytest.raises(RuntimeError) as caught:
        call_model(model, batch, has_target=False)
    assert "transformers" in model_line(caught.value)
