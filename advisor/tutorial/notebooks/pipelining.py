"""Pipelining: idle time of each schedule, and the best number of microbatches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from advisor.auto.measure import measured_sweep
from advisor.cost.stages.orders import SPLITS_BACKWARD
from advisor.cost.stages.pipeline import ActionSpan, StageTimes, sends_late, timeline
from advisor.inputs.bundled.gpt import Block
from advisor.tutorial.notebooks.splitting import BATCH, SHAPE, STEPS
from advisor.whatif.sweep.points import Sweep, Swept
from engines.plan import PartialPlan, Schedule
from profiles.machine.cluster import ClusterProfile
from profiles.units import format_percent, format_seconds

STAGES, MICROBATCHES = 4, 8
SCHEDULES = (Schedule.NAIVE, Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE)
REPEATS = 20


@dataclass(frozen=True, slots=True)
class BlockSeconds:
    """Seconds of one block for one microbatch.

    Attributes:
        forward_s: forward.
        input_s: gradient of the input, which the previous stage waits for.
        weight_s: gradient of the weights, which no stage waits for.
    """

    forward_s: float
    input_s: float
    weight_s: float


def time_block() -> BlockSeconds:
    """Time one block of the small GPT on this rank's cores: the fastest of several runs each."""
    block = Block(SHAPE)
    x = torch.randn(BATCH // MICROBATCHES, SHAPE.context, SHAPE.width, requires_grad=True)
    gradient = torch.ones_like(x)

    def backward(wanted: Sequence[Tensor]) -> float:
        out = block(x)
        return _seconds(lambda: torch.autograd.grad(out, wanted, gradient))

    turns = [
        (_seconds(lambda: block(x)), backward([x]), backward([x, *block.parameters()]))
        for _ in range(REPEATS)
    ]
    forward_s, input_s, whole_s = map(min, zip(*turns, strict=True))
    return BlockSeconds(forward_s, min(input_s, whole_s), max(0.0, whole_s - input_s))


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class Drawn:
    """One round of a schedule: each rank's actions, and the bubble fraction."""

    spans: tuple[ActionSpan, ...]
    wall_s: float
    bubble: float


def play_all(block: BlockSeconds) -> dict[Schedule, Drawn]:
    """Simulate a round of every schedule, with equal stages of one block."""
    return {schedule: _played(schedule, block) for schedule in SCHEDULES}


def _played(schedule: Schedule, block: BlockSeconds) -> Drawn:
    splits = schedule in SPLITS_BACKWARD
    times = StageTimes(
        forward_s=(block.forward_s,) * STAGES,
        backward_s=(block.input_s + (0.0 if splits else block.weight_s),) * STAGES,
        weight_s=(block.weight_s if splits else 0.0,) * STAGES,
        send_s=(0.0,) * (STAGES - 1),
    )
    spans = timeline(
        schedule, times, ranks=STAGES, microbatches=MICROBATCHES, waits=sends_late(schedule)
    )
    wall_s = max(span.end_s for span in spans)
    busy_s = sum(span.end_s - span.start_s for span in spans)
    return Drawn(spans, wall_s, 1 - busy_s / (STAGES * wall_s))


def sweep_split_sizes(sizes: Sequence[int], machine: ClusterProfile) -> Sweep:
    """Time the small GPT as a pipeline over this job's ranks, at each microbatch size."""
    return measured_sweep(
        "advisor.tutorial.notebooks.splitting:small_gpt",
        Swept.SPLIT_SIZE,
        [str(size) for size in sizes],
        settings=PartialPlan(pp=machine.world_size, schedule=Schedule.GPIPE),
        global_batch_size=BATCH,
        steps=STEPS,
        cluster=machine,
    )


def summarize_schedules(played: Mapping[Schedule, Drawn]) -> str:
    """Summarize the plot in a sentence."""
    shares = ", ".join(f"{name} {format_percent(drawn.bubble)}" for name, drawn in played.items())
    longest = max(played, key=lambda name: played[name].wall_s)
    shortest = min(played, key=lambda name: played[name].wall_s)
    times = played[longest].wall_s / played[shortest].wall_s
    return (
        f"Of the time of {STAGES} stages is idle: {shares}. {MICROBATCHES} microbatches take"
        f" {times:.1f} times as long under {longest} as under {shortest}."
    )


def summarize_sizes(sweep: Sweep) -> str:
    """Summarize the plot in a sentence."""
    times = {point.label: point.measured.median_s for point in sweep.points if point.measured}
    best = min(times, key=times.__getitem__)
    ends = dict.fromkeys([min(times, key=int), max(times, key=int)])
    ranges = " and ".join(
        f"size {name} takes {format_percent(times[name] / times[best] - 1)} longer"
        for name in ends
        if name != best
    )
    predicted = min(sweep.points, key=lambda point: point.step_s).label
    return (
        f"Split size {best} is fastest here ({format_seconds(times[best])} a step), {ranges}; size"
        f" {predicted} was predicted to be."
    )
