"""The weight layers of a unit, and the code between them: what splitting them changes.

Tensor parallelism cuts layers, and with them the code that follows: from a column-wise layer to the
row-wise one that takes it up, everything a unit runs and keeps is one rank's share; everywhere else
it is whole on every rank.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import NonNegativeInt, PositiveInt

from profiles.model.affine import Affine
from profiles.model.work import AttentionCall, Fusible, Product
from profiles.record import Record

INPUT = -1
"""Stands for the arguments of the unit among the sources of a layer."""


class LayerKind(StrEnum):
    """Memory layout of a layer's weight."""

    LINEAR = "linear"  # (outputs, inputs)
    TRANSPOSED = "transposed"  # (inputs, outputs): GPT-2's Conv1D
    EMBEDDING = "embedding"  # (rows, width)
    CONVOLUTION = "convolution"  # (outputs, inputs, ...)


class Stretch(Record):
    """Cost of a piece of a unit's code; the fields are those of `UnitCost`.

    What is kept belongs to the stretch that made it, whoever keeps it.

    Attributes:
        parameter_gradient_bytes: of each trainable parameter that it uses beside its layer's (of
            norms between layers), as built. Used on split features, their gradients are parts.
        core_bytes: beside the scores of attention, what recompute of the core drops.
        products: matrix products beside attention's; empty where only their FLOP are known.
        attention, fusible: calls of attention, and what fused kernels would save.
    """

    forward_flop: Affine = Affine()
    backward_flop: Affine = Affine()
    forward_moved_bytes: Affine = Affine()
    backward_moved_bytes: Affine = Affine()
    forward_cycles: Affine = Affine()
    backward_cycles: Affine = Affine()
    activation_bytes: Affine = Affine()
    selective_activation_bytes: Affine = Affine()
    parameter_gradient_bytes: tuple[NonNegativeInt, ...] = ()
    core_bytes: Affine = Affine()
    products: tuple[Product, ...] = ()
    attention: tuple[AttentionCall, ...] = ()
    fusible: tuple[Fusible, ...] = ()


class LayerCost(Record):
    """A linear layer, embedding or convolution with weights of its own, all its calls together.

    Attributes:
        path: in its unit; empty for a unit that is a layer.
        inputs, outputs: features or channels; rows and width of an embedding.
        calls: within one forward.
        weight_bytes, bias_bytes: as built; 0 for one that is tied to an earlier layer's.
        weight_gradient_bytes, bias_gradient_bytes: the same, of what is trained.
        input_bytes, output_bytes: of the tensor that the layer is given (the first, if there are
            more), and of what it returns.
        needs_input_gradient: a gradient goes back through what it is given.
        same_input: the first layer of the unit, by position, that is given the very same tensor;
            itself if there is none before.
        sources: positions of the layers whose outputs reach its input without passing through
            another layer; `INPUT` for the arguments of the unit.
        reaches_output: what the unit returns, and later code takes, takes its output without
            passing through another.
        pieces: features of the tensors that later code takes its outputs apart into (a fused
            query, key and value are three); empty where it does not.
        heads: parts that later code sees in the features of a piece; 1 where it sees none.
        own: the layer itself. Kept: copies of its input, in another dtype say.
        after: from its output, included, to the next layer.
    """

    path: str
    kind: LayerKind
    inputs: PositiveInt
    outputs: PositiveInt
    calls: PositiveInt = 1
    weight_bytes: NonNegativeInt = 0
    bias_bytes: NonNegativeInt = 0
    weight_gradient_bytes: NonNegativeInt = 0
    bias_gradient_bytes: NonNegativeInt = 0
    input_bytes: Affine = Affine()
    output_bytes: Affine = Affine()
    needs_input_gradient: bool = True
    same_input: NonNegativeInt
    sources: tuple[int, ...] = ()
    reaches_output: bool = False
    pieces: tuple[PositiveInt, ...] = ()
    heads: PositiveInt = 1
    own: Stretch = Stretch()
    after: Stretch = Stretch()

    @property
    def is_recomputed(self) -> bool:
        """True if recompute, which stops at the last tensor that backward needs, reaches this
        layer: something is saved behind it, other than what the unit returns."""
        saved = self.after.activation_bytes
        return not self.reaches_output or saved not in (Affine(), self.output_bytes)
