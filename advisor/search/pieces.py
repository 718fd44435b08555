"""What lies between places where a stage of a pipeline may begin, and what stages of it hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from advisor.cost.buffers import KEEPS_PARAMETERS
from advisor.cost.round_shares import round_shares
from advisor.cost.states import zero_level
from advisor.search.microbatch import Microbatch
from advisor.search.space import Floats
from engines.plan import Plan
from profiles.machine.cluster import Device
from profiles.workload.stack import TORCH, Stack

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Amounts of each piece.

    Attributes:
        forward_s, backward_s: of one microbatch, with what is sent along the tp axis.
        parameters, gradients: bytes; `root` of the parameters that FSDP2 gathers as one.
        kept, cast: bytes of one microbatch from forward to backward, and of autocast's copies of
            the weights.
        work: bytes while the last of its units runs backward, beside the `copy` of its parameters
            that FSDP2 makes.
        there, back: bytes that one microbatch sends over the border before each piece and after
            the last: one more than there are pieces, zeros at both ends.
        compute_share: what a copy for computing takes of a parameter.
        stack: whose states they are; one with states of its own hands outputs on, and receives into
            no buffers of a round.
    """

    forward_s: Floats
    backward_s: Floats
    parameters: Floats
    gradients: Floats
    root: Floats
    kept: Floats
    cast: Floats
    work: Floats
    copy: Floats
    there: Floats
    back: Floats
    compute_share: float
    stack: Stack

    @property
    def seconds(self) -> Floats:
        return self.forward_s + self.backward_s

    def always_bytes(self, plan: Plan, device: Device, *, state_bytes: float) -> Floats:
        """Of each piece, what a rank of `plan` holds of it all through a round.

        Args:
            state_bytes: what the optimizer keeps for all of them: in proportion to gradients.
        """
        each = round_shares(plan, device, compute_share=self.compute_share, stack=self.stack)
        states = each.optimizer * state_bytes / self.gradients.sum()
        return np.asarray(
            each.of_parameters * self.parameters
            + (each.gradients + states) * self.gradients
            + each.root * self.root
        )

    def work_bytes(self, plan: Plan) -> Floats:
        """Of a stage that ends with each piece, when the backward of its last unit begins."""
        kind = plan.data_parallel
        if self.stack.states is not None:
            return self.work + self.copy * (zero_level(plan) == 3)
        return self.work + self.copy * (kind.is_sharded and kind not in KEEPS_PARAMETERS)


def pieces_of(of: Microbatch, places: Sequence[int], stack: Stack = TORCH) -> Pieces:
    """The units of a microbatch between `places`, where pieces begin."""

    def each(amounts: Floats | Sequence[float]) -> Floats:
        return np.repeat(np.asarray(amounts), of.counts.astype(int))

    def summed(amounts: Floats | Sequence[float]) -> Floats:
        return np.asarray(np.add.reduceat(each(amounts), list(places)))

    units, share = of.units, of.loads.compute_share
    last = [*(place - 1 for place in places[1:]), -1]
    parameters = np.array([unit.parameter_bytes for unit in units])
    gradients = np.array([unit.gradient_bytes for unit in units])
    is_separate = np.array([unit.is_separate for unit in units])
    there, back = of.crossed
    has_copies = share != 1.0 and stack.states is None
    made = share * (stack.states is None or not stack.accumulates_in_product)
    return Pieces(
        forward_s=summed(of.unit_s[0]),
        backward_s=summed(of.unit_s[1]),
        parameters=summed(parameters),
        gradients=summed(gradients),
        root=summed(parameters * ~is_separate),
        kept=summed(of.kept),
        cast=summed(parameters * share * has_copies),
        work=each(of.work + made * gradients)[last],
        copy=each(share * parameters * is_separate)[last],
        there=np.pad(there, 1),
        back=np.pad(back, 1),
        compute_share=share,
        stack=stack,
    )
