"""The proof that a model's sequences can be shared out, and the models it refuses by name."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines.context.attention import require_plain
from engines.context.input_sharding import InputSharding
from engines.context.proof import prove
from profiles.errors import AdvisorError, BatchError, ModelError, PlanError
from tests.engines.cases import CASES, TinyGPT, token_loss


class Averaging(TinyGPT):
    """Every token also sees the mean of all."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + super().forward(ids).mean(1, keepdim=True)


class ByHand(nn.Module):
    """Attention without `scaled_dot_product_attention`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return F.softmax(x @ x.transpose(1, 2), -1) @ x @ self.embed.weight.t()


def sliding_window() -> nn.Module:
    import transformers

    from tests import zoo

    config = transformers.MistralConfig(**zoo.SMALL, num_key_value_heads=2, sliding_window=8)
    return transformers.MistralForCausalLM(config)


class Asserting(TinyGPT):
    """Its author wants no shorter sequences."""

    def forward(self, ids: Tensor) -> Tensor:
        assert ids.shape[1] >= 8, "too short"
        return super().forward(ids)


class AveragingLater(TinyGPT):
    """The same, in a share that is zero at first; training code lets it grow."""

    def __init__(self) -> None:
        super().__init__()
        self.share = nn.Buffer(torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        out = super().forward(ids)
        return out + self.share * out.mean(1, keepdim=True)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (Averaging, "an output differs"),
        (AveragingLater, "an output differs"),
        (Asserting, "AssertionError: too short"),
        (ByHand, "attention calls seen: 0"),
        (lambda: CASES["lstm"].build(), "set cp=1"),
    ],
)
def test_mixing_tokens_outside_of_attention_is_refused(
    build: Callable[[], nn.Module], says: str
) -> None:
    is_series = says == "set cp=1"
    case = CASES["lstm" if is_series else "gpt"]
    batch = case.batch(2)
    if is_series:
        batch = torch.randn(2, 8, 6), torch.randint(0, 5, (2,))
    with pytest.raises(PlanError) as error:
        prove(build(), batch, case.loss_fn, size=2)
    assert says in str(error.value)


class OfOneLength(nn.Module):
    """Has a place for each token of the whole sequence, and adds it as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(9, 8), nn.Parameter(torch.randn(32, 8))

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids) + self.places


def test_a_model_of_one_length_is_refused() -> None:
    with pytest.raises(PlanError, match="does not run over a shorter sequence: RuntimeError"):
        prove(OfOneLength(), torch.zeros(2, 32, dtype=torch.long), None, size=2)


def test_a_window_that_only_a_long_sequence_fills_is_seen_on_the_sample() -> None:
    """The proof runs over 8 tokens, which a window of 8 hides nothing of; the sample has 16."""
    pytest.importorskip("transformers")
    from tests import zoo

    with pytest.raises(ModelError, match="attention with a mask"):
        prove(sliding_window(), zoo.TOKENS, None, size=2)


class Waves(TinyGPT):
    """Beside what TinyGPT adds for places, `width` waves of them, whose frequencies it counts."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.width = width

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])[:, None]
        frequencies = torch.arange(self.width) / self.width
        waves = torch.sin(places * 10**-frequencies)
        logits: Tensor = super().forward(ids) * (1 + waves.sum(1)[None, :, None])
        return logits


def test_a_range_that_may_be_a_count_is_not_taken_for_positions() -> None:
    """Of 16 tokens each of 2 ranks has 8: `arange(8)` may be both."""
    batch = torch.randint(0, 61, (2, 16)), torch.randint(0, 61, (2, 16))
    assert prove(Waves(7), batch, token_loss, size=2).counts == {7}
    with pytest.raises(PlanError, match="counts to 8 for something else too"):
        prove(Waves(8), batch, token_loss, size=2)
    proof = prove(Waves(6), batch, token_loss, size=2)
    with pytest.raises(BatchError, match="has 6 of 12 tokens"):  # a shorter batch, later
        proof.require_places(12, 2)
    proof.require_places(16, 2)


def test_labels_are_shifted_before_sharding_if_the_loss_shifts_them() -> None:
    pytest.importorskip("transformers")
    from tests import zoo

    assert prove(zoo.llama(), zoo.TOKENS, None, size=2).way == InputSharding(
        gives_positions=True, gives_mask=True, shifts_labels=True, has_target=False
    )
    case = CASES["loss-inside"]
    assert prove(case.build(), case.batch(2), None, size=2).way == InputSharding(
        gives_positions=False, gives_mask=False, shifts_labels=False, has_target=False
    )


def test_a_meta_model_is_proved_on_random_values() -> None:
    with torch.device("meta"):
        model = TinyGPT()
    proof = prove(model, CASES["gpt"].batch(2), token_loss, size=2)
    assert proof.outputs == (1,)  # the logits' tokens
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_proof_leaves_the_model_and_the_random_numbers_as_they_were() -> None:
    model, batch = TinyGPT(), CASES["gpt"].batch(2)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    prove(model, batch, token_loss, size=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_attention_dropout_is_refused_in_training() -> None:
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(AdvisorError, match=r"drops out weights \(p=0.1\)"):
        require_plain(q, q, attn_mask=None, dropout_p=0.1)
