"""Estimate: what a plan is predicted to cost, taken apart."""

from __future__ import annotations

from profiles.cluster import Collective
from profiles.record import Record


class Memory(Record):
    """Bytes on one device at its fullest moment, by what they are for.

    Attributes:
        parameters, gradients, optimizer: what the device holds of the model states.
        activations: kept from forward to backward.
        gathered: whole parameters of sharded plans (or bf16 copies under autocast), and the buffers
            that gathers and reductions work in.
        transient: the unit in work (the loss too): temporaries, and gradients of activations.
        batch: the batch, and the model's own buffers.
        context: runtime, libraries and process group.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    gathered: float = 0.0
    transient: float = 0.0
    batch: float = 0.0
    context: float = 0.0

    @property
    def total(self) -> float:
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.activations
            + self.gathered
            + self.transient
            + self.batch
            + self.context
        )

    @property
    def states(self) -> float:
        """Parameters, gradients and optimizer states."""
        return self.parameters + self.gradients + self.optimizer


class Time(Record):
    """Seconds of one step on the slowest rank. All but `overlapped_s` add up to the step.

    Attributes:
        compute_s: forward and backward.
        recompute_s: forwards run again in the backward.
        optimizer_s: the update.
        exposed_s: communication that no computing hides, and by how much hidden one slows it.
        host_s: the same for transfers between device and main memory.
        overlapped_s: communication and transfers that are hidden.
        launch_s: operations too short to keep the device busy.
    """

    compute_s: float = 0.0
    recompute_s: float = 0.0
    optimizer_s: float = 0.0
    exposed_s: float = 0.0
    host_s: float = 0.0
    overlapped_s: float = 0.0
    launch_s: float = 0.0

    @property
    def total(self) -> float:
        return (
            self.compute_s
            + self.recompute_s
            + self.optimizer_s
            + self.exposed_s
            + self.host_s
            + self.launch_s
        )


class Traffic(Record):
    """Equal collectives of one step, as every rank takes part in them.

    Attributes:
        kind: the collective; a broadcast is charged as a send.
        purpose: what is exchanged.
        payload_bytes: of one call: the whole tensor, as `Collective.bus_factor` counts.
        count: calls per step.
        group_size, stride: the ranks of a group, and how far apart they are.
        link: the tier that the slowest hop uses.
        seconds: all calls together, if nothing else runs.
    """

    kind: Collective
    purpose: str
    payload_bytes: float
    count: int
    group_size: int
    stride: int
    link: str
    seconds: float

    @property
    def bus_bytes(self) -> float:
        """Bytes that each rank puts on its link per step."""
        return self.kind.bus_factor(self.group_size) * self.payload_bytes * self.count


class Estimate(Record):
    """The predicted cost of one plan.

    Attributes:
        memory: at the fullest moment of the step.
        phase: that moment, in words.
        peak_bytes, peak_low_bytes, peak_high_bytes: prediction and range.
        states_bytes: parameters, gradients and optimizer states held when the optimizer steps.
        loss_bytes: what the loss holds of the peak: the logits in fp32, what is kept of them for
            the backward, their gradient. 0 where the peak is at another moment.
        host_bytes: main memory that one rank's offloaded states take.
        load_bytes: main memory that one rank takes while the model is loaded.
        step_s, step_low_s, step_high_s: one optimizer step.
        time: where it goes.
        compute_error, launch_error, communication_error: half-widths of the ranges of its parts, as
            fractions; communication_error holds for transfers to the host too.
        measured_share: of the time that forward and backward compute, what rests on measured times
            of the model's own blocks.
        mfu: model FLOP (no recompute) over the peak of the dtype.
        samples_per_s, tokens_per_s: of the whole job; tokens None where samples are not text.
        traffic: the collectives that were charged.
        host_traffic_bytes: between device and host per step and device.
    """

    memory: Memory
    phase: str
    peak_bytes: float
    peak_low_bytes: float
    peak_high_bytes: float
    states_bytes: float
    loss_bytes: float = 0.0
    host_bytes: float = 0.0
    load_bytes: float = 0.0
    step_s: float
    step_low_s: float
    step_high_s: float
    time: Time
    compute_error: float
    launch_error: float = 0.0
    communication_error: float
    measured_share: float = 0.0
    mfu: float
    samples_per_s: float
    tokens_per_s: float | None = None
    traffic: tuple[Traffic, ...] = ()
    host_traffic_bytes: float = 0.0

    def fits(self, usable_bytes: float) -> bool:
        """Whether the upper end of the peak stays within `usable_bytes`."""
        return self.peak_high_bytes <= usable_bytes
