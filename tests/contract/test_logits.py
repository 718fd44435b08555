"""Peak memory of the loss over a large vocabulary equals that of a real run."""

from __future__ import annotations

import pytest
import torch

from advisor.inputs.bundled.gpt import GPT, GPTConfig, loss
from engines.plan import Plan
from profiles.capture.capture import capture
from profiles.model.profile import LOSS, ModelProfile, Numerics
from tests.contract.watch import LiveBytes, prediction

ROWS, TOKENS = 4, 64
VOCABULARIES = (32_768, 131_072)


def _model(vocabulary: int) -> GPT:
    shape = GPTConfig(vocab_size=vocabulary, context=TOKENS, num_layers=2, num_heads=2, width=64)
    return GPT(shape)


def _batch(vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, vocabulary, (ROWS, TOKENS))
    return ids, ids


def _peaks(vocabulary: int, *, autocast: bool) -> tuple[int, int, int]:
    """Most bytes beside parameters and batch until the end of forward, loss and backward."""
    model, (ids, targets) = _model(vocabulary), _batch(vocabulary)
    watched = LiveBytes([*model.parameters(), ids])
    before = watched.peak_bytes = watched.now()
    with watched:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(ids)
            forward = watched.peak_bytes
            value = loss(logits, targets)
        del logits
        after_loss = watched.peak_bytes
        value.backward()
    return forward - before, after_loss - before, watched.peak_bytes - before


def _profile(vocabulary: int) -> ModelProfile:
    return capture(_model(vocabulary), _batch(vocabulary), loss_fn=loss, numerics=tuple(Numerics))


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("numerics", [Numerics.AS_BUILT, Numerics.BF16_AUTOCAST])
def test_forward_loss_and_backward_peak_as_captured(vocabulary: int, numerics: Numerics) -> None:
    is_autocast = numerics is Numerics.BF16_AUTOCAST
    profile = _profile(vocabulary)
    costs = {unit.name: unit.cost(numerics) for unit in profile.units}
    saved = [cost.activation_bytes.at(ROWS) for name, cost in costs.items() if name != LOSS]
    # Autocast's copies of the matrices: all of them, for the head is the embedding.
    matrices = sum(p.nbytes for n, p in _model(vocabulary).named_parameters() if p.dim() == 2)
    position = 4 * TOKENS * 64  # looked up, not multiplied
    before = sum(saved) + (matrices - position) / 2 * is_autocast
    head, last = costs["head"], costs[LOSS]
    predicted = (
        before + head.forward_transient_bytes.at(ROWS),
        before + last.input_bytes.at(ROWS) + last.forward_transient_bytes.at(ROWS),
        before
        + last.activation_bytes.at(ROWS)
        + last.output_bytes.at(ROWS)
        + last.backward_transient_bytes.at(ROWS),
    )
    for said, result in zip(predicted, _peaks(vocabulary, autocast=is_autocast), strict=True):
        assert said == pytest.approx(result, rel=0.01)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_peak_of_the_loss_is_named_in_the_estimate(vocabulary: int) -> None:
    charged = prediction(Plan(microbatch_size=ROWS), _profile(vocabulary))
    logits = ROWS * TOKENS * vocabulary * 4
    assert charged.phase == "backward of the loss"
    # The log-softmax that is kept, its gradient, and that of the logits.
    assert charged.loss_bytes == pytest.approx(3 * logits, rel=1e-3)
    states = charged.memory.parameters + charged.memory.optimizer + charged.memory.batch
    _, _, actual = _peaks(vocabulary, autocast=False)
    assert charged.peak_bytes - states == pytest.approx(actual, rel=1e-3)
