"""Masks of transformers: left out where a real run leaves them out, kept where data decide."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from profiles.capture.batch.call import Batch
from profiles.capture.calls import calls_of
from profiles.capture.capture import capture
from profiles.capture.fakes.transformers_compat import masks_of_a_real_run
from profiles.errors import ModelError
from profiles.model.profile import ModelProfile, Numerics
from tests.profiles.capture.measured import measure

pytest.importorskip("transformers")

from transformers import masking_utils

from tests.zoo import ARCHITECTURES, TOKENS

PATCHED = (
    "find_packed_sequence_indices",
    "_ignore_causal_mask_sdpa",
    "_ignore_bidirectional_mask_sdpa",
)
LLAMA = ARCHITECTURES["Llama, no cache"][0]
ONES = torch.ones(2, 16, dtype=torch.long)
COUNTED = torch.arange(16).expand(2, 16)


def saved_bytes(profile: ModelProfile) -> float:
    costs = (unit.cost(Numerics.AS_BUILT) for unit in profile.units)
    return sum(cost.activation_bytes.at(profile.samples) for cost in costs)


def functions() -> list[Callable[..., object]]:
    return [getattr(masking_utils, name) for name in PATCHED]


def batch(**further: Tensor) -> Batch:
    assert isinstance(TOKENS, dict)
    return {**TOKENS, **further}


# With dropout attention is unfused, which adds a mask and does not keep it (BERT).
@pytest.mark.parametrize(
    ("name", "is_kept"), [("Llama, no cache", True), ("T5", True), ("BERT", False)]
)
def test_a_padding_mask_in_the_batch_costs_what_padding_costs(name: str, is_kept: bool) -> None:
    padded = ONES.clone()
    padded[0, 12:] = 0
    model = ARCHITECTURES[name][0]()
    # A real run leaves a mask of ones out; of a batch it is not known whether all are ones.
    actual = saved_bytes(capture(model, batch(attention_mask=ONES)))
    assert actual == measure(model, batch(attention_mask=padded)).saved_bytes
    assert (actual > saved_bytes(capture(model, batch()))) == is_kept


def test_positions_in_the_batch_cost_what_packed_sequences_cost() -> None:
    model = LLAMA()
    packed = COUNTED % 8  # two sequences in each row
    actual = saved_bytes(capture(model, batch(position_ids=COUNTED)))
    assert actual == measure(model, batch(position_ids=packed)).saved_bytes
    assert actual > saved_bytes(capture(model, batch()))


class Asking(nn.Module):
    """Asks transformers whether it can do without a mask, of masks made in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.answers: dict[str, object] = {}

    def forward(self, x: Tensor) -> Tensor:
        written = torch.ones(2, 16)
        written[:, 0] = 0
        masks = {
            "none": None,
            "ones": torch.ones(2, 16),
            "cast": torch.ones(2, 16).to(torch.bool),
            "like": torch.ones_like(x),
            "view": x.new_ones(2, 32)[:, :16],
            "zeros": torch.zeros(2, 16).to(torch.bool),
            "written": written.to(torch.bool),
            "given": x,
        }
        for name, mask in masks.items():
            sizes = (16, 16, 0, 0)
            causal = masking_utils._ignore_causal_mask_sdpa(mask, *sizes)
            both = masking_utils._ignore_bidirectional_mask_sdpa(mask, 16)
            assert causal == both
            self.answers[name] = causal
            local = masking_utils._ignore_causal_mask_sdpa(mask, *sizes, local_attention_size=16)
            assert not local
        return self.linear(x)


def test_only_masks_that_the_model_fills_with_ones_are_left_out() -> None:
    model = Asking()
    seen: SimpleQueue[dict[str, bool]] = SimpleQueue()  # a look puts back what others collect

    def remember(module: Asking, args: object, output: object) -> None:
        seen.put(dict(module.answers))

    model.register_forward_hook(remember)
    capture(model, torch.ones(2, 16))
    answers = seen.get()
    assert {name for name, answer in answers.items() if answer} == {
        "none", "ones", "cast", "like", "view",
    }  # fmt: skip
    assert len(answers) == 8


def test_the_functions_of_transformers_are_restored() -> None:
    before = functions()
    capture(LLAMA(), batch())
    assert functions() == before


def test_the_functions_of_transformers_are_restored_after_an_error() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            during.put(functions())
            raise RuntimeError

    during: SimpleQueue[list[object]] = SimpleQueue()
    before = functions()
    with pytest.raises(ModelError):
        capture(Failing(), torch.ones(1))
    assert functions() == before
    seen = [during.get_nowait() for _ in range(during.qsize())]
    assert not set(before) & set(seen[0])
    assert seen[-1] == before  # in the plain run, which tells whose error it is


def test_masks_of_another_thread_are_read() -> None:
    class Elsewhere(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=look_at_packed)
            thread.start()
            thread.join()
            return x

    def look_at_packed() -> None:
        answers.put(masking_utils.find_packed_sequence_indices(COUNTED % 8))

    answers: SimpleQueue[Tensor] = SimpleQueue()
    capture(Elsewhere(), torch.ones(1))
    assert torch.equal(answers.get_nowait(), COUNTED // 8)


@pytest.mark.parametrize("module", [None, ModuleType("transformers.masking_utils")])
def test_an_unknown_transformers_is_not_patched(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType | None
) -> None:
    monkeypatch.delitem(sys.modules, "transformers.masking_utils")
    if module is not None:
        monkeypatch.setitem(sys.modules, "transformers.masking_utils", module)
    names = set(vars(module)) if module is not None else None
    with masks_of_a_real_run(is_unpacked=lambda ids: True, is_all_ones=lambda mask: True):
        assert sys.modules.get("transformers.masking_utils") is module
        assert names is None or set(vars(module)) == names


def test_blocks_that_are_timed_get_no_mask_that_a_real_run_leaves_out() -> None:
    calls, _ = calls_of(LLAMA(), TOKENS, None)
    (call,) = calls["model.layers.1"]
    assert call.kwargs["attention_mask"] is None
    windowed, _ = calls_of(ARCHITECTURES["Mistral, no cache"][0](), TOKENS, None)
    assert windowed["model.layers.1"][0].kwargs["attention_mask"].shape[-2:] == (16, 16)
