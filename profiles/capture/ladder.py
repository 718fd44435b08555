"""Ways to look at a model, the cheapest first: each is tried where the one before cannot follow.

    fake tensors                      shapes alone: any size, no memory
    fake tensors with known values    code may read what follows from the batch and from buffers
    a run on the CPU                  on copies, under a bound of memory and time
    parameters alone                  states exact, the rest a guess

The same operations are counted by the same rules on the first three. A model that fails in a plain
run too is refused; any other can be trained, whatever the rung.
"""

from __future__ import annotations

import copy
import functools
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from profiles.capture.batch.call import call_model, loss_of
from profiles.capture.batch.rows import batch_size, split_rows
from profiles.capture.batch.tree import map_batch
from profiles.capture.fakes.code_states import unchanged_code
from profiles.capture.fakes.mode import EXTREMES, KEPT
from profiles.capture.fakes.tensors import preserved_random_state, replaced
from profiles.capture.frames import model_line, summary
from profiles.capture.model_errors import CannotFollow, LimitExceeded
from profiles.capture.parameter_trace import trace_parameters
from profiles.capture.subject import TracedModel
from profiles.capture.trace_step import StepTrace, trace_step
from profiles.errors import AdvisorError, ModelError
from profiles.machine.host import machine_memory_bytes
from profiles.model.profile import GLUE, Numerics
from profiles.model.source import ATTRIBUTE, RANDOM, CaptureSource, ValueRead

log = logging.getLogger(__name__)

FEW_ROWS = 2  # of a real run: one row is too few for a batch norm
MOST_OF_MEMORY = 1 / 8  # of the machine's, for copies and activations: other ranks wait meanwhile
MOST_SECONDS = 20.0  # of one run

_NO_HOOKS = "saved tensor hooks"
"""In the words of torch.func's refusal of hooks for saved tensors."""

Looks = tuple[StepTrace, StepTrace | None]
"""At the batch, and at twice it where the model takes that."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A model as it was followed. `subject` has the sample, or the rows of it, that was run."""

    subject: TracedModel
    source: CaptureSource
    looks: dict[Numerics, Looks]
    reads: tuple[ValueRead, ...] = ()

    @property
    def first(self) -> StepTrace:
        return next(iter(self.looks.values()))[0]

    @property
    def is_at_one_size(self) -> bool:
        """True if the model did not take twice the rows."""
        return any(second is None for _, second in self.looks.values())


def trace(subject: TracedModel, numerics: Sequence[Numerics], *, every_block: bool) -> Traced:
    """Follow a step under each of `numerics`, on the first rung that follows it under the first.

    Raises:
        ModelError: the model does not run on the sample, or makes nothing that can be trained.
    """
    failures: list[CannotFollow] = []
    others: list[ValueRead] = []
    for source in (CaptureSource.FAKE, CaptureSource.KNOWN_VALUES, CaptureSource.RUN):
        try:
            rung = _rung(subject, source, numerics[0], every_block=every_block)
            looks = {numerics[0]: rung.twice(numerics[0])}
            first = looks[numerics[0]][0]
            reads = [*first.reads, *rung.random_reads(numerics[0], first)]
            reads += rung.attribute_reads(numerics[0], first)
        except CannotFollow as error:
            failures.append(error)
            continue
        except LimitExceeded as error:
            log.info("the model is not run: %s", error)
            continue
        except AdvisorError:
            raise
        except Exception as error:  # of the model's code: of hooks that a module does not take, say
            log.info("looking at %s fails: %r", source, error)
            others.append(ValueRead(unit=GLUE, line=model_line(error), operation=summary(error)))
            continue
        looks |= {kind: rung.twice(kind) for kind in numerics[1:]}
        return Traced(rung.subject, source, looks, _once(reads))
    _require_runs(subject, failures)
    step = trace_parameters(subject)
    looks = dict.fromkeys(numerics, (step, None))
    reads = [*(error.read for error in failures), *others]
    return Traced(subject, CaptureSource.PARAMETERS, looks, _once(reads))


def _once(reads: Sequence[ValueRead]) -> tuple[ValueRead, ...]:
    """One for each line of code."""
    return tuple({(read.unit, read.line or read.operation): read for read in reads}.values())


class _Limit:
    """Bounds of a real run; called after each operation with the bytes that are live."""

    def __init__(self, subject: TracedModel) -> None:
        copies = sum(p.nbytes for p in subject.parameters.values())
        self.most_bytes = MOST_OF_MEMORY * machine_memory_bytes() - copies
        self.start = time.monotonic()
        self(0)

    def __call__(self, live_bytes: int) -> None:
        if live_bytes > self.most_bytes:
            raise LimitExceeded(f"{live_bytes / 2**30:.1f} GiB beside its parameters")
        if time.monotonic() - self.start > MOST_SECONDS:
            raise LimitExceeded(f"more than {MOST_SECONDS:.0f} s")

    def allows(self, step: StepTrace, *, growth: float) -> bool:
        """True if a step that is so many times as large as the one just made is within bounds."""
        seconds = time.monotonic() - self.start
        return growth * seconds < MOST_SECONDS and growth * step.peak_bytes < self.most_bytes


@dataclass(frozen=True, slots=True)
class _Rung:
    subject: TracedModel
    source: CaptureSource
    every_block: bool = True

    def once(
        self, numerics: Numerics, *, times: int = 1, draw: float = KEPT, warm: bool = False
    ) -> StepTrace:
        """Trace a step without repeated blocks; run all of them if blocks that seem equal have side
        effects."""
        if not self.every_block and not warm:
            try:
                step = trace_step(self.subject, numerics, times=times, every_block=False, draw=draw)
            except ModelError:  # of the model, or of what it misses
                pass
            else:
                if step.is_sound:
                    return step
        is_run = self.source is CaptureSource.RUN
        limit = _Limit(self.subject) if is_run else None
        run = functools.partial(
            trace_step,
            self.subject,
            numerics,
            times=times,
            source=self.source,
            draw=draw,
            warm=warm,
        )
        try:
            return run(limit=limit)
        except CannotFollow as error:
            if _NO_HOOKS not in error.what:
                raise
            return run(limit=limit, hooks=False)

    def twice(self, numerics: Numerics) -> Looks:
        """At the sample, and at twice its batch; not every model takes that."""
        first = self.once(numerics)
        try:
            return first, self.once(numerics, times=2)
        except (ModelError, LimitExceeded):
            return first, None

    def random_reads(self, numerics: Numerics, first: StepTrace) -> list[ValueRead]:
        """Draws that decide what is called or trained: other ones are tried."""
        if not first.draws:
            return []
        reads: list[ValueRead] = []
        for seed, draw in enumerate(EXTREMES):
            with preserved_random_state():
                random.seed(seed)
                np.random.seed(seed)
                try:
                    step = self.once(numerics, draw=draw)
                except ModelError:  # without its layers it makes nothing that can be trained
                    return [ValueRead(unit=GLUE, operation=RANDOM)]
            reads += self._differing(RANDOM, first, [step])
        return reads

    def attribute_reads(self, numerics: Numerics, first: StepTrace) -> list[ValueRead]:
        """Attributes that decide what is called or trained: a forward is followed after another."""
        if not first.counts:
            return []
        try:
            return self._differing(ATTRIBUTE, first, [self.once(numerics, warm=True)])
        except ModelError:  # the next forward is not possible, or trains nothing
            return [ValueRead(unit=GLUE, operation=ATTRIBUTE)]

    def _differing(
        self, operation: str, first: StepTrace, others: Sequence[StepTrace]
    ) -> list[ValueRead]:
        """Reads by units whose parameters other steps use, or by glue if these call other units."""
        calls = [call.unit for call in first.flow.calls]
        if any(calls != [call.unit for call in step.flow.calls] for step in others):
            return [ValueRead(unit=GLUE, operation=operation)]
        skipped = set[str]().union(*({*first.unused} ^ {*step.unused} for step in others))
        holders = (
            self.subject.holders[key][0]
            for key, names in self.subject.names.items()
            if names[0] in skipped
        )
        return [ValueRead(unit=unit, operation=operation) for unit in dict.fromkeys(holders)]


def _rung(
    subject: TracedModel, source: CaptureSource, numerics: Numerics, *, every_block: bool
) -> _Rung:
    if source is CaptureSource.FAKE:
        return _Rung(subject, source, every_block)
    if source is CaptureSource.RUN:
        subject = _runnable(subject, numerics)
    return _Rung(subject, source)


def _runnable(subject: TracedModel, numerics: Numerics) -> TracedModel:
    """The subject with as much of its sample as can be run twice over.

    Raises:
        LimitExceeded: not even a few rows can, or its parts are on several devices.
    """
    rows = batch_size(subject.sample, subject.dims)
    if subject.devices:
        raise LimitExceeded("its parts are on several devices")
    limit = _Limit(subject)
    if rows <= FEW_ROWS:
        return subject
    few = copy.copy(subject)
    few.sample = split_rows(subject.sample, [FEW_ROWS, rows - FEW_ROWS], subject.dims)[0]
    try:
        step = trace_step(few, numerics, source=CaptureSource.RUN, limit=limit)
    except CannotFollow:  # it may want as many rows as there are
        return subject
    return subject if limit.allows(step, growth=2 * rows / FEW_ROWS) else few


def _require_runs(subject: TracedModel, failures: Sequence[CannotFollow]) -> None:
    """Tell a model that cannot be watched from one that fails by itself.

    Raises:
        ModelError: it does not run on the sample.
    """
    model, sample = subject.model, subject.sample
    suspects = [error for error in failures if not error.needs_values]
    if not suspects:
        return
    parameters = list(subject.parameters.values())
    if subject.devices or any(p.is_meta for p in parameters):
        raise suspects[0]
    device = parameters[0].device if parameters else torch.device("cpu")
    runs = [model] if subject.loss_fn is None else [model, subject.loss_fn]
    with (
        torch.no_grad(),
        unchanged_code(runs),
        preserved_random_state(),
        replaced(runs, _own_buffer),
    ):
        batch = map_batch(lambda tensor: tensor.to(device), sample)
        try:
            output = call_model(model, batch, has_target=subject.loss_fn is not None)
            if subject.loss_fn is not None:
                loss_of(output, batch, subject.loss_fn)
        except Exception:  # of the model's code, which may raise anything
            raise suspects[0] from None


def _own_buffer(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone()
