"""Learning rates that follow the global batch: rules, warm-up, and rescaling.

Torch-free: the advisor gives the advice, `ParallelModel.scale_learning_rate` follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import sqrt
from typing import Any, Protocol

from profiles.errors import InputError, UnknownNameError
from profiles.units import format_count

WARM_UP_EPOCHS = 5
"""From the tuned rate to the scaled one, of SGD (Goyal et al. 2017, section 2.2)."""
USUAL_BETA2 = 0.999
"""torch's default of Adam and its kin."""


class ScalingRule(StrEnum):
    """The factor of a learning rate when the batch grows k times."""

    LINEAR = "linear"  # k: k steps of SGD in one (Krizhevsky 2014; Goyal et al. 2017)
    SQRT = "sqrt"  # sqrt(k): steps that are divided by the gradient's noise (Malladi et al. 2022)
    NOISE = "noise"  # keeps SGD's noise scale: linear while batches are small against the data set

    def factor(self, *, tuned_at: int, batch: int, samples: int | None = None) -> float:
        """From a rate tuned at one batch to that of another; `samples` in the training set.

        Raises:
            InputError: the noise rule without `samples`, or a batch that is larger.
        """
        match self:
            case ScalingRule.LINEAR:
                return batch / tuned_at
            case ScalingRule.SQRT:
                return sqrt(batch / tuned_at)
            case ScalingRule.NOISE:
                return same_noise_factor(tuned_at=tuned_at, batch=batch, samples=samples)

    def words(self, batch: str, base: str) -> str:
        """The factor as the report writes it.

        >>> ScalingRule.SQRT.words("B", "128")
        'sqrt(B / 128)'
        """
        match self:
            case ScalingRule.LINEAR:
                return f"{batch} / {base}"
            case ScalingRule.SQRT:
                return f"sqrt({batch} / {base})"
            case ScalingRule.NOISE:
                return f"(N / {base} - 1) / (N / {batch} - 1)"


def same_noise_factor(*, tuned_at: int, batch: int, samples: int | None) -> float:
    """The factor that keeps g = eps / (1 - m) (N / B - 1) at another batch (Smith and Le 2018,
    arXiv:1710.06451).

    Raises:
        InputError: `samples`, N, is not known, or a batch is larger.
    """
    if samples is None:
        raise InputError(
            "the noise scale depends on the size of the training set",
            hints=["give `samples=`, or take the linear rule"],
        )
    for part in (tuned_at, batch):
        if not 1 <= part <= samples:
            raise InputError(f"a batch of {part} is no part of {samples} samples")
    if batch == samples:
        raise InputError(f"a step on all {samples} samples has no noise to keep, at any rate")
    return (samples / tuned_at - 1) / (samples / batch - 1)


def rule_of(optimizer: str) -> ScalingRule:
    """The rule for an optimizer by its name: linear for SGD and LARS, whose step is proportional
    to the gradient; square root for those that normalise it (Adam and its kin, LAMB, Muon).

    >>> rule_of("sgd-momentum").value, rule_of("adamw").value
    ('linear', 'sqrt')
    """
    in_proportion = optimizer.lower().startswith(("sgd", "lars"))
    return ScalingRule.LINEAR if in_proportion else ScalingRule.SQRT


def warm_up_steps(
    rule: ScalingRule, *, steps_per_epoch: int | None = None, beta2: float = USUAL_BETA2
) -> int | None:
    """Optimizer steps of a linear warm-up; None where it is in epochs of unknown length.

    Five epochs for SGD's rules (Goyal et al. 2017); 2 / (1 - beta2) steps for the square root,
    after which Adam's second moments can be trusted (Ma and Yarats 2019, "On the adequacy of
    untuned warmup for adaptive optimization").
    """
    if rule is ScalingRule.SQRT:
        return round(2 / (1 - beta2))
    return None if steps_per_epoch is None else WARM_UP_EPOCHS * steps_per_epoch


@dataclass(frozen=True, slots=True)
class ScaledRate:
    """The result of `scale_learning_rate`.

    Attributes:
        rule, factor: the rates are now `factor` times what they are at `tuned_at`.
        tuned_at, batch: global batches, in samples.
        before, after: rates of the parameter groups, before and after this call.
        warm_up_steps: to reach them in, where the batch grew; None: five epochs.
    """

    rule: ScalingRule
    factor: float
    tuned_at: int
    batch: int
    before: tuple[float, ...]
    after: tuple[float, ...]
    warm_up_steps: int | None

    def __str__(self) -> str:
        changed = dict.fromkeys(
            f"{old:.4g} -> {new:.4g}" for old, new in zip(self.before, self.after, strict=True)
        )
        text = (
            f"rate x {self.factor:.4g} ({self.rule}: tuned at {self.tuned_at}, batch {self.batch})"
            f": {', '.join(changed)}"
        )
        if self.factor <= 1:
            return text
        span = f"{WARM_UP_EPOCHS} epochs"
        if self.warm_up_steps is not None:
            span = f"{format_count(self.warm_up_steps)} steps"
        return f"{text}; warm up over {span}"


class HasRates(Protocol):
    """The part of a torch optimizer that is used here."""

    param_groups: list[dict[str, Any]]


class Rates:
    """The learning rates of one optimizer, and for which batch they are.

    The first scaling says at what batch they were tuned. The factor since is remembered, so that
    the same call again changes nothing and another batch starts from the tuned rates.
    """

    def __init__(self, optimizer: HasRates) -> None:
        self._optimizer = optimizer
        self._tuned_at: int | None = None
        self._factor = 1.0

    def scale(
        self,
        *,
        tuned_at: int,
        batch: int,
        rule: ScalingRule | str | None = None,
        base_rates: Sequence[list[Any]] = (),
        samples: int | None = None,
    ) -> ScaledRate:
        """Multiply all rates so that they suit `batch`; ratios between groups stay.

        Args:
            base_rates: lists of a scheduler (`scheduler.base_lrs`), changed too.
            samples: in the data set, for the noise rule and the length of the warm-up.

        Raises:
            InputError: a batch that is not positive, another `tuned_at` than before, or the noise
                rule without `samples`.
            UnknownNameError: no such rule.
        """
        if not (tuned_at >= 1 and batch >= 1):  # nan would make all rates nan
            wrong = batch if tuned_at >= 1 else tuned_at
            raise InputError(f"a batch has at least one sample, not {wrong}")
        if self._tuned_at not in (None, tuned_at):
            raise InputError(
                f"the rates were tuned at batch {self._tuned_at}, as an earlier call said, and now"
                f" at {tuned_at}",
                hints=[f"give `tuned_at={self._tuned_at}`, and the new batch as `batch=`"],
            )
        rule = self._rule(rule)
        wanted = rule.factor(tuned_at=tuned_at, batch=batch, samples=samples)
        change, self._factor, self._tuned_at = wanted / self._factor, wanted, tuned_at
        groups = self._optimizer.param_groups
        before = tuple(float(group["lr"]) for group in groups)
        for group in groups:
            for key in ("lr", "initial_lr"):  # schedulers start from the second
                if key in group:
                    group[key] = _times(group[key], change)
        for rates in base_rates:
            rates[:] = [_times(rate, change) for rate in rates]
        return ScaledRate(
            rule=rule,
            factor=wanted,
            tuned_at=tuned_at,
            batch=batch,
            before=before,
            after=tuple(float(group["lr"]) for group in groups),
            warm_up_steps=warm_up_steps(
                rule,
                steps_per_epoch=None if samples is None else -(-samples // batch),
                beta2=max((g["betas"][1] for g in groups if "betas" in g), default=USUAL_BETA2),
            ),
        )

    def _rule(self, asked: ScalingRule | str | None) -> ScalingRule:
        if asked is None:
            # A subclass of SGD is one, whatever it is called.
            kinds = [rule_of(kind.__name__) for kind in type(self._optimizer).__mro__]
            return ScalingRule.LINEAR if ScalingRule.LINEAR in kinds else ScalingRule.SQRT
        try:
            return ScalingRule(asked)
        except ValueError:
            raise UnknownNameError("scaling rule", asked, list(ScalingRule)) from None


def _times(rate: Any, factor: float) -> Any:
    """Rates that are tensors (of captured steps) are changed in place: a graph reads that place."""
    return rate * factor if isinstance(rate, (int, float)) else rate.mul_(factor)
