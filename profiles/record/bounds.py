"""Bounds of numbers that lists are made of, or memory is taken for.

Each is far above the largest that is known, so nobody who means a number is refused; one beyond is
a slip or an attack, and is refused before anything is made of it.
"""

from __future__ import annotations

import math
from numbers import Integral
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le

from profiles.errors import InputError

MOST_DEVICES = 1_000_000
"""Of a job: the largest clusters that are known have 200,000, published trainings took 16,384
(arXiv:2407.21783)."""
MOST_PER_NODE = 1024
"""Devices of one node, and its network cards: the largest have 16."""
MOST_LAYERS = 20_000
"""The deepest network that was trained has 10,000 (arXiv:1806.05393)."""
MOST_UNITS = 2 * MOST_LAYERS
"""Of a profile: an encoder and a decoder."""
MOST_EXPERTS = 65_536
"""Of a layer: Switch-C has 2,048 (arXiv:2101.03961)."""
MOST_MICROBATCHES = 100_000
"""Of a step of one replica: batches of 10^8 tokens are 24,414 sequences of 4,096."""
MOST_BATCH = 1_000_000_000
"""Samples of a step, whose divisors are looked for."""
MOST_COUNT = 10**12
"""Of steps, samples of a training set, and whatever else is counted and never listed."""
MOST_TOKENS = 2**25
"""Of a sequence, whose ids are made: 256 MiB. The longest that are advertised have 10^7."""
MOST_WAIT_S = 86_400
"""Of a step, for data or for the host: a day."""
MOST_TIMEOUT_S = 31_536_000
"""Of waits for other ranks: a year."""
MOST_SCATTER = 1_000
"""Deviation over mean of times of 10^6 ranks, of which one works and the others need no time."""

Devices = Annotated[int, Gt(0), Le(MOST_DEVICES)]
DevicesOrZero = Annotated[int, Ge(0), Le(MOST_DEVICES)]
DevicesOfNode = Annotated[int, Gt(0), Le(MOST_PER_NODE)]
Microbatches = Annotated[int, Gt(0), Le(MOST_MICROBATCHES)]
Batch = Annotated[int, Gt(0), Le(MOST_BATCH)]
Count = Annotated[int, Gt(0), Le(MOST_COUNT)]
CountOrZero = Annotated[int, Ge(0), Le(MOST_COUNT)]
Tokens = Annotated[int, Gt(0), Le(MOST_TOKENS)]
WaitSeconds = Annotated[float, Ge(0), Le(MOST_WAIT_S)]
Scatter = Annotated[float, Ge(0), Le(MOST_SCATTER)]

_DIGITS, _SHOWN = 18, 40  # beyond 18, `int` takes time that grows with their square


def whole_number(text: str, name: str, *, least: int = 1, most: int) -> int:
    """The number that `text` writes in decimal digits; `name` is what it counts.

    Raises:
        InputError: it is something else, or outside `least` to `most`.
    """
    shown = f"`{text[:_SHOWN]}{'...' if len(text) > _SHOWN else ''}`"
    digits = (text.lstrip("0") or "0") if text.isdecimal() else ""
    number = int(digits) if 0 < len(digits) <= _DIGITS else most + 1
    if not digits or number < least:
        wanted = "a positive whole number" if least else "a whole number"
        raise InputError(f"`{name}` wants {wanted}, not {shown}")
    if number > most:
        raise InputError(f"`{name}` = {shown[1:-1]}: {most:,} is the most")
    return number


def require_positive(value: Any, name: str, *, most: float = math.inf) -> None:
    """Check that a number of the user's is above zero; nan is not.

    Raises:
        InputError: it is not, is beyond `most`, or is no number.
    """
    try:
        is_positive = bool(0 < value <= most) and not isinstance(value, bool)
    except TypeError:
        is_positive = False
    if not is_positive:
        wanted = "a number above 0" + (f", {most:,} at most" if most < math.inf else "")
        raise InputError(f"`{name}` wants {wanted}, not `{str(value)[:_SHOWN]}`")


def is_whole(value: Any, *, least: int) -> bool:
    """True for a whole number from `least` on; nan, infinity, 2.5 and True are none."""
    is_number = isinstance(value, Integral) and not isinstance(value, bool)
    return is_number and int(value) >= least
