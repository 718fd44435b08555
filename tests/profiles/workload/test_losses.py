"""Losses in other kernels: bytes of logits by hand."""

from __future__ import annotations

import pytest

from profiles.closed_forms.transformer import TransformerShape, transformer_profile
from profiles.model.profile import Numerics, UnitCost
from profiles.workload.losses import CHUNKS
from profiles.workload.stack import TORCH, Loss, Stack
from profiles.workload.under_stack import under_stack

H, VOCAB, TOKENS = 64, 1000, 128
SHAPE = TransformerShape(
    kind="llama", layers=2, hidden=H, heads=4, kv_heads=4, ffn=256, vocab=VOCAB,
    length=TOKENS, gated=True, tied=False, head_width=16,
)  # fmt: skip
MODEL = transformer_profile(SHAPE, name="llama")
LOGITS = 2 * TOKENS * VOCAB  # bytes in bf16


def stack(loss: Loss) -> Stack:
    return TORCH.model_copy(update={"name": loss.value, "loss": loss})


def costs(model=MODEL) -> tuple[UnitCost, UnitCost]:
    head, loss = (unit.cost(Numerics.BF16) for unit in model.units[-2:])
    return head, loss


def test_materialised_logits_and_their_log_softmax_are_kept() -> None:
    head, loss = costs()
    assert head.layers[-1].after.activation_bytes.at(1) == LOGITS
    assert loss.activation_bytes.at(1) == 2 * LOGITS  # in fp32


@pytest.mark.parametrize(("loss", "share"), [(Loss.CHUNKED, 1 / CHUNKS), (Loss.HEAD, 0)])
def test_parts_of_the_logits_live_one_at_a_time(loss: Loss, share: float) -> None:
    was, _ = costs()
    head, last = costs(under_stack(MODEL, stack(loss)))
    assert was.activation_bytes.at(1) - head.activation_bytes.at(1) == LOGITS
    assert head.output_bytes.at(1) == share * LOGITS
    # Their gradient is written over them; what stays is the gradient of what the head takes.
    assert last.activation_bytes.at(1) == 2 * TOKENS * H
    assert last.forward_transient_bytes.at(1) == share * LOGITS


def test_one_kernel_with_the_head_multiplies_once_more() -> None:
    was, _ = costs()
    chunked, _ = costs(under_stack(MODEL, stack(Loss.CHUNKED)))
    head, _ = costs(under_stack(MODEL, stack(Loss.HEAD)))
    assert chunked.backward_flop == was.backward_flop
    assert head.backward_flop.at(1) - was.backward_flop.at(1) == 2 * TOKENS * H * VOCAB


@pytest.mark.parametrize("loss", list(Loss))
def test_other_stack_flags_leave_the_loss_unchanged(loss: Loss) -> None:
    once = under_stack(MODEL, stack(loss))
    more = stack(loss).model_copy(update={"name": "more", "cuda_graphs": 1.0})
    again = under_stack(once, more)
    assert [unit.costs for unit in again.units] == [unit.costs for unit in once.units]


def test_a_loss_inside_a_block_is_unchanged() -> None:
    units = MODEL.units[:-2]  # neither head nor loss
    model = MODEL.model_copy(update={"units": units})
    assert under_stack(model, stack(Loss.CHUNKED)).units == units
