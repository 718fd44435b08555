"""Runs that were trained on this kind of device: what was predicted of a step beside what it took.

Every run is a file of its own in the user's cache folder, written at once and never changed, so
that writers need not wait for each other; the oldest are removed first.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from profiles.cache import cache_path, every, keep, our_version
from profiles.machine.cluster import ClusterProfile, Constant
from profiles.provenance import Timing
from profiles.record import Document, Record
from profiles.timing.straggler_stats import Pace


class Machine(Record):
    """Conditions of a run; its figures are used only where all of them are equal.

    Attributes:
        device: as a cluster's device is named ("H100-SXM-80GB", "cpu").
        processor, threads: what computed; threads of a CPU rank, 1 on accelerators.
        ranks_per_node: those that share a node, its memory and its links.
        torch, ours: versions; another release of ours may predict by other formulas.
    """

    device: str
    processor: str
    threads: PositiveInt
    ranks_per_node: PositiveInt
    torch: str
    ours: str


class ConstantShare(Record):
    """Share of one constant in a predicted step.

    Attributes:
        seconds: of the step that grow in proportion to `unit_s`.
        unit_s: the constant as the prediction used it: seconds per FLOP, byte or operation.
    """

    seconds: NonNegativeFloat
    unit_s: PositiveFloat


class PeakRecord(Record):
    """A predicted peak of memory beside the measured one, in bytes.

    Attributes:
        predicted_bytes, measured_bytes: of the fullest rank.
        doubt_bytes: half of the predicted range, without that of the context.
        offset_bytes: what earlier runs had added to the predicted context.
    """

    predicted_bytes: NonNegativeFloat
    measured_bytes: NonNegativeFloat
    doubt_bytes: NonNegativeFloat
    offset_bytes: float = 0.0

    @property
    def missed_bytes(self) -> float:
        """Beyond what was predicted when nothing was learnt yet."""
        return self.measured_bytes - self.predicted_bytes + self.offset_bytes


class TrainingRun(Document):
    """One training under one plan.

    Attributes:
        model, fingerprint: its name, and a hash of its profile.
        plan: as `Plan.parse` reads it.
        dtype: what forward and backward ran in.
        predicted_s, parts: the step of even ranks, and what of it rests on which constant; the rest
            on none.
        step: measured, over the steps after the warm-up.
        pace: how its ranks differed; None where they did not compare.
        even_share: of such a step is left where no rank is slower than the others, as predicted.
        peak: None where it was not measured.
        ended_at: UTC.
    """

    machine: Machine
    model: str
    fingerprint: str
    plan: str
    dtype: str
    predicted_s: PositiveFloat
    parts: dict[Constant, ConstantShare] = Field(default_factory=dict)
    step: Timing
    peak: PeakRecord | None = None
    pace: Pace | None = None
    even_share: PositiveFloat = 1.0
    ended_at: str


def machine_of(cluster: ClusterProfile) -> Machine:
    """This process's machine as one of `cluster`; imports torch."""
    import torch

    from profiles.timing.stopwatch import default_device, processor_name, threads_of

    device = default_device() if cluster.device.kind != "cpu" else torch.device("cpu")
    return Machine(
        device=cluster.device.name,
        processor=processor_name(device),
        threads=threads_of(device),
        ranks_per_node=cluster.devices_per_node,
        torch=torch.__version__,
        ours=our_version(),
    )


def keep_run(run: TrainingRun, *, folder: Path | None = None) -> None:
    """Keep it for `runs_on`; a folder that cannot be written is noted in the log.

    Args:
        folder: None is the user's cache folder.
    """
    now = datetime.now(UTC).isoformat()
    keep(cache_path("runs", run.model_dump(mode="json"), now, os.getpid(), folder=folder), run)


def runs_on(machine: Machine, *, folder: Path | None = None) -> tuple[TrainingRun, ...]:
    """Those that were kept of such a machine, oldest first; what cannot be read is noted."""
    runs = [run for run in every("runs", TrainingRun, folder=folder) if run.machine == machine]
    return tuple(sorted(runs, key=lambda run: run.ended_at))
