"""Work inside a unit: matrix products, calls of attention, and elementwise operations by kind.

A roofline needs more than FLOP and bytes: a product's sizes say how well it fills the device, the
kernel of attention says what is kept and at what rate it runs, and the kind of an elementwise
operation says whether a software stack runs it in one kernel with its neighbours.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from profiles.model.affine import Affine
from profiles.record import Record

GROUPED_ALIGNMENT = 8
"""`profiles.torch_compat.grouped.ALIGNED`, without torch."""


class ProductKind(StrEnum):
    """Operands of a matrix product."""

    LINEAR = "linear"  # activations by a weight
    GROUPED = "grouped"  # tokens by the weights of their experts, one product for each expert
    SCORES = "scores"  # activations by activations: attention written out
    CONVOLUTION = "convolution"  # the implicit product of a convolution, a row for each position
    ELEMENTWISE = "elementwise"  # no product: a norm of images, m elements of each of n channels


class Product(Record):
    """`count` products of (m, k) by (k, n) in one forward; m grows with the batch.

    2 m n k FLOP each. A backward has two of each: (m, n) x (n, k) and (k, m) x (m, n).

    Attributes:
        count: of a convolution, its groups: they are one kernel.
        forward_bytes, backward_bytes: that are read and written; None: both operands and the
            result, in 16 bits. A convolution reads each map once, whatever its implicit matrix has.
        needs_input_gradient: else a backward has one product of each.
        fewest: multiplications of the best known way over those of the product.
        is_wide: operands are in fp32 whatever the plan's precision.
    """

    kind: ProductKind = ProductKind.LINEAR
    m: Affine
    n: PositiveInt
    k: PositiveInt
    count: PositiveInt = 1
    forward_bytes: Affine | None = None
    backward_bytes: Affine | None = None
    needs_input_gradient: bool = True
    fewest: PositiveFloat = 1.0
    is_wide: bool = False

    def forward_flop(self, samples: float) -> float:
        return 2.0 * self.m.at(samples) * self.n * self.k * self.count


BYTES_PER_CYCLE = 4
"""That a core moves while others do, assumed. Cycles are counted beyond those that bytes take so:
where a core moves more, bytes take less than cycles say, and the other way round."""
ATTENTION_CYCLES, ATTENTION_BACKWARD_CYCLES = (1.1, 140.0, 1 / 28), (2.8, 140.0, 1 / 14)
"""Of the processor's kernel (torch 2.13, fp32): for a score, for a query of a head, and for the
square of a head's width of each query (`python -m tests.benchmarks.core_cycles`)."""


class AttentionKernel(StrEnum):
    """Kernels of softmax(QK^T)V, from the most memory to the least."""

    SCORES = "scores"  # operation by operation; scores are written, masked, and kept
    FUSED_SOFTMAX = "fused_softmax"  # scale, mask and softmax in one kernel; scores are kept
    CPU = "cpu"  # torch's fused kernel for processors, as its FLOP are counted: hidden pairs too
    FLASH1 = "flash1"  # FlashAttention, arXiv:2205.14135: scores never reach memory
    FLASH2 = "flash2"  # arXiv:2307.08691
    FLASH3 = "flash3"  # arXiv:2407.08608, and cuDNN's attention: written for Hopper and later

    @property
    def keeps_scores(self) -> bool:
        return self in (AttentionKernel.SCORES, AttentionKernel.FUSED_SOFTMAX)


class AttentionCall(Record):
    """One call of attention for one sample.

    Attributes:
        heads: of queries; `kv_heads` of keys and values.
        queries, keys: tokens of each; `width` of a query's and key's head, `value_width` of a
            value's.
        is_causal: a query sees the keys before it only; kernels that keep no scores skip the rest.
        dropout: scores are dropped, and the mask is kept with them.
        element_bytes: of queries, keys and values.
        kernel: the one that the costs around it were counted with.
    """

    heads: PositiveInt
    kv_heads: PositiveInt
    queries: PositiveInt
    keys: PositiveInt
    width: PositiveInt
    value_width: PositiveInt
    is_causal: bool
    dropout: bool = False
    element_bytes: PositiveInt = 2
    kernel: AttentionKernel = AttentionKernel.FLASH2

    @property
    def pairs(self) -> float:
        """Scores of all heads."""
        return float(self.heads) * self.queries * self.keys


class AttentionCost(Record):
    """Of a call, for one sample; the fields are those of `UnitCost`.

    `core_bytes` of what is kept are scores: what selective recompute of the core drops.
    """

    forward_flop: NonNegativeFloat
    backward_flop: NonNegativeFloat
    forward_moved_bytes: NonNegativeFloat
    backward_moved_bytes: NonNegativeFloat
    forward_kernels: NonNegativeInt
    backward_kernels: NonNegativeInt
    core_bytes: NonNegativeFloat
    forward_cycles: NonNegativeFloat = 0.0
    backward_cycles: NonNegativeFloat = 0.0


def attention_cost(call: AttentionCall, kernel: AttentionKernel) -> AttentionCost:
    """FLOP, traffic and scores of `call` by `kernel`; queries, keys, values and the output, which
    are kept whatever the kernel, are not counted among what is kept.

    FLOP: two products forward. Backward: four of them where scores are kept, five where they are
    computed again (arXiv:2205.14135, section 3.1). Kernels that keep no scores skip what a causal
    mask hides: half. The processor's kernel is counted as `profiles.capture.capture` counts it: all
    pairs, whatever is hidden, and a backward that reads what it needs once. Beside products and
    bytes it takes cycles of a core, for exponentials and blocks that it packs.

    Bytes of scores, an element of e bytes each: two products write and read them (2e); fused scale,
    mask and softmax read and write (2e), operation by operation three times as much; dropout reads,
    writes and writes a mask of one byte. Kept: probabilities e, with dropout also what is left of
    them and the mask (arXiv:2205.05198, equation 2: 5 bytes a score).
    """
    product = 2.0 * call.pairs * (call.width + call.value_width)
    e = call.element_bytes
    queries = call.heads * call.queries * (call.width + call.value_width)
    keys = call.kv_heads * call.keys * (call.width + call.value_width)
    operands = float(e * (queries + keys))
    if kernel is AttentionKernel.CPU:
        sums = 4.0 * call.heads * call.queries
        moved = operands + sums, 2 * operands + sums

        def cycles(of_score: float, of_query: float, of_square: float, nbytes: float) -> float:
            each = of_score * call.keys + of_query + of_square * call.width**2
            return max(0.0, call.heads * call.queries * each - nbytes / BYTES_PER_CYCLE)

        return AttentionCost(
            forward_flop=product,
            backward_flop=2.5 * product,
            forward_moved_bytes=moved[0],
            backward_moved_bytes=moved[1],
            forward_kernels=1,
            backward_kernels=1,
            core_bytes=sums,
            forward_cycles=cycles(*ATTENTION_CYCLES, moved[0]),
            backward_cycles=cycles(*ATTENTION_BACKWARD_CYCLES, moved[1]),
        )
    if not kernel.keeps_scores:
        seen = 0.5 if call.is_causal and call.queries == call.keys else 1.0
        sums = 4.0 * call.heads * call.queries
        return AttentionCost(
            forward_flop=seen * product,
            backward_flop=2.5 * seen * product,
            forward_moved_bytes=operands + sums,
            backward_moved_bytes=3 * operands + 2 * sums,
            forward_kernels=1,
            backward_kernels=2,
            core_bytes=sums,
        )
    passes, kernels = (2, 1) if kernel is AttentionKernel.FUSED_SOFTMAX else (6, 3)
    dropout = (2 * e + 1) * call.dropout
    return AttentionCost(
        forward_flop=product,
        backward_flop=2 * product,
        forward_moved_bytes=operands + call.pairs * ((2 + passes) * e + dropout),
        backward_moved_bytes=2 * operands + call.pairs * ((4 + 1.5 * passes) * e + dropout),
        forward_kernels=2 + kernels + call.dropout,
        backward_kernels=4 + kernels + call.dropout,
        core_bytes=call.pairs * (e + (e + 1) * call.dropout),
    )


class FusibleKind(StrEnum):
    """Chains of elementwise operations that stacks run as one kernel."""

    NORM = "norm"  # layer norm, RMS norm
    ROTARY = "rotary"  # positions turned into queries and keys
    GATE = "gate"  # activation, gate, bias
    RESIDUAL = "residual"  # bias, dropout and addition to the residual stream
    LOSS = "loss"  # cross-entropy of logits
    LAYOUT = "layout"  # maps turned around convolutions so that channels lie side by side
    ROUTER = "router"  # scores, choice and permutation of tokens for experts


class Fusible(Record):
    """Savings of one kernel in place of a chain of operations, for one sample.

    The costs beside it count the chain operation by operation.

    Attributes:
        activation_bytes: no longer kept from forward to backward.
        transient_bytes: no longer live at the highest moment of the unit.
    """

    kind: FusibleKind
    forward_moved_bytes: NonNegativeFloat = 0.0
    backward_moved_bytes: NonNegativeFloat = 0.0
    forward_kernels: NonNegativeInt = 0
    backward_kernels: NonNegativeInt = 0
    activation_bytes: NonNegativeFloat = 0.0
    transient_bytes: NonNegativeFloat = 0.0
    forward_cycles: NonNegativeFloat = 0.0
    backward_cycles: NonNegativeFloat = 0.0
