"""Losses in other kernels: bytes of logits by hand."""

from __future__ import annotations

import pytest

from profiles.closed_forms.transformer import TransformerShape, transformer_profile
from profiles.model.profile import Numerics, UnitCost
from profiles.workload.stack import TORCH, Loss, Stack, chunked
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


def test_one_kernel_with_the_head_has_no_logits() -> None:
    was, _ = costs()
    head, last = costs(under_stack(MODEL, stack(Loss.HEAD)))
    assert was.activation_bytes.at(1) - head.activation_bytes.at(1) == LOGITS
    assert head.output_bytes.at(1) == 0
    assert last.activation_bytes.at(1) == 2 * TOKENS * H  # the gradient of what the head takes
    assert last.forward_transient_bytes.at(1) == 2 * TOKENS * H


@pytest.mark.parametrize("chunks", [2, 8])
def test_chunks_of_the_logits_live_one_at_a_time(chunks: int) -> None:
    head, last = costs(under_stack(MODEL, chunked(TORCH, chunks)))
    assert head.output_bytes.at(1) == LOGITS / chunks
    # Gradients of what the head takes and of its weight, from the forward to the backward.
    stays = 2 * TOKENS * H + 2 * VOCAB * H
    assert last.activation_bytes.at(1) == stays
    # bf16 logits kept by the cast, fp32 log-softmax, and gradients in fp32 and bf16.
    assert last.forward_transient_bytes.at(1) == stays + (2 + 4 + 4 + 2) * LOGITS / 2 / chunks
    assert last.backward_transient_bytes.at(1) == 0


def test_every_chunk_but_the_first_reads_and_writes_the_gradient_of_the_weight() -> None:
    was, _ = costs()
    head, last = costs(under_stack(MODEL, chunked(TORCH, 8)))
    more = head.backward_moved_bytes.at(1) - was.backward_moved_bytes.at(1)
    assert more == 7 * 2 * (2 * VOCAB * H)
    assert head.forward_kernels == 8 * was.forward_kernels
    assert last.forward_moved_bytes == costs()[1].forward_moved_bytes


def test_one_kernel_with_the_head_multiplies_once_more() -> None:
    was, _ = costs()
    in_chunks, _ = costs(under_stack(MODEL, chunked(TORCH, 8)))
    head, _ = costs(under_stack(MODEL, stack(Loss.HEAD)))
    assert in_chunks.backward_flop == was.backward_flop
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
    assert under_stack(model, chunked(TORCH, 8)).units == units
