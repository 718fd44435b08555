"""Time, energy and money for a run.

Prices are facts of their owner, none is assumed. Power is the owner's figure, else the printed one
of the board, which is an upper end; where neither is known, neither is energy.
"""

from __future__ import annotations

from math import ceil

from pydantic import NonNegativeFloat

from advisor.cost import Estimate
from advisor.whatif.pareto import HOUR_S
from engines.plan import Plan
from profiles.errors import InputError
from profiles.provenance import Quantity
from profiles.record import Record

KWH_J = 3.6e6


class Span(Record):
    """Amount with the range of the step estimate."""

    value: NonNegativeFloat
    low: NonNegativeFloat
    high: NonNegativeFloat

    def times(self, factor: Quantity) -> Span:
        """Product; both factors may be off."""
        return Span(
            value=self.value * factor.value,
            low=self.low * factor.low,
            high=self.high * factor.high,
        )


class Budget(Record):
    """Time, energy and cost of training on a number of tokens or samples.

    Attributes:
        steps: optimizer steps.
        seconds: of training; loading, checkpoints and failures are not in it.
        device_hours: devices x hours.
        energy_j: at the power that was given, or printed of the board; None where neither is known.
        money: at the price that was given; None where none was.
        notes: what was not known, and the sources of what was.
    """

    plan: Plan
    steps: int
    seconds: Span
    device_hours: Span
    energy_j: Span | None
    money: Span | None
    notes: tuple[str, ...]

    def __str__(self) -> str:
        words = [f"{self.steps} steps", f"{self.seconds.value / HOUR_S:.3g} h"]
        words.append(f"{self.device_hours.value:.3g} device-hours")
        words += [f"{self.energy_j.value / KWH_J:.3g} kWh"] if self.energy_j else []
        words += [f"{self.money.value:.3g} of money"] if self.money else []
        return ", ".join(words)


def budget(
    plan: Plan,
    estimate: Estimate,
    *,
    tokens: float | None = None,
    samples: float | None = None,
    tokens_per_sample: int | None = None,
    watts_per_device: Quantity | None = None,
    price_per_device_hour: Quantity | None = None,
) -> Budget:
    """Time, energy and money for `tokens` or `samples`, by `plan` at its predicted step.

    Args:
        watts_per_device: drawn on average while training, with its share of the node and of
            cooling if those count. A board's printed power is an upper end for the board alone.
        price_per_device_hour: in any currency.

    Raises:
        InputError: neither or both of tokens and samples, one that is not above 0, or tokens of
            samples that are no text.
    """
    wanted = samples_of(tokens, samples, tokens_per_sample)
    batch = plan.global_batch_size
    assert batch is not None  # plans that were estimated name their microbatch
    steps = ceil(wanted / batch)
    seconds = Span(
        value=steps * estimate.step_s,
        low=steps * estimate.step_low_s,
        high=steps * estimate.step_high_s,
    )
    hours = plan.world_size / HOUR_S
    device_hours = Span(
        value=seconds.value * hours, low=seconds.low * hours, high=seconds.high * hours
    )
    notes = []
    energy = money = None
    if watts_per_device is None:
        notes.append("energy: unknown, as no power of a device was given")
    else:
        joule = {"value": watts_per_device.value * HOUR_S}
        energy = device_hours.times(watts_per_device.model_copy(update=joule))
        notes.append(f"energy: at {watts_per_device.value:g} W a device{_of(watts_per_device)}")
    if price_per_device_hour is None:
        notes.append("money: unknown, as no price of a device-hour was given")
    else:
        money = device_hours.times(price_per_device_hour)
        price = price_per_device_hour
        notes.append(f"money: at {price.value:g} a device-hour{_of(price)}")
    return Budget(
        plan=plan,
        steps=steps,
        seconds=seconds,
        device_hours=device_hours,
        energy_j=energy,
        money=money,
        notes=tuple(notes),
    )


def samples_of(tokens: float | None, samples: float | None, tokens_per_sample: int | None) -> float:
    """Number of samples of a run, given in tokens or samples: see `budget`."""
    given = {"tokens": tokens, "samples": samples}
    named = {name: amount for name, amount in given.items() if amount is not None}
    if len(named) != 1:
        raise InputError("how much training? give one of `tokens` and `samples`")
    ((name, amount),) = named.items()
    if not amount > 0:
        raise InputError(f"`{name}` = {amount:g}: more than 0 is wanted")
    if name == "samples":
        return amount
    if tokens_per_sample is None:
        raise InputError("the samples are no text: give `samples`, not `tokens`")
    return amount / tokens_per_sample


def _of(quantity: Quantity) -> str:
    origin = f": {quantity.origin}" if quantity.origin else ""
    return f" ({quantity.source}{origin})"
