"""Text with units to base units and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.errors import UnitError
from profiles.units import (
    format_bandwidth,
    format_count,
    format_flop_rate,
    format_gib,
    format_percent,
    format_seconds,
    parse_bandwidth,
    parse_bytes,
    parse_flop_rate,
    parse_seconds,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("80 GiB", 85_899_345_920),
        ("80 GB", 80_000_000_000),
        ("80GB", 80_000_000_000),
        ("512 MiB", 536_870_912),
        ("1.5 KiB", 1536),
        ("7 B", 7),
        ("2e3 bytes", 2000),
    ],
)
def test_binary_and_decimal_bytes_are_distinguished(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("400 Gbit/s", 50e9),
        ("400 Gbps", 50e9),
        ("50 GB/s", 50e9),
        ("100 Mbit/s", 12.5e6),
        ("1 GiB/s", 2**30),
    ],
)
def test_bits_of_a_network_card_become_bytes(text: str, bytes_per_s: float) -> None:
    assert parse_bandwidth(text) == bytes_per_s


@pytest.mark.parametrize(
    ("text", "seconds"), [("5 us", 5e-6), ("5 µs", 5e-6), ("3.2 ms", 3.2e-3), ("2 min", 120.0)]
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("number", [3, 5, 7, 17, 102.8, 767.4])
def test_times_are_rounded_once(number: float) -> None:
    """The nearest float of the decimal number, as Python reads it."""
    assert parse_seconds(f"{number} us") == float(f"{number}e-6")
    assert parse_seconds(f"{number} ns") == float(f"{number}e-9")


def test_flop_rates_are_read_in_both_spellings() -> None:
    assert parse_flop_rate("989 TFLOP/s") == parse_flop_rate("989 TFLOPS") == 989e12


@pytest.mark.parametrize(
    ("parse", "text", "complaint"),
    [
        (parse_bandwidth, "400", "`400` has no unit"),
        (parse_bandwidth, "400 GB", "`400 GB` is not a bandwidth"),
        (parse_bytes, "80 Gbit", "`80 Gbit` is in bits, memory is in bytes"),
        (parse_bytes, "80 apples", "`80 apples` is not an amount of memory"),
        (parse_bytes, "lots", "`lots` is not a number with a unit"),
        (parse_bytes, "-1 GiB", "`-1 GiB` is negative"),
        (parse_seconds, "5", "`5` has no unit"),
        (parse_seconds, "5 GB", "`5 GB` is not a time"),
        (parse_flop_rate, "3 TB/s", "`3 TB/s` is not a FLOP rate"),
    ],
)
def test_a_missing_or_wrong_unit_says_what_to_write(parse, text: str, complaint: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UnitError) as caught:
        parse(text, where="cluster.toml: inter.bandwidth")
    lines = str(caught.value).splitlines()
    assert lines[0] == complaint
    assert lines[1] == "  cluster.toml: inter.bandwidth"
    assert lines[3].startswith("hint: write ")


@given(st.integers(min_value=0, max_value=2**50))
def test_whole_bytes_survive_being_written_plainly(count: int) -> None:
    assert parse_bytes(f"{count} B") == count


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (format_gib(80 * 2**30), "80.0 GiB"),
        (format_gib(2**29), "0.500 GiB"),
        (format_gib(9.994 * 2**30), "9.99 GiB"),
        (format_gib(9.996 * 2**30), "10.0 GiB"),
        (format_gib(0.1 * 2**30), "0.100 GiB"),
        (format_gib(0.01 * 2**30), "10.2 MiB"),
        (format_gib(1536), "1.50 KiB"),
        (format_gib(24), "24 B"),
        (format_gib(2**20, unit=False), "0.001"),
        (format_seconds(0.9996), "1.00 s"),
        (format_seconds(2.5e-7), "250 ns"),
        (format_seconds(0.0), "0 s"),
        (format_seconds(17e-6), "17.0 us"),
        (format_bandwidth(0.05e9), "50.0 MB/s"),
        (format_flop_rate(989e12), "989 TFLOP/s"),
        (format_flop_rate(128.84e9), "129 GFLOP/s"),
        (format_count(124_439_808), "124 M"),
        (format_percent(0.0214), "2.1%"),
        # A number that rounds to the next unit, or to another number of digits, is shown as that.
        (format_gib(0.9994 * 2**30), "0.999 GiB"),
        (format_gib(0.9996 * 2**30), "1.00 GiB"),
        (format_gib(0.0999 * 2**30), "102 MiB"),
        (format_gib(0.09996 * 2**30), "0.100 GiB"),
        (format_gib(0.9996 * 2**20), "1.00 MiB"),
        (format_gib(0.9994 * 2**20), "1023 KiB"),
        (format_gib(0.9996 * 2**10), "1.00 KiB"),
        (format_gib(0.999 * 2**10), "1023 B"),
        (format_seconds(0.9994), "999 ms"),
        (format_seconds(999.6e-6), "1.00 ms"),
        (format_seconds(999.4e-6), "999 us"),
        (format_seconds(999.6e-9), "1.00 us"),
        (format_seconds(999.4e-9), "999 ns"),
        (format_seconds(0.6e-9), "1 ns"),
        (format_seconds(0.4e-9), "0 s"),
        (format_seconds(9.994), "9.99 s"),
        (format_seconds(9.996), "10.0 s"),
        (format_seconds(99.94), "99.9 s"),
        (format_seconds(99.96), "100 s"),
        (format_bandwidth(0.1e9), "0.10 GB/s"),
        (format_bandwidth(0.0999e9), "99.9 MB/s"),
        (format_flop_rate(1e12), "1.00 TFLOP/s"),
        (format_flop_rate(0.9e12), "900 GFLOP/s"),
        (format_count(999), "999"),
        (format_count(999.6), "1.00 k"),
        (format_count(999_400), "999 k"),
        (format_count(999_600), "1.00 M"),
        (format_count(999_600_000), "1.00 B"),
        (format_count(999_600_000_000), "1.00 T"),
        (format_percent(0.0994), "9.9%"),
        (format_percent(0.0996), "10%"),
    ],
)
def test_numbers_are_shown_with_three_digits(shown: str, expected: str) -> None:
    assert shown == expected
