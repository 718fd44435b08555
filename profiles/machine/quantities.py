"""Numbers as a cluster file writes them: text with a unit, or a table that says where it is from.

What is refused names the rule: times are divided by rates, so those are above 0; shares are often
written in percent.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, NonNegativeFloat, PositiveFloat

from profiles.errors import InputError
from profiles.provenance import Quantity, Source
from profiles.units import (
    parse_bandwidth,
    parse_bytes,
    parse_flop_rate,
    parse_seconds,
    parse_watts,
)

# A card may beat its printed peak a little, by its boost clock; percent begin far above.
LARGEST_SHARE = 1.5


def _quantity(parse: Callable[[str], float], data: object) -> object:
    """A written number, or a table with its source, as the fields of a `Quantity`."""
    if isinstance(data, Quantity) or data is None:
        return data
    fields: dict[str, object] = dict(data) if isinstance(data, dict) else {"value": data}
    value = fields.get("value")
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        fields["value"] = parse(str(value))
    error = fields.get("relative_error", 0.0)
    if isinstance(error, (int, float)) and not 0 <= error <= 1:
        raise InputError(
            f"`relative_error` = {error} is not half a range: a fraction of the value, 1 at most",
            hints=["0.1 is +-10 %"],
        )
    return {"source": Source.USER} | fields


def _above_zero(quantity: Quantity | None) -> Quantity | None:
    """Require values above zero, as divisors of times."""
    if quantity is not None and quantity.value <= 0:
        raise InputError(f"{quantity.value:g} is given where a number above 0 is wanted")
    return quantity


def _share(quantity: Quantity | None) -> Quantity | None:
    """A fraction that somebody may write in percent."""
    if quantity is not None and not 0 < quantity.value <= LARGEST_SHARE:
        raise InputError(
            f"{quantity.value:g} is not a share: above 0, and about 1 at most",
            hints=[f"{quantity.value:g} % is {quantity.value / 100:g}"] * (quantity.value > 1),
        )
    return quantity


def _plain(parse: Callable[[str], float], data: object) -> object:
    is_number = isinstance(data, (str, int, float)) and not isinstance(data, bool)
    return parse(str(data)) if is_number else data


_Positive = AfterValidator(_above_zero)
Memory = Annotated[Quantity | None, BeforeValidator(partial(_quantity, parse_bytes))]
Capacity = Annotated[Memory, _Positive]
Bandwidth = Annotated[
    Quantity | None, BeforeValidator(partial(_quantity, parse_bandwidth)), _Positive
]
Time = Annotated[Quantity | None, BeforeValidator(partial(_quantity, parse_seconds))]
Power = Annotated[Quantity | None, BeforeValidator(partial(_quantity, parse_watts)), _Positive]
Fraction = Annotated[
    Quantity | None, BeforeValidator(partial(_quantity, float)), AfterValidator(_share)
]
Factor = Annotated[Quantity, BeforeValidator(partial(_quantity, float)), _Positive]
FlopRate = Annotated[Quantity, BeforeValidator(partial(_quantity, parse_flop_rate)), _Positive]
PlainTime = Annotated[NonNegativeFloat, BeforeValidator(partial(_plain, parse_seconds))]
PlainBandwidth = Annotated[PositiveFloat, BeforeValidator(partial(_plain, parse_bandwidth))]
