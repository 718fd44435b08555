"""Segments of a model between possible stage borders: seconds and bytes of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from advisor.cost.memory.buffers import KEEPS_PARAMETERS
from advisor.cost.memory.round_shares import round_shares
from advisor.cost.memory.states import zero_level
from advisor.search.microbatch import Microbatch
from advisor.search.space import Floats
from engines.plan import Plan
from profiles.machine.cluster import Device
from profiles.workload.stack import TORCH, Stack


@dataclass(frozen=True, slots=True)
class StageSegments:
    """Amounts of each segment.

    Attributes:
        forward_s, backward_s: of one microbatch, including collectives over the tp axis.
        parameters, gradients: bytes; `root` of the parameters in FSDP2's root group.
        saved: bytes that one microbatch saves from its forward to its backward.
        cast: bytes of autocast's copies of the weights.
        work: bytes while the last unit runs its backward, without the `copy` of its parameters that
            FSDP2 gathers.
        border_activations, border_gradients: bytes that one microbatch sends over the border before
            each segment and after the last: one more than there are segments, zeros at both ends.
        compute_share: share of a parameter's bytes in its copy for compute.
        stack: whose states they are; one with states of its own releases outputs when they are
            sent.
    """

    forward_s: Floats
    backward_s: Floats
    parameters: Floats
    gradients: Floats
    root: Floats
    saved: Floats
    cast: Floats
    work: Floats
    copy: Floats
    border_activations: Floats
    border_gradients: Floats
    compute_share: float
    stack: Stack

    @property
    def seconds(self) -> Floats:
        return self.forward_s + self.backward_s

    @property
    def sent_bytes(self) -> Floats:
        """Bytes of the larger of activations and gradients over each border."""
        return np.maximum(self.border_activations, self.border_gradients)

    def resident_bytes(self, plan: Plan, device: Device, *, state_bytes: float) -> Floats:
        """Bytes of each segment that a rank of `plan` holds throughout a round.

        Args:
            state_bytes: of the optimizer's states for all segments; divided in proportion to
                gradients.
        """
        shares = round_shares(plan, device, compute_share=self.compute_share, stack=self.stack)
        states = shares.optimizer * state_bytes / self.gradients.sum()
        return np.asarray(
            shares.of_parameters * self.parameters
            + (shares.gradients + states) * self.gradients
            + shares.root * self.root
        )

    def work_bytes(self, plan: Plan) -> Floats:
        """Bytes of a stage that ends with each segment, when its last unit begins its backward."""
        kind = plan.data_parallel
        if self.stack.states is not None:
            return self.work + self.copy * (zero_level(plan) == 3)
        return self.work + self.copy * (kind.is_sharded and kind not in KEEPS_PARAMETERS)


def backward_bytes(microbatch: Microbatch, stack: Stack) -> tuple[Floats, Floats]:
    """Bytes that each unit takes while it runs its backward, besides saved ones, and of the copy of
    its parameters that FSDP2 gathers for it."""
    units, share = microbatch.units, microbatch.loads.compute_share
    gradients = np.array([unit.gradient_bytes for unit in units])
    copies = np.array([unit.parameter_bytes * unit.is_separate for unit in units])
    made = share * (stack.states is None or not stack.accumulates_in_product)
    counts = microbatch.counts.astype(int)
    return np.repeat(microbatch.work + made * gradients, counts), np.repeat(share * copies, counts)


def segments_of(
    microbatch: Microbatch, starts: Sequence[int], stack: Stack = TORCH
) -> StageSegments:
    """Segments of a model at a microbatch, beginning with the units at `starts`."""

    def each(amounts: Floats | Sequence[float]) -> Floats:
        return np.repeat(np.asarray(amounts), microbatch.counts.astype(int))

    def summed(amounts: Floats | Sequence[float]) -> Floats:
        return np.asarray(np.add.reduceat(each(amounts), list(starts)))

    units, share = microbatch.units, microbatch.loads.compute_share
    last = [*(start - 1 for start in starts[1:]), -1]
    parameters = np.array([unit.parameter_bytes for unit in units])
    gradients = np.array([unit.gradient_bytes for unit in units])
    is_separate = np.array([unit.is_separate for unit in units])
    is_multiplied = np.array([unit.is_multiplied for unit in units])
    activations_sent, gradients_sent = microbatch.border_bytes
    has_copies = share != 1.0 and stack.states is None
    work, copies = backward_bytes(microbatch, stack)
    return StageSegments(
        forward_s=summed(microbatch.unit_s[0]),
        backward_s=summed(microbatch.unit_s[1]),
        parameters=summed(parameters),
        gradients=summed(gradients),
        root=summed(parameters * ~is_separate),
        saved=summed(microbatch.saved),
        cast=summed(parameters * is_multiplied * share * has_copies),
        work=work[last],
        copy=copies[last],
        border_activations=np.pad(activations_sent, 1),
        border_gradients=np.pad(gradients_sent, 1),
        compute_share=share,
        stack=stack,
    )
