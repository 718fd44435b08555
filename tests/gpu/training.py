"""Steps of whole models on one device: predicted from the data sheet and the bench, measured.

Every model first in bf16 on fp32 masters with AdamW, as most are trained; then with recompute, in
fp32, with other optimizers, at other batches.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from advisor.cost import Estimate
from engines.apply import apply_plan
from engines.parallel import ParallelModel
from engines.plan import Plan
from profiles.capture.batch.call import Batch
from profiles.capture.batch.tree import map_batch
from profiles.errors import PlanError
from tests.gpu.case import Case
from tests.gpu.more_programs import MORE_PROGRAMS
from tests.gpu.predict import (
    EXACT,
    OPTIMIZERS,
    ROUNDED,
    Predicted,
    allocated,
    predicted,
    reserved,
)
from tests.gpu.programs import PROGRAMS
from tests.gpu.results import Row, Unit
from tests.gpu.setting import WARM_UP, DeviceMemory, LeftOutError, Setting
from tests.gpu.subjects import SMALL, SUBJECTS, Subject, captured, fill, filled_in_place
from tests.gpu.unseen import UNSEEN

STEPS, STEPS_S = 8, 4.0  # at most; two in any case


@dataclass(frozen=True, slots=True)
class Variant:
    """A plan of one device, an optimizer, and the share of the subject's rows.

    Attributes:
        tf32: convolutions and recurrent layers in fp32 round to TF32, as cuDNN does unless told.
    """

    settings: str = ""
    optimizer: str = "adamw"
    share: float = 1.0
    tf32: bool = False

    def __str__(self) -> str:
        words = [self.settings or "fp32", self.optimizer]
        words += [f"{self.share:g} x rows"] if self.share != 1 else []
        words += ["convolutions in TF32"] if self.tf32 else []
        return ", ".join(words)


TERMS: dict[str, tuple[Unit, Callable[[Estimate], float]]] = {
    "step": (Unit.SECONDS, lambda e: e.step_s),
    "allocated": (Unit.BYTES, allocated),
    "reserved": (Unit.BYTES, reserved),
}
VARIANTS = (
    Variant("precision=bf16"),
    Variant("precision=bf16 recompute=full"),
    Variant("", "sgd-momentum", 0.5),
    Variant("precision=bf16 recompute=selective accumulation=2", "adamw fused"),
    Variant("precision=bf16", "adafactor", 0.25),
    Variant("recompute=full", "adamw", 0.5),
)
UNSEEN_VARIANT = VARIANTS[0]
PROGRAM_VARIANTS = (VARIANTS[0], Variant("", "sgd-momentum"))
IN_TF32 = Variant("", "sgd-momentum", tf32=True)
CONVOLVE = ("ResNet-18", "inverted bottlenecks", "GRU tagger", "denoiser")
MORE_VARIANTS = (VARIANTS[0], IN_TF32)
EVERY = SUBJECTS | UNSEEN | PROGRAMS | MORE_PROGRAMS
SMALL_VARIANTS = (Variant("accumulation=2"),)


@dataclass(frozen=True, slots=True)
class Step:
    """Measured: the median of some steps, and the peaks while they ran."""

    seconds: float
    allocated_bytes: int
    reserved_bytes: int | None
    held_before_bytes: int


def cases(*, is_small: bool) -> list[Case]:
    subjects = SMALL if is_small else SUBJECTS
    variants = SMALL_VARIANTS if is_small else VARIANTS
    every = [(name, variant) for variant in variants for name in subjects]
    if not is_small:
        every += [(name, UNSEEN_VARIANT) for name in UNSEEN]
        every += [(name, variant) for variant in PROGRAM_VARIANTS for name in PROGRAMS]
        every += [(name, IN_TF32) for name in CONVOLVE]
        every += [(name, variant) for variant in MORE_VARIANTS for name in MORE_PROGRAMS]
    return [
        Case(f"{name}: {variant}", functools.partial(_run, name, variant), is_small=is_small)
        for name, variant in every
    ]


def predicted_again(setting: Setting) -> dict[str, Callable[[], Predicted]]:
    """Of every case, by its name."""
    return {
        f"{name}: {variant}": functools.partial(predictions, setting, subject, name, variant)
        for variant in (*VARIANTS, *PROGRAM_VARIANTS, IN_TF32)
        for name, subject in EVERY.items()
    }


def _run(name: str, variant: Variant, setting: Setting) -> Iterator[Row]:
    subject = (SMALL if setting.is_small else EVERY)[name]
    yield from step_rows(setting, subject, name, variant)


def step_rows(setting: Setting, subject: Subject, name: str, variant: Variant) -> Iterator[Row]:
    """The rows of one model under one variant."""
    step = measured(setting, subject, name, variant)
    given = predictions(setting, subject, name, variant)
    note = ""
    if step.held_before_bytes > 128 * 2**20:  # more than workspaces of products
        note = f"{step.held_before_bytes / 2**20:.0f} MiB were held before"
    figures = {"step": step.seconds, "allocated": step.allocated_bytes}
    if step.reserved_bytes is not None:
        figures["reserved"] = step.reserved_bytes
    for term, figure in figures.items():
        unit, of = TERMS[term]
        yield given.row(term, unit, figure, of, note if unit is Unit.BYTES else "")


def predictions(setting: Setting, subject: Subject, name: str, variant: Variant) -> Predicted:
    """Estimates of a step under a variant."""
    profile = captured(subject, name, on_processor=not setting.is_cuda)
    plan = plan_of(setting, subject, variant)
    stack = ROUNDED if variant.tf32 else EXACT
    return predicted(plan, profile, setting.machines(), optimizer=variant.optimizer, stack=stack)


def plan_of(setting: Setting, subject: Subject, variant: Variant) -> Plan:
    rows = 2 if setting.is_small else max(1, int(subject.rows * variant.share))
    return Plan.parse(f"{variant.settings} microbatch_size={rows}".strip())


def measured(setting: Setting, subject: Subject, name: str, variant: Variant) -> Step:
    """The steps of a model under a variant."""
    torch.backends.cudnn.allow_tf32 = variant.tf32
    plan = plan_of(setting, subject, variant)
    setting.release()
    memory = DeviceMemory(setting)
    before = memory.now()
    with memory.watched():
        parallel = built(setting, subject, name, variant, plan)
        assert plan.microbatch_size is not None
        batch = there(subject.batch(plan.microbatch_size * plan.forwards), setting)
        for _ in range(1 if setting.is_small else WARM_UP):
            parallel.train_step(batch)
    with memory.watched():
        parallel.train_step(batch)
    seconds = timed_steps(setting, parallel, batch)
    step = Step(seconds, memory.peak(), memory.reserved_peak(), before)
    del parallel
    setting.release()
    return step


def built(
    setting: Setting, subject: Subject, name: str, variant: Variant, plan: Plan
) -> ParallelModel:
    """The model under the plan, its weights filled where they lie.

    Raises:
        LeftOutError: the plan is refused, or a package is not installed.
    """
    subject.require()
    profile = captured(subject, name, on_processor=not setting.is_cuda)
    with filled_in_place():
        try:
            return apply_plan(
                subject.module(),
                plan,
                profile=profile,
                cluster=setting.sheet,
                loss_fn=subject.loss_fn,
                optimizer=OPTIMIZERS[variant.optimizer],
                weights=fill,
                on_nonfinite="ignore",  # looking waits for the device in every step
            )
        except PlanError as error:
            raise LeftOutError(f"refused: {error.what}") from error


def there(batch: Batch, setting: Setting) -> Batch:
    """`batch` on the device, where loaders that pin have it copied while a step computes."""
    return map_batch(lambda tensor: tensor.to(setting.device), batch)


def timed_steps(setting: Setting, parallel: ParallelModel, batch: Batch) -> float:
    """The median seconds of a step, back to back: on CUDA by events that are read at the end."""

    def step_s() -> float:
        began = time.perf_counter()
        parallel.train_step(batch)
        setting.synchronize()
        return time.perf_counter() - began

    setting.synchronize()
    durations = [step_s() for _ in range(2)]
    if not setting.is_cuda:
        return statistics.median(durations)
    count = min(STEPS, max(2, int(STEPS_S / min(durations))))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        parallel.train_step(batch)
        event.record()
    setting.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(events)) * 1e-3  # milliseconds
