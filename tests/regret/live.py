"""A plan that lives on one rank: built for the case, its tensors counted, its steps timed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from advisor.inputs.facts import Facts
from engines.apply import apply_plan
from engines.data.loader import split_rows_evenly
from engines.parallel import ParallelModel
from engines.plan import DataParallel, Plan
from engines.runtime.world import World, largest_over_ranks
from profiles.capture.batch.call import Batch
from profiles.capture.batch.rows import split_rows
from profiles.capture.batch.tree import batch_tensors
from tests.contract.watch import LiveBytes, gradients, local, optimizer_states
from tests.regret.cases import Case
from tests.regret.decided import sample_of
from tests.regret.models import adam

MOST_STEPS = 6
"""In one go."""


class Limit(LiveBytes):
    """`LiveBytes` that fails an operation, as torch's CPU allocator does, beyond `limit_bytes`."""

    def __init__(self, before: list[Tensor], limit_bytes: float) -> None:
        super().__init__(before)
        self._limit_bytes = limit_bytes

    def after(self, func: Any, args: tuple[Any, ...], result: object) -> None:
        super().after(func, args, result)
        if self.peak_bytes > self._limit_bytes:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:128] err == 0. DefaultCPUAllocator: can't allocate"
                f" memory: {self.peak_bytes} bytes of {self._limit_bytes:.0f}. Error code 12"
            )


@dataclass(frozen=True)
class Live:
    """The model under a plan, and this rank's part of the batch."""

    parallel: ParallelModel
    batch: Batch
    world: World

    @classmethod
    def built(cls, plan: Plan, case: Case, facts: Facts, world: World, folder: Path) -> Live:
        """Build it; all ranks call it. What is offloaded to disk goes to `folder`."""
        subject = case.subject
        torch.manual_seed(1)
        parallel = apply_plan(
            subject.build(),
            plan,
            profile=facts.model,
            cluster=facts.cluster,
            loss_fn=subject.loss_fn,
            optimizer=adam,
            sample=sample_of(case),
            world=world,
            offload_folder=folder,
        )
        replicas = parallel.data_world_size
        parts = split_rows(subject.batch(case.rows), split_rows_evenly(case.rows, replicas))
        return cls(parallel, parts[parallel.data_rank], world)

    def peak_bytes(self, limit_bytes: float) -> float:
        """Most bytes of tensors on any rank in a step, after one that makes lasting ones: states,
        and the buffers that stages receive into.

        Raises:
            RuntimeError: a rank's are more than `limit_bytes`.
        """
        parallel, batch = self.parallel, self.batch
        plan, reduced = parallel.plan, []
        hook = parallel.optimizer.register_step_pre_hook(
            lambda *_: reduced.extend(gradients(parallel))
        )
        lasting = [*map(local, parallel.parameters()), *parallel.module.buffers()]
        watched = Limit([*lasting, *batch_tensors(batch)], limit_bytes)
        del lasting
        with watched:
            parallel.train_step(batch)
        hook.remove()
        # DDP's buckets are made in C++; gradients are views of them, and they stay between steps.
        buckets = reduced if plan.data_parallel is DataParallel.REPLICATE else []
        watched.enrol([*map(local, parallel.parameters()), *optimizer_states(parallel), *buckets])
        del buckets
        reduced.clear()
        watched.peak_bytes = 0
        with watched:
            parallel.train_step(batch)
        return largest_over_ranks([float(watched.peak_bytes)], self.world)[0]

    def steps(self, enough_s: float) -> list[float]:
        """Seconds of some steps, until they are `enough_s` together; of one at least."""
        seconds = [self.timed()]
        while len(seconds) < MOST_STEPS and sum(seconds) < enough_s:
            seconds.append(self.timed())
        return seconds

    def timed(self) -> float:
        """Seconds of a step on the slowest rank; all begin it at once."""
        began = time.perf_counter()
        self.parallel.train_step(self.batch)
        return largest_over_ranks([time.perf_counter() - began], self.world)[0]
