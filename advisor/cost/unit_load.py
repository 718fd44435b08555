"""A unit of a model as one rank has it: bytes, FLOP and traffic at one microbatch size."""

from __future__ import annotations

from dataclasses import dataclass

from advisor.cost.tensor import TensorExchange
from advisor.cost.work import NO_WORK, UnitWork


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
    layer_bytes: float = 0.0
    tensors: int = 1
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
