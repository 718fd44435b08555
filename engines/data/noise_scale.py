"""The gradient noise scale, measured while training: from which batch on more samples are wasted.

Every step has gradients of two batch sizes: each replica's own before they are averaged,
and the average. Their squared norms differ by the noise alone, which falls as one over the samples:

    E |G_B|^2  =  |G|^2 + tr(Sigma) / B        for B = the replica's samples, and the global batch

Two equations, two unknowns (McCandlish, Kaplan, Amodei et al. 2018, arXiv:1812.06162, appendix A).
B_simple = tr(Sigma) / |G|^2 is the critical batch: there, steps are twice the fewest that any batch
needs, and samples twice the fewest.

No forward, backward or message is added: norms are sent with the loss. A step reads the gradients
twice more, 8 bytes a parameter in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from engines.data.replicas import local_part
from engines.plan import Compression, DataParallel, Plan
from profiles.errors import PlanError
from profiles.torch_compat.fsdp import watch_reductions

WINDOW_STEPS = 200
"""The mean is over all steps so far, and later as if over this many: a single step says little,
and the scale grows as the loss falls."""


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """The gradient noise scale over the last steps.

    Attributes:
        covariance_trace: tr(Sigma), of the gradient of a single sample.
        gradient_square: |G|^2, of the gradient over all samples there could be.
        batch: samples of the latest step.
        steps: that were looked at.
    """

    covariance_trace: float
    gradient_square: float
    batch: float
    steps: int

    @property
    def critical_batch(self) -> float:
        """B_simple, in samples; infinite where noise hides the gradient in these steps."""
        if self.gradient_square <= 0:
            return inf
        return max(0.0, self.covariance_trace) / self.gradient_square

    def __str__(self) -> str:
        looked = f"{self.steps} step{'s' if self.steps > 1 else ''} at batch {self.batch:.0f}"
        if self.critical_batch == inf:
            return f"critical batch not known yet: noise hides the gradient ({looked})"
        return (
            f"critical batch {self.critical_batch:.3g} samples ({looked}):"
            f" tr(Sigma) {self.covariance_trace:.3g}, |G|^2 {self.gradient_square:.3g}"
        )


def require_measurable(plan: Plan) -> None:
    """Raises PlanError: the plan has no gradients of two sizes of batch on one rank, and why."""
    where = f"plan: {plan}"
    if not plan.updates_in_step or plan.compression is not Compression.NONE:
        raise PlanError(
            "the noise scale compares a replica's own gradient with the average of all, which this"
            " plan does not make",
            where=where,
            hints=["measure it in a run without `updates`, `servers` and `compression`"],
        )
    if plan.world_size > plan.data_degree:
        axes = plan.said("pp", "cp", "tp")
        raise PlanError(
            f"the noise scale needs a replica's whole gradient on one rank, {axes} spreads it",
            where=where,
            hints=["measure it in a run of data-parallel ranks: it does not depend on the plan"],
        )
    if plan.ep > 1:
        raise PlanError(
            "the noise scale compares a replica's own gradient with the average of all, with"
            f" ep={plan.ep} those of experts are sums over {plan.ep} replicas from the start",
            where=where,
            hints=["measure it in a run with ep=1: it does not depend on the plan"],
        )
    if plan.data_degree == 1 and plan.data_parallel is DataParallel.ZERO1:
        raise PlanError(
            "zero=1 of one rank has no gradients before its last microbatch",
            where=where,
            hints=["measure without it: the noise scale does not depend on the plan"],
        )
    if plan.data_degree == 1 and plan.forwards == 1:
        raise PlanError(
            "the noise scale compares gradients of two sizes of batch, one replica with one"
            " microbatch has one size",
            where=where,
            hints=["plan with accumulation=2 or more replicas"],
        )


class NoiseMeter:
    """Measures the gradients of one rank. Its part of a step:

    `begin`, `microbatch` around each forward and backward, `parts` once gradients are averaged; and
    `note` with the mean over all ranks of what `parts` gave.

    A replica's own gradients are read here: replicas under DDP, as they are added to `.grad` in
    the last backward and before their bucket is sent; shards, in the buffers that go into each
    reduce-scatter; one rank alone, after its first microbatch.

    Raises:
        PlanError: see `require_measurable`.
    """

    def __init__(self, model: nn.Module, plan: Plan, *, device: torch.device) -> None:
        require_measurable(plan)
        self._plan = plan
        self._device = device
        self._parameters = [
            p
            for p in model.parameters()
            if p.requires_grad and (p.dim() or not plan.data_parallel.is_sharded)
        ]
        # Under FSDP2 parameters without dimensions stay whole, and are left out.
        self._shards = _shards(plan)
        self._norms: list[Tensor] = []
        self._seen: list[tuple[Tensor, Tensor]] = []  # squared norm, weight
        self._weights, self._scale = torch.zeros(0), 1.0
        self._samples = 0.0
        self._is_on = self._is_measuring = False
        self._means = torch.zeros(2, dtype=torch.float64, device=device)
        self._steps = 0
        self._batch = 0.0
        if plan.data_parallel.is_sharded:
            assert isinstance(model, FSDPModule)
            watch_reductions(model, self._on_reduction)
        elif self._has_replicas:
            for parameter in self._parameters:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def begin(self, weights: Sequence[float], *, samples: float, scale: float = 1.0) -> None:
        """A step of `samples` over all replicas; `weights` of this rank's microbatches, as
        `MicrobatchCutter.cut` gives them, in losses that are multiplied by `scale`. Gradients that
        are there already are of other samples: such a step is not measured."""
        self._weights = torch.tensor(weights, dtype=torch.float32).to(self._device)
        self._scale, self._samples = scale, samples
        self._is_on = samples > 0 and all(p.grad is None for p in self._parameters)
        self._norms, self._seen = [], []

    @contextmanager
    def microbatch(self, index: int) -> Iterator[None]:
        """Around its forward and backward."""
        is_last = index == len(self._weights) - 1
        self._is_measuring = self._is_on and self._has_replicas and (is_last or self._sends_each)
        yield
        if self._is_on and not self._has_replicas and index == 0:
            self._measure_all()
            self._seen.append((self._square(), self._weights[0]))
        elif self._is_measuring:
            weight = self._weights[index] if self._sends_each else self._weights.sum()
            self._seen.append((self._square(), weight))
        self._is_measuring = False

    def parts(self) -> Tensor:
        """Four numbers, on the device; `note` takes their means over the ranks.

        Squared norm of a small batch's mean gradient and one over its size, both averaged over
        the gradients that this rank read; 1, or 0 where it read none; and its part of the squared
        norm of the global batch's mean gradient.
        """
        sums = torch.zeros(4, device=self._device)
        if not self._is_on:
            return sums
        replicas = self._plan.data_degree
        for square, weight in self._seen:
            # A gradient of n samples was scaled by its weight n W / N. Without weight: no samples.
            there = weight > 0
            safe = torch.where(there, weight, 1.0)
            size = safe * (self._samples / replicas)
            small = square / (safe * self._scale).square()
            seen = torch.stack([small, 1 / size, torch.ones_like(safe)])
            sums[:3] += torch.where(there, seen, 0.0)
        sums[:3] /= max(1, len(self._seen))
        self._measure_all()
        sums[3] = self._square() * self._shards
        return sums

    def note(self, means: Tensor) -> None:
        """Means over all ranks of their `parts`; nothing waits for the device."""
        if not self._is_on:
            return
        means = means.double()
        small, inverse = means[:2] / means[2]
        large = means[3]
        gap = inverse - 1 / self._samples  # 0 where one rank had all samples: one size of batch
        trace = torch.where(gap > 0, (small - large) / gap, self._means[0])
        square = torch.where(gap > 0, large - trace / self._samples, self._means[1])
        self._steps += 1
        share = 1 / min(self._steps, WINDOW_STEPS)
        self._means += share * (torch.stack([trace, square]) - self._means)
        self._batch = self._samples

    def reading(self) -> NoiseScale | None:
        """The means so far; None before the first step. Waits for the device."""
        if not self._steps:
            return None
        trace, square = self._means.tolist()
        return NoiseScale(
            covariance_trace=trace, gradient_square=square, batch=self._batch, steps=self._steps
        )

    @property
    def _has_replicas(self) -> bool:
        return self._plan.data_degree > 1

    @property
    def _sends_each(self) -> bool:
        """True if every microbatch is reduced on its own, not their sum."""
        kind = self._plan.data_parallel
        return kind.is_sharded and kind is not DataParallel.ZERO1

    def _on_reduction(self, gradients: Tensor) -> None:
        if self._is_measuring:
            self._norms.append(_norm(gradients))

    def _on_gradient(self, parameter: Tensor) -> None:
        if self._is_measuring and parameter.grad is not None:
            self._norms.append(_norm(parameter.grad))

    def _measure_all(self) -> None:
        self._norms = [_norm(local_part(p.grad)) for p in self._parameters if p.grad is not None]

    def _square(self) -> Tensor:
        norms, self._norms = self._norms, []
        if not norms:
            return torch.zeros((), device=self._device)
        square: Tensor = torch.stack([norm.to(self._device) for norm in norms]).square().sum()
        return square


def _norm(gradient: Tensor) -> Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float32)
    return norm


def _shards(plan: Plan) -> int:
    """Ranks that hold different parts of each averaged gradient."""
    if not plan.data_parallel.is_sharded:
        return 1
    return plan.dp_shard if plan.dp_shard > 1 else plan.data_degree
