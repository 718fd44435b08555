"""Measurements of a training, and the rates that follow them: a part of ParallelModel."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.optim.lr_scheduler import LRScheduler

from engines.data.noise_scale import NoiseMeter, NoiseScale
from engines.offload.pool import OffloadPool
from engines.parallel.scheduling import base_rates
from engines.plan import Plan
from engines.runtime.activity import activity
from engines.runtime.learning_rate import Rates, ScaledRate, ScalingRule
from engines.runtime.mesh import Mesh
from engines.runtime.peak_memory import PeakMemory, gather_peaks, measure_peak
from engines.runtime.rank_times import Imbalance, RankTimer
from engines.runtime.step_bound import StepBound
from engines.runtime.steps import Steps
from engines.runtime.world import World, rank_error_context
from profiles.errors import InputError


class MonitoringMixin:
    """Gradient noise, learning rates, times of ranks, and peak memory of devices.

    Attributes:
        step_bound: how long ranks wait for each other in a step, by `steps`.
    """

    plan: Plan
    offload_pool: OffloadPool | None
    scheduler: LRScheduler | None
    step: int
    step_bound: StepBound
    steps: Steps
    _job: World
    _mesh: Mesh
    _rates: Rates
    _noise: NoiseMeter | None
    _rank_timer: RankTimer

    @property
    def device(self) -> torch.device:
        """This rank's: where parameters, outputs and losses lie."""
        return self._job.device

    @rank_error_context("comparing the times of ranks")
    def imbalance(self) -> Imbalance:
        """Computing and waiting time of each rank in a step; names the slowest.

        All ranks call it, after some steps. `print(parallel.imbalance())` says it in a sentence.

        Raises:
            InputError: fewer than three steps were timed.
            PlanError: a rank's own time cannot be measured under this plan.
        """
        times = self._rank_timer.gather()
        self.steps.pace = times.pace
        return times

    @rank_error_context("comparing the memory of ranks")
    def memory(self) -> PeakMemory:
        """Peak memory of each rank's device, its allocator's reserve, and offloaded bytes.

        All ranks call it, after some steps. `print(parallel.memory())` says it in a sentence;
        `advisor.memory_report(parallel)` compares it with the prediction.
        """
        offloaded_bytes = self.offload_pool.peak_bytes if self.offload_pool is not None else 0
        return gather_peaks(
            measure_peak(self._job.device, offloaded_bytes=offloaded_bytes), self._job
        )

    @property
    def noise_scale(self) -> NoiseScale:
        """The gradient noise scale of the last steps: larger batches than it waste samples.

        Raises:
            InputError: it is not measured, or no step was taken yet.
        """
        scale = None if self._noise is None else self._noise.reading()
        if scale is None:
            asked = "no step was taken yet" if self._noise else "`measure_noise` is off"
            raise InputError(
                f"the gradient noise scale was not measured: {asked}",
                hints=["give `measure_noise=True`, and train with `train_step`"],
            )
        return scale

    def _in_step(self) -> AbstractContextManager[None]:
        """Around a step up to its gradients: other ranks see that this one is in it."""
        bound_s, uneven = self.step_bound.next_s(), self._mesh.uneven_groups
        return activity.in_step(self.step + 1, bound_s=bound_s, uneven=uneven)

    def _measured_noise(self, index: int) -> AbstractContextManager[None]:
        return nullcontext() if self._noise is None else self._noise.microbatch(index)

    def scale_learning_rate(
        self,
        *,
        tuned_at: int,
        batch: int | None = None,
        rule: ScalingRule | str | None = None,
        scheduler: LRScheduler | None = None,
        samples: int | None = None,
    ) -> ScaledRate:
        """Scale the optimizer's rates from the global batch that they were tuned at to the plan's.

        Ratios between parameter groups stay. The same call again changes nothing: rates are always
        those of `tuned_at` times the rule's factor for `batch`.

        Args:
            tuned_at: samples per step for which the optimizer's rates were chosen.
            batch: samples per step from now on; by default the plan's global batch.
            rule: "linear" or "sqrt"; by default linear for SGD and square root for the others.
                "noise" keeps SGD's noise scale g, and needs `samples`.
            scheduler: an existing one, which remembers the rates it started from; by default the
                one that was made by the factory given.
            samples: in the training set, for "noise" and the length of SGD's warm-up in steps.

        Raises:
            InputError: `batch` is not known, or `tuned_at` differs from an earlier call.
        """
        batch = batch or self.plan.global_batch_size
        if batch is None:
            raise InputError(
                "the plan leaves the microbatch open: there is no global batch to scale to",
                where=f"plan: {self.plan}",
                hints=["give `batch=`, the samples of a step over all ranks"],
            )
        rates = base_rates(scheduler or self.scheduler)
        return self._rates.scale(
            tuned_at=tuned_at, batch=batch, rule=rule, base_rates=rates, samples=samples
        )
