"""Transformer-XL as a list of layers: attention with the segment before and relative positions.

Its program runs every operation as a kernel of its own, as networks of convolutions do, so that the
same roofline holds for it, and the same constants.
"""

from __future__ import annotations

from functools import lru_cache

from advisor.predict.setup import Shape
from profiles.convnets.layers import Block, Kind, Layer, Network

# Kernels over the scores of a layer, each reading and writing all of them: the scores by position
# are padded, copied out shifted, and added; scaled, masked, softmax, dropout (twice: mask and
# product), and copies between the layouts of the three products. NVIDIA's program
# (DeepLearningExamples, Transformer-XL, RelPartialLearnableMultiHeadAttn).
SCORE_KERNELS = 12
# Kernels over a layer's hidden states: two biases of queries, splits, copies, two dropouts, two
# residuals, two norms; over the wide ones of the MLP: bias, ReLU, dropout.
HIDDEN_KERNELS, WIDE_KERNELS = 10, 3
# Over logits: log-softmax, loss, cast. Over the embedding's: lookup, scale, dropout, loss.
LOGIT_KERNELS, EMBEDDING_KERNELS = 3, 4


@lru_cache(maxsize=256)
def transformer_xl(shape: Shape) -> Network:
    """One sequence's layers; keys and values are those of two segments."""
    length, keys, hidden = shape.length, 2 * shape.length, shape.hidden
    heads, width = shape.heads, shape.head_width

    def product(rows: int, depth: int, columns: int) -> Layer:
        """With weights."""
        return Layer(
            Kind.LINEAR, rows * depth, rows * columns, depth * columns, rows, depth, columns
        )

    def each_head(rows: int, depth: int, columns: int) -> Layer:
        inputs = heads * (rows * depth + depth * columns)
        outputs = heads * rows * columns
        return Layer(Kind.LINEAR, inputs, outputs, 0, rows, depth, columns, heads)

    def streams(elements: int, count: int) -> list[Layer]:
        return [Layer(Kind.JOIN, elements, elements) for _ in range(count)]

    layers = [
        product(keys, hidden, 3 * heads * width),
        each_head(length, width, keys),
        each_head(length, width, keys),
        *streams(heads * length * keys, SCORE_KERNELS),
        each_head(length, keys, width),
        product(length, heads * width, hidden),
        *streams(length * hidden, HIDDEN_KERNELS),
        product(length, hidden, shape.ffn),
        *streams(length * shape.ffn, WIDE_KERNELS),
        product(length, shape.ffn, hidden),
    ]
    top = [
        product(length, hidden, shape.vocab),
        *streams(length * shape.vocab, LOGIT_KERNELS),
        *streams(length * hidden, EMBEDDING_KERNELS),
    ]
    blocks = [Block(f"layers.{index}", layers) for index in range(shape.layers)]
    return Network(shape.kind, 0, (*blocks, Block("head", top)))
