"""A unit of a model as one rank has it: bytes, FLOP and traffic at one microbatch size."""

from __future__ import annotations

from dataclasses import dataclass, replace

from advisor.cost.load.tensor import TensorExchange
from advisor.cost.load.work import NO_WORK, UnitWork
from engines.plan import Recompute
from profiles.model.profile import UnitProfile


@dataclass(frozen=True, slots=True)
class UnitLoad:
    """Load of a unit at one microbatch size, on one rank of the tp axis.

    Attributes:
        name: of the first unit of a run.
        count: equal consecutive units that it represents.
        is_separate: gathered and released on its own by FSDP.
        is_late: if so, it is released and reduced when the whole backward is over.
        is_multiplied: its parameters are operands of products, of which autocast makes copies.
        layer_bytes: outputs of its weight layers, whose gradients are saved where a backward is
            split.
        tensors: trainable parameters.
        new_gradient_bytes: gradients of parameters that are mapped anew in each backward.
        partial_gradient_bytes, partial_tensors: of parameters that are whole on every rank of the
            tp axis while their gradients are parts of a sum.
        partial_expert_bytes: of experts' gradients on a rank that are parts of such a sum.
        unsharded_bytes: further parameters that sharding does not divide: a rank's experts, where
            other ranks hold copies of them. Their gradients take as many bytes.
        whole_bytes, whole_gradient_bytes, whole_tensors: parameters that cannot be sharded, where
            the others are (see `UnitProfile.whole_bytes`); the fields above are without them.
        expert_bytes: parameters that are sharded, or replicated, among ranks with the same experts.
        expert_tensors: trainable parameters of a rank's experts.
        exchanges: the tensor collectives of one unit's forward and backward.
        work: its products and attention.
        runs_once: a block that recompute leaves alone.
        glue: code between units that runs before it. Its memory is counted in the fields above, its
            work is not.
    """

    name: str
    is_block: bool
    is_separate: bool
    is_late: bool
    is_multiplied: bool
    parameter_bytes: float
    gradient_bytes: float
    forward_flop: float
    backward_flop: float
    forward_moved_bytes: float
    backward_moved_bytes: float
    forward_kernels: int
    backward_kernels: int
    activation_bytes: float
    selective_bytes: float
    input_bytes: float
    output_bytes: float
    forward_transient_bytes: float
    backward_transient_bytes: float
    count: int = 1
    forward_cycles: float = 0.0
    backward_cycles: float = 0.0
    layer_bytes: float = 0.0
    tensors: int = 1
    new_gradient_bytes: float = 0.0
    partial_gradient_bytes: float = 0.0
    partial_tensors: int = 0
    partial_expert_bytes: float = 0.0
    unsharded_bytes: float = 0.0
    whole_bytes: float = 0.0
    whole_gradient_bytes: float = 0.0
    whole_tensors: int = 0
    expert_bytes: float = 0.0
    expert_tensors: int = 0
    exchanges: tuple[TensorExchange, ...] = ()
    work: UnitWork = NO_WORK
    runs_once: bool = False
    glue: UnitLoad | None = None

    def runs_again(self, recompute: Recompute) -> bool:
        """Return True if the unit's forward is repeated for its backward."""
        return self.is_block and not self.runs_once and recompute is not Recompute.NONE


def with_glue(unit: UnitLoad, glue: UnitLoad) -> UnitLoad:
    """Load of `unit` and of the code that runs before it, whose activations are kept even if the
    unit is recomputed.

    A moment of the code is as full without the unit: in the forward its inputs are not there yet,
    in the backward what it kept, unless that is its inputs alone, is gone, and their gradient is
    there in place of that of its outputs.
    """
    saved = glue.activation_bytes
    there = glue.forward_transient_bytes - saved - unit.input_bytes
    gone = 0.0 if unit.is_block else unit.activation_bytes - unit.input_bytes
    back = glue.backward_transient_bytes - gone - unit.output_bytes
    return replace(
        unit,
        activation_bytes=unit.activation_bytes + saved,
        selective_bytes=unit.selective_bytes + saved,
        input_bytes=unit.input_bytes + saved,
        forward_transient_bytes=max(unit.forward_transient_bytes, there),
        backward_transient_bytes=max(unit.backward_transient_bytes, back),
        glue=glue,
    )


def with_less(load: UnitLoad, spared: float) -> UnitLoad:
    """Return `load` without weight bytes of other tp ranks."""
    return replace(
        load,
        parameter_bytes=load.parameter_bytes - spared,
        gradient_bytes=load.gradient_bytes - spared,
        partial_gradient_bytes=max(0.0, load.partial_gradient_bytes - spared),
    )


def with_whole(load: UnitLoad, unit: UnitProfile) -> UnitLoad:
    """Take parameters that stay whole out of what is sharded; of split layers the rank's share."""
    share = load.parameter_bytes / unit.parameter_bytes
    whole = share * unit.whole_bytes
    trained = share * sum(shape.nbytes * shape.count for shape in unit.whole_shapes)
    return replace(
        load,
        parameter_bytes=load.parameter_bytes - whole,
        gradient_bytes=load.gradient_bytes - trained,
        whole_bytes=whole,
        whole_gradient_bytes=trained,
        whole_tensors=sum(shape.count for shape in unit.whole_shapes),
    )
