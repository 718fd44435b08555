"""Loss: what the logits take while it is computed, its fullest moment on the last stage.

Megatron-LM turns the fp32 copy of the logits into the gradient in place; before, the exponentials
were a tensor of their own. torch's cross entropy holds the logits, their fp32 copy's log-softmax,
its gradient and the fp32 gradient of the logits; before autocast, and in Transformer-XL's own loss,
all four are of the model's type. LLM Foundry's loss is one kernel (`fused_crossentropy`), from
logits to their gradient. torchtitan deletes the logits before the backward; split over tensor ranks
its loss has one fp32 temporary more (torch/distributed/tensor/parallel/loss.py, `torch.exp`).
"""

from __future__ import annotations

from advisor.predict.activations import DECODER_SHARE, Tokens, transformer_of
from advisor.predict.setup import Setup
from advisor.predict.stages import Stage

DEEPSPEED = frozenset({"deepspeed", "megatron-deepspeed"})
_MEGATRON = frozenset({"megatron", "megatron-deepspeed", "internevo"})
# Since this release Megatron-LM computes the loss in the buffer of the fp32 logits.
LOSS_IN_PLACE = 2023.0
# torch 1.6 brought autocast (July 2020), which computes losses in fp32; programs took it up after.
AUTOCAST = 2021.0
# DeepSpeed's pipeline lets go of a last stage's outputs, logits in fp32, two microbatches later:
# its backward returns before it does (deepspeed/runtime/pipe/engine.py, two buffers).
PIPED = 4.0


def loss_work(setup: Setup, stage: Stage, tokens: Tokens) -> float:
    """Bytes of the loss of one microbatch on a rank of the last stage: logits, hidden states."""
    shape = transformer_of(setup)
    share = 1 / DECODER_SHARE if shape.kind == "t5" else 1.0
    # What is gathered for a head stays until its weight's gradient.
    seen = tokens.whole if setup.software.keeps_gathered else tokens.split
    hidden = tokens.element * shape.hidden * seen * share
    return tokens.whole * share * stage.vocab * logit_bytes(setup, tokens.element) + 2 * hidden


def logit_bytes(setup: Setup, element: float) -> float:
    """Bytes a logit, at the fullest; `element`: of a number of the model's type."""
    software, layout = setup.software, setup.layout
    waiting = layout.pp > 1 and layout.accumulation > 1 and software.family in DEEPSPEED
    before = PIPED if waiting else 0.0
    if software.family in ("megatron", "internevo") and software.year >= LOSS_IN_PLACE:
        return element + 4
    if software.family in _MEGATRON:
        return element + 8 + before
    if software.family == "foundry":
        return 2 * element
    if software.year < AUTOCAST or transformer_of(setup).kind == "transformer_xl":
        return 4 * element + before
    if software.family == "torchtitan":
        return 12.0 if layout.tp == 1 else 16.0
    return (element + 12 if element < 4 else 16.0) + before
