"""Estimate: the predicted cost of a plan, broken down."""

from __future__ import annotations

from math import hypot

from profiles.machine.cluster import Collective
from profiles.record import Record


class Memory(Record):
    """Bytes on one device at its peak, by purpose.

    Attributes:
        parameters, gradients, optimizer: model states on the device.
        activations: saved from forward to backward.
        gathered: unsharded parameters of sharded plans (or bf16 copies under autocast), and the
            buffers of gathers and reductions.
        transient: temporaries and gradients of activations of the running unit, including the loss.
        batch: the batch, and the model's own buffers.
        transfers: buffers of messages that a stack with states of its own keeps; torch's stages'
            are `activations` and `transient`.
        workspaces: scratch memory of matrix-multiply libraries, in the allocator.
        context: runtime and libraries, including the buffers of NCCL or gloo.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    gathered: float = 0.0
    transient: float = 0.0
    batch: float = 0.0
    transfers: float = 0.0
    workspaces: float = 0.0
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
            + self.transfers
            + self.workspaces
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
        optimizer_s: the optimizer step.
        exposed_s: communication not hidden by compute, and the slowdown of compute by hidden
            communication.
        host_s: the same for transfers between device and main memory.
        overlapped_s: hidden communication and transfers.
        launch_s: launches of operations too short to hide them.
        idle_s: waiting for other pipeline stages.
        straggling_s: waiting for the slowest of equal ranks (`Workload.imbalance`).
        host_overhead_s: waiting for data and the host; the workload's own figure.
    """

    compute_s: float = 0.0
    recompute_s: float = 0.0
    optimizer_s: float = 0.0
    exposed_s: float = 0.0
    host_s: float = 0.0
    overlapped_s: float = 0.0
    launch_s: float = 0.0
    idle_s: float = 0.0
    straggling_s: float = 0.0
    host_overhead_s: float = 0.0

    @property
    def total(self) -> float:
        return (
            self.compute_s
            + self.recompute_s
            + self.optimizer_s
            + self.exposed_s
            + self.host_s
            + self.launch_s
            + self.idle_s
            + self.straggling_s
            + self.host_overhead_s
        )

    @property
    def working_s(self) -> float:
        """Computing, and waiting for what others compute."""
        computing = self.compute_s + self.recompute_s + self.optimizer_s
        return computing + self.idle_s + self.straggling_s

    @property
    def sent_s(self) -> float:
        """Waiting for messages and transfers."""
        return self.exposed_s + self.host_s


class Traffic(Record):
    """Equal collectives of one step, per rank.

    Attributes:
        kind: the collective; a broadcast is charged as a send.
        purpose: what is exchanged.
        payload_bytes: of one call: the whole tensor, as `Collective.bus_factor` counts.
        count: calls per step; a fraction if calls are less frequent than steps.
        group_size, stride: number of ranks in a group, and the distance between them; 0 for devices
            of one rank.
        link: tier of the slowest hop.
        seconds: of all calls, if nothing else runs.
    """

    kind: Collective
    purpose: str
    payload_bytes: float
    count: int | float
    group_size: int
    stride: int
    link: str
    seconds: float

    @property
    def bus_bytes(self) -> float:
        """Bytes that each rank puts on its link per step."""
        return self.kind.bus_factor(self.group_size) * self.payload_bytes * self.count


class StageEstimate(Record):
    """One rank of a pipeline, with all its stages.

    Attributes:
        rank: coordinate on the pp axis.
        units: first and last unit of each of its stages.
        peak_bytes, peak_low_bytes, peak_high_bytes, reserved_bytes, states_bytes: as `Estimate`'s.
        in_flight: maximum number of microbatches in flight, summed over its stages.
        forward_s, backward_s: of one microbatch through its stages, including their collectives.
        busy_s, idle_s: of a step, working on microbatches and waiting for other ranks.
    """

    rank: int
    units: tuple[tuple[str, str], ...]
    peak_bytes: float
    peak_low_bytes: float
    peak_high_bytes: float
    reserved_bytes: float
    states_bytes: float
    in_flight: int
    forward_s: float
    backward_s: float
    busy_s: float
    idle_s: float


class Estimate(Record):
    """Predicted cost of one plan.

    Attributes:
        memory: at the fullest moment of the step.
        phase: description of that moment.
        peak_bytes, peak_low_bytes, peak_high_bytes: allocated bytes, with their range; the upper
            end includes allocator slack.
        reserved_bytes: by the allocator: the peak and its fragmentation (1.08 to 1.10 times the
            peak in Mist's README).
        states_bytes: parameters, gradients and optimizer states during the optimizer step.
        loss_bytes: the loss's share of the peak: logits in fp32, those saved for the backward, and
            their gradient. 0 if the peak is at another moment.
        host_bytes: main memory for one rank's offloaded states and activations.
        disk_bytes: the same in files.
        load_bytes: main memory of one rank while the model is loaded.
        step_s, step_low_s, step_high_s: one optimizer step.
        time: its breakdown.
        compute_error, launch_error, communication_error: half-widths of the ranges of its terms, as
            fractions; communication_error applies to transfers to the host too.
        measured_share: fraction of compute time that is based on measured times of the model's own
            blocks.
        mfu: model FLOP (no recompute) over the peak of the dtype; of TF32, where convolutions in
            fp32 run in it.
        samples_per_s, tokens_per_s: of the whole job; tokens None where samples are not text.
        traffic: the collectives that were charged.
        host_traffic_bytes: between device and host, per step and device.
        stages: ranks of the pp axis, fullest first. `memory` is that of the first of them, `time`
            and `traffic` are those of the busiest rank.
    """

    memory: Memory
    phase: str
    peak_bytes: float
    peak_low_bytes: float
    peak_high_bytes: float
    reserved_bytes: float = 0.0
    states_bytes: float
    loss_bytes: float = 0.0
    host_bytes: float = 0.0
    disk_bytes: float = 0.0
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
    stages: tuple[StageEstimate, ...] = ()

    def difference_error_s(self, other: Estimate) -> float:
        """Half-width of the range of the difference between two steps on the same machines.

        A device or a link that is slower than assumed is so for both: the error of a term applies
        to what one plan has more of it. Terms err independently.
        """
        ours, theirs = self.time, other.time
        return hypot(
            (ours.working_s - theirs.working_s) * max(self.compute_error, other.compute_error),
            (ours.launch_s - theirs.launch_s) * max(self.launch_error, other.launch_error),
            (ours.sent_s - theirs.sent_s)
            * max(self.communication_error, other.communication_error),
        )

    def fits(self, usable_bytes: float) -> bool:
        """Return True if the upper end of the peak fits in `usable_bytes`."""
        return self.peak_high_bytes <= usable_bytes
