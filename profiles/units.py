"""Units at the border: text to base units and back. The only place with a 1024 or a 1e9.

Inside the project everything is bytes, seconds, FLOP, FLOP/s and bytes/s. Files and people write
"80 GiB", "400 Gbit/s" or "989 TFLOP/s"; the screen shows GiB, GB/s, ms.
"""

from __future__ import annotations

import re
from decimal import Decimal

from profiles.errors import UnitError

MOST_NUMBER = 1e30
"""Before a unit: the FLOP of the largest trainings have 27 digits."""
KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": float(KIB), "Mi": float(MIB), "Gi": float(GIB), "Ti": float(TIB)}
# Decimal: "767.4 us" is the float 767.4e-6; 767.4 * 1e-6 is the one above it.
_SECONDS = {
    unit: Decimal(scale)
    for unit, scale in {
        "ns": "1e-9",
        "us": "1e-6",
        "µs": "1e-6",
        "ms": "1e-3",
        "s": "1",
        "min": "60",
        "h": "3600",
    }.items()
}
_NUMBER = re.compile(r"^\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*?)\s*$")


def _split(text: str, where: str | None, example: str) -> tuple[float, str]:
    match = _NUMBER.match(text)
    if not match:
        raise UnitError(f"`{text}` is not a number with a unit", where=where, hints=[example])
    number, unit = float(match[1]), match[2]
    if not unit:
        raise UnitError(f"`{text}` has no unit", where=where, hints=[example])
    if number < 0:
        raise UnitError(f"`{text}` is negative", where=where, hints=[example])
    if number > MOST_NUMBER:
        raise UnitError(f"`{text}` is beyond {MOST_NUMBER:g}", where=where, hints=[example])
    return number, unit


def parse_bytes(text: str, *, where: str | None = None) -> int:
    """Bytes from "80 GiB" (binary) or "80 GB" (decimal); 7 % apart, and kept apart.

    >>> parse_bytes("80 GiB") / parse_bytes("80 GB")
    1.073741824
    """
    example = 'write "80 GiB" (binary) or "80 GB" (decimal)'
    number, unit = _split(text, where, example)
    if unit.endswith(("bit", "b")):
        meant = text.strip().removesuffix("bit").removesuffix("b") + "B"
        raise UnitError(
            f"`{text}` is in bits, memory is in bytes",
            where=where,
            hints=[f'write "{meant}", in bytes', example],
        ) from None
    for suffix in ("bytes", "byte", "B"):
        prefix = unit.removesuffix(suffix)
        if unit.endswith(suffix) and prefix in _BINARY | _DECIMAL:
            return round(number * (_BINARY | _DECIMAL)[prefix])
    raise UnitError(f"`{text}` is not an amount of memory", where=where, hints=[example])


def parse_bandwidth(text: str, *, where: str | None = None) -> float:
    """Bytes per second from "50 GB/s" or "400 Gbit/s" (also "Gbps"): network cards quote bits.

    >>> parse_bandwidth("400 Gbit/s") == parse_bandwidth("50 GB/s")
    True
    """
    example = 'write "400 Gbit/s" or "50 GB/s" (network cards are quoted in bits)'
    number, unit = _split(text, where, example)
    for suffix, divisor in (("bit/s", 8), ("bps", 8), ("b/s", 8), ("B/s", 1), ("Bps", 1)):
        prefix = unit.removesuffix(suffix)
        if unit.endswith(suffix) and prefix in _BINARY | _DECIMAL:
            return number * (_BINARY | _DECIMAL)[prefix] / divisor
    raise UnitError(f"`{text}` is not a bandwidth", where=where, hints=[example])


def parse_flop_rate(text: str, *, where: str | None = None) -> float:
    """FLOP per second from "989 TFLOP/s" (also "TFLOPS").

    >>> parse_flop_rate("989 TFLOP/s")
    989000000000000.0
    """
    example = 'write "989 TFLOP/s"'
    number, unit = _split(text, where, example)
    for suffix in ("FLOP/s", "FLOPS", "flop/s", "flops"):
        prefix = unit.removesuffix(suffix)
        if unit.endswith(suffix) and prefix in _DECIMAL:
            return number * _DECIMAL[prefix]
    raise UnitError(f"`{text}` is not a FLOP rate", where=where, hints=[example])


def parse_seconds(text: str, *, where: str | None = None) -> float:
    """Seconds from "5 us", "3.2 ms" or "2 s".

    >>> parse_seconds("5 us")
    5e-06
    """
    example = 'write "5 us", "3.2 ms" or "2 s"'
    number, unit = _split(text, where, example)
    if unit not in _SECONDS:
        raise UnitError(f"`{text}` is not a time", where=where, hints=[example])
    return float(Decimal(repr(number)) * _SECONDS[unit])


def parse_watts(text: str, *, where: str | None = None) -> float:
    """Watts from "700 W" or "1.2 kW".

    >>> parse_watts("0.7 kW")
    700.0
    """
    example = 'write "700 W" or "1.2 kW"'
    number, unit = _split(text, where, example)
    prefix = unit.removesuffix("W")
    if not unit.endswith("W") or prefix not in _DECIMAL:
        raise UnitError(f"`{text}` is not a power", where=where, hints=[example])
    return number * _DECIMAL[prefix]


def format_gib(count: float, *, unit: bool = True) -> str:
    """Memory as the report shows it: GiB, one decimal (two below 10 GiB, three below 1).

    Below 0.1 GiB in MiB, KiB or bytes; without its unit always in GiB.

    >>> format_gib(44.1 * 2**30), format_gib(4.2 * 2**20)
    ('44.1 GiB', '4.20 MiB')
    """
    value = count / GIB
    if unit and abs(value) < 0.09995:
        return _format_small(count)
    digits = 1 if abs(value) >= 9.995 else 2 if abs(value) >= 0.9995 else 3
    return f"{value:.{digits}f}" + (" GiB" if unit else "")


def _format_small(count: float) -> str:
    for scale, name in ((MIB, "MiB"), (KIB, "KiB")):
        if abs(count) >= 0.9995 * scale:
            return f"{_three_digits(count / scale)} {name}"
    return f"{count:.0f} B"


def format_seconds(seconds: float, *, unit: bool = True) -> str:
    """Time with three significant digits: "8.31 s", "412 ms", "17.0 us", "250 ns".

    >>> format_seconds(0.4117)
    '412 ms'
    """
    for scale, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= 0.9995 * scale:
            return _three_digits(seconds / scale) + (f" {name}" if unit else "")
    if abs(seconds) < 0.5e-9:  # sums that cancel leave some
        return "0" + (" s" if unit else "")
    return f"{seconds * 1e9:.0f}" + (" ns" if unit else "")


def format_bandwidth(bytes_per_s: float) -> str:
    """Links in GB/s (decimal, as data sheets), MB/s below 0.1 GB/s.

    >>> format_bandwidth(50e9)
    '50.0 GB/s'
    """
    if bytes_per_s >= 0.1e9:
        return f"{_three_digits(bytes_per_s / 1e9)} GB/s"
    return f"{_three_digits(bytes_per_s / 1e6)} MB/s"


def format_flop_rate(flop_per_s: float) -> str:
    """Compute rates in TFLOP/s, GFLOP/s below 1 TFLOP/s.

    >>> format_flop_rate(989e12)
    '989 TFLOP/s'
    """
    if flop_per_s >= 1e12:
        return f"{_three_digits(flop_per_s / 1e12)} TFLOP/s"
    return f"{_three_digits(flop_per_s / 1e9)} GFLOP/s"


def format_count(count: float) -> str:
    """Large counts with a suffix: "6.74 B" parameters, "126 k" tokens.

    >>> format_count(6_738_415_616)
    '6.74 B'
    """
    for scale, suffix in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if abs(count) >= 0.9995 * scale:
            return _three_digits(count / scale) + suffix
    return f"{count:.0f}"


def format_percent(fraction: float) -> str:
    """A fraction as a whole percentage, one decimal below ten.

    >>> format_percent(0.437), format_percent(0.0214)
    ('44%', '2.1%')
    """
    return f"{fraction:.0%}" if abs(fraction) >= 0.0995 else f"{fraction:.1%}"


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    digits = 0 if magnitude >= 99.95 else 1 if magnitude >= 9.995 else 2
    return f"{value:.{digits}f}"
