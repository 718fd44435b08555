"""Shapes of the bundled GPTs. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT.

    Attributes:
        vocab_size: token ids that exist.
        context: positions that exist, the longest sequence.
        num_layers, num_heads: blocks, and attention heads in each.
        width: size of the residual stream.
        dropout: on the attention weights and on what each branch adds; 0 is none.
    """

    vocab_size: int
    context: int
    num_layers: int
    num_heads: int
    width: int
    dropout: float = 0.0

    @property
    def parameters(self) -> int:
        """Elements in closed form, the tied head counted once: L (12 D^2 + 13 D) + (V + T + 2) D.

        Per block: 4 D^2 of attention and 8 D^2 of MLP, 9 D of biases, 4 D of two layer norms.
        """
        width = self.width
        block = 12 * width**2 + 13 * width
        return self.num_layers * block + (self.vocab_size + self.context + 2) * width


def _paper(num_layers: int, num_heads: int, width: int) -> GPTConfig:
    # Vocabulary: GPT-2's 50,257 tokens rounded up to a multiple of 128, as Megatron-LM pads it.
    # Context: 2,048 (Brown et al. 2020, section 2.1).
    return GPTConfig(
        vocab_size=50_304, context=2048, num_layers=num_layers, num_heads=num_heads, width=width
    )


SHAPES = {
    # Bytes as tokens; depth, heads and width of nanoGPT's train_shakespeare_char.py.
    "gpt-10m": GPTConfig(vocab_size=256, context=128, num_layers=6, num_heads=6, width=384),
    # Brown et al. 2020, table 2.1. Two rows of it do not multiply out (1.3B: 24 heads of 128 in a
    # width of 2048; 13B: 40 heads of 128 in a width of 5140): head size and the nearest multiple
    # of it are kept here.
    "gpt-125m": _paper(12, 12, 768),
    "gpt-1.3b": _paper(24, 16, 2048),
    "gpt-7b": _paper(32, 32, 4096),
    "gpt-13b": _paper(40, 40, 5120),
    # Depth, heads and width of Llama 2 70B (Touvron et al. 2023); with a plain MLP 64.9 B.
    "gpt-70b": _paper(80, 64, 8192),
}
"""The bundled names, smallest first."""
