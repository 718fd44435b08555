"""Large-batch training: the largest safe global batch, and the learning rate that goes with it.

Adding devices usually adds samples to the batch. Up to some size that costs nothing: the gradient
noise falls, and a larger learning rate makes up for fewer steps. Beyond it samples are wasted, or
accuracy is lost.
"""

from __future__ import annotations

from collections.abc import Iterator

from advisor.inputs.facts import Facts
from engines.runtime.learning_rate import ScalingRule, rule_of, warm_up_steps
from profiles.errors import InputError
from profiles.record import Record
from profiles.units import format_count, format_percent

WARMED_UP_IMAGES = 8192
"""Largest batch for ResNet-50 on ImageNet without loss of accuracy, with the linear rule and a
warm-up, on 256 devices (Goyal et al. 2017, arXiv:1706.02677)."""
LARGEST_IMAGES = 32768
"""The same with layer-wise rates (LARS; You et al. 2017, arXiv:1709.05011) or a warm-up by RMSprop
on 1,024 devices (Akiba et al. 2017, arXiv:1711.04325)."""
CRITICAL_TOKENS_AT_LOSS_1 = 2.1e8
CRITICAL_EXPONENT = 0.21
"""The critical batch of language models is 2.1e8 tokens / loss^(1/0.21), in nats a token (Kaplan et
al. 2020, arXiv:2001.08361)."""
LATE_LOSS = 2.0
"""Nats a token late in the training of a model of billions of parameters; assumed. The critical
batch is smaller earlier in training, when the loss is larger."""


class BatchAdvice(Record):
    """Global batch of a decision, with advice.

    Attributes:
        batch: samples per optimizer step over all replicas, the effective batch of every plan.
        tokens: the same in tokens, if samples are sequences.
        steps_per_epoch: if the data set's size is known.
        optimizer, rule: the scaling of its learning rate with the batch.
        warm_up_steps: after scaling up the rate; None: five epochs.
        critical_batch: measured, in samples (`parallel.noise_scale`).
        warnings: sentences, if the batch is larger than what is known to be safe.
    """

    batch: int
    tokens: int | None
    steps_per_epoch: int | None
    optimizer: str
    rule: ScalingRule
    warm_up_steps: int | None
    critical_batch: float | None
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([*self.lines(), *self.warnings])

    def lines(self) -> Iterator[str]:
        """Yield the effective batch, and the learning rate at other batches."""
        tokens = f", {format_count(self.tokens)} tokens" if self.tokens else ""
        epoch = ""
        if self.steps_per_epoch is not None:
            steps = self.steps_per_epoch
            epoch = f"; {steps:,} step{'s' if steps > 1 else ''} per epoch"
        yield f"{self.batch} sample{'s' if self.batch > 1 else ''}{tokens} a step{epoch}"
        factor = self.rule.words("B", str(self.batch))
        yield f"any plan keeps it; at batch B: {self.optimizer}'s rate x {factor}"


def batch_advice(facts: Facts) -> BatchAdvice:
    """Return advice on the global batch of `facts`, for any plan."""
    work = facts.workload
    batch, tokens = work.global_batch_size, facts.tokens_per_sample
    rule = rule_of(work.optimizer.name)
    epoch = None if work.dataset_samples is None else steps_per_epoch(work.dataset_samples, batch)
    return BatchAdvice(
        batch=batch,
        tokens=None if tokens is None else batch * tokens,
        steps_per_epoch=epoch,
        optimizer=work.optimizer.name,
        rule=rule,
        warm_up_steps=warm_up_steps(rule, steps_per_epoch=epoch),
        critical_batch=work.critical_batch_size,
        warnings=tuple(_warnings(facts)),
    )


def _warnings(facts: Facts) -> Iterator[str]:
    work = facts.workload
    batch, tokens = work.global_batch_size, facts.tokens_per_sample
    critical = work.critical_batch_size
    if work.dataset_samples is not None and batch > work.dataset_samples:
        yield (
            f"global batch {batch:,} is more than the {work.dataset_samples:,} samples of the"
            " training set"
        )
    if critical is not None:
        if batch > critical:
            yield (
                f"global batch {batch:,} is {batch / critical:.1f} times the measured critical"
                f" batch of {critical:,.0f}: it takes {1 + batch / critical:.1f} times the fewest"
                f" samples, and twice the batch would save"
                f" {format_percent(1 - steps_ratio(2 * batch / critical, batch / critical))} of the"
                " steps (McCandlish et al. 2018)"
            )
        return
    if tokens is not None:
        safe = critical_tokens(LATE_LOSS)
        if batch * tokens > safe:
            yield (
                f"global batch {batch:,} is {format_count(batch * tokens)} tokens, more than the"
                f" {format_count(safe)} of the critical batch at a loss of {LATE_LOSS} (Kaplan et"
                " al. 2020): `measure_noise=True` measures this model's"
            )
    elif batch > LARGEST_IMAGES:
        yield (
            f"global batch {batch:,} is more than the {LARGEST_IMAGES:,} images that were reported"
            " to train ImageNet (1,024 devices; Akiba et al. 2017, You et al. 2017): expect a loss"
            " of accuracy; `measure_noise=True` measures this model's critical batch"
        )
    elif batch > WARMED_UP_IMAGES:
        yield (
            f"global batch {batch:,} is more than the {WARMED_UP_IMAGES:,} images that the linear"
            " rule and a warm-up were reported to train ImageNet with (256 devices; Goyal et al."
            f" 2017): up to {LARGEST_IMAGES:,} took layer-wise rates (LARS; You et al. 2017) or a"
            " warm-up by RMSprop (1,024 devices; Akiba et al. 2017)"
        )


def steps_per_epoch(samples: int, batch: int) -> int:
    """Return the optimizer steps of an epoch, including a last smaller batch."""
    return -(-samples // batch)


def critical_tokens(loss: float) -> float:
    """Return the critical batch of a language model in tokens, at `loss` nats a token (Kaplan et
    al. 2020).

    >>> format_count(critical_tokens(3.0))
    '1.12 M'
    """
    return float(CRITICAL_TOKENS_AT_LOSS_1 / loss ** (1 / CRITICAL_EXPONENT))


def steps_ratio(one: float, other: float) -> float:
    """Return the ratio of steps to a loss at two batches, given in critical batches: S / S_min is
    1 + B_crit / B (McCandlish et al. 2018, arXiv:1812.06162).

    >>> round(steps_ratio(2.0, 1.0), 3)
    0.75
    """
    return (1 + 1 / one) / (1 + 1 / other)


def noise_scale(learning_rate: float, *, momentum: float = 0.0, samples: int, batch: int) -> float:
    """Return the noise scale of SGD's steps: g = eps / (1 - m) (N / B - 1).

    Args:
        learning_rate, momentum: eps and m of SGD.
        samples, batch: N of the training set, B of a step.

    Source: Smith and Le 2018 (arXiv:1710.06451), Smith, Kindermans, Ying and Le 2018
    (arXiv:1711.00489). `ScalingRule.NOISE` keeps it when devices are added:

    >>> factor = ScalingRule.NOISE.factor(tuned_at=256, batch=8192, samples=1_281_167)
    >>> round(noise_scale(0.1, samples=1_281_167, batch=256), 6)
    500.355859
    >>> round(noise_scale(0.1 * factor, samples=1_281_167, batch=8192), 6)
    500.355859

    Raises:
        InputError: sizes that are not positive, a batch of more than all samples, or momentum
            outside [0, 1).
    """
    if not 1 <= batch <= samples:
        raise InputError(f"the batch must be from 1 to {samples} samples, not {batch}")
    if not 0 <= momentum < 1:
        raise InputError(f"momentum must satisfy 0 <= m < 1, not {momentum}")
    return learning_rate / (1 - momentum) * (samples / batch - 1)
