"""Real files made hostile: tokens replaced, copied, moved and deleted, then bytes damaged."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from random import Random

NUMBERS = (
    *("0", "-1", "1", "2", "7", "1e3", "0.1", "1.5", "-0.0", "1e9", "1e-9"),
    *("1000000000", "2147483648", "9223372036854775807", "9223372036854775808", "-1000000000"),
    *("99999999999999999999", "1e18", "1e29", "1e30", "1e31", "1e308", "1e309", "-1e308"),
    *("1e-308", "5e-324", "NaN", "Infinity", "-Infinity", "nan", "inf", "-inf", "0x7fffffff"),
    *("9" * 30, "9" * 400, "0." + "1" * 400, "9" * 5000, "1_000_000_000", "٣", "²"),
)
TEXTS = (
    *('""', '" "', '"x"', '"\\u0000"', '"\\ud800"', '"\\u001b[2J"', '"a\\nb"', '"é"', '"\\ud83e"'),
    *(
        '"../../../etc/passwd"',
        '"/dev/zero"',
        '"__class__"',
        '"__dict__"',
        '"os:system"',
        '"%s{0}"',
    ),
    *('"1000000000"', '"1000000000 GiB"', '"1e308 TB"', '"-1 GB/s"', '"0 s"', '"1e309 FLOP/s"'),
    *('"' + "x" * 300 + '"', '"' + "x" * 100_000 + '"', '"' + "[" * 1000 + '"'),
)
VALUES = (
    *("null", "true", "false", "[]", "{}", "[[]]", "[null]", "[0]", '{"": 0}', '{"a": 1, "a": 2}'),
    *("[" * 70 + "]" * 70, "[" * 5000 + "]" * 5000, '{"a":' * 100 + "1" + "}" * 100),
    *("[" + "0," * 3000 + "0]", "{a = {b = {c = 1}}}", "2020-01-01", "1979-05-27T07:32:00Z"),
)
RARE = (
    *("[" * 200_000, '{"a":' * 100_000, '"' + "x" * 2_000_000 + '"', "[" + "1," * 200_000 + "1]"),
    *("{" + ",".join(f'"{n}":{n}' for n in range(150_000)) + "}", "[" + "{}," * 100_000 + "{}]"),
)
"""Tried once in a hundred cases: each takes a tenth of a second."""
BYTES = (
    *(b"\0", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\x1b[2J", b"\r", b"\n", b"\t", b" "),
    *(b'"', b"'", b"\\", b"[", b"]", b"{", b"}", b",", b":", b"=", b".", b"#", b"-", b"x", b"+"),
    *(b'"""', b"'''", b"[[", b"]]", b"\xf0\x9f\xa6\x8a", b"9" * 50, b"[" * 100),
)
_KINDS = (
    re.compile(rb"-?\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?"),
    re.compile(rb'"(?:[^"\\\n]|\\.)*"'),
    re.compile(rb"[A-Za-z_][\w.-]*"),
    re.compile(rb"[\[\]{}:,=+\n]"),
)
Span = tuple[int, int]


def mutated(content: bytes, random: Random) -> bytes:
    """`content` after one to four changes."""
    for _ in range(random.choice((1, 1, 1, 2, 2, 3, 4))):
        content = random.choice(_CHANGES)(content, random)
    return content


@lru_cache(maxsize=512)
def _tokens(content: bytes, kind: int) -> tuple[Span, ...]:
    return tuple(match.span() for match in _KINDS[kind].finditer(content))


def _token(content: bytes, random: Random) -> Span:
    kinds = random.sample(range(len(_KINDS)), len(_KINDS))
    for kind in kinds:
        if spans := _tokens(content, kind):
            return random.choice(spans)
    return 0, len(content)


def _hostile(random: Random) -> bytes:
    if random.random() < 0.01:
        return random.choice(RARE).encode()
    return random.choice(random.choice((NUMBERS, NUMBERS, TEXTS, VALUES))).encode()


def _replace(content: bytes, random: Random) -> bytes:
    start, end = _token(content, random)
    return content[:start] + _hostile(random) + content[end:]


def _replace_number(content: bytes, random: Random) -> bytes:
    """Also those within texts: "400 Gbit/s"."""
    spans = _tokens(content, 0)
    if not spans:
        return _replace(content, random)
    start, end = random.choice(spans)
    return content[:start] + random.choice(NUMBERS).encode() + content[end:]


def _delete(content: bytes, random: Random) -> bytes:
    start, end = _token(content, random)
    return content[:start] + content[end:]


def _swap(content: bytes, random: Random) -> bytes:
    (a, b), (c, d) = sorted((_token(content, random), _token(content, random)))
    if c < b:
        return content
    return content[:a] + content[c:d] + content[b:c] + content[a:b] + content[d:]


def _copy(content: bytes, random: Random) -> bytes:
    """A part once more: a key twice, a list longer, a line again."""
    start, end = _part(content, random)
    place = random.choice((start, end, _token(content, random)[0]))
    return content[:place] + content[start:end] * random.choice((1, 1, 2, 30)) + content[place:]


def _part(content: bytes, random: Random) -> Span:
    """Between two tokens that are not far from each other."""
    start, _ = _token(content, random)
    return start, min(len(content), start + random.randrange(1, 400))


def _cut(content: bytes, random: Random) -> bytes:
    start, end = _part(content, random)
    return content[:start] + content[end:]


def _truncate(content: bytes, random: Random) -> bytes:
    return content[: random.randrange(len(content) + 1)]


def flip(content: bytes, random: Random) -> bytes:
    """One bit, the other way."""
    if not content:
        return b"\0"
    changed = bytearray(content)
    changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _insert(content: bytes, random: Random) -> bytes:
    place = random.choice((0, len(content), random.randrange(len(content) + 1)))
    return content[:place] + random.choice(BYTES) + content[place:]


def _encode(content: bytes, random: Random) -> bytes:
    text = content.decode(errors="replace")
    return text.encode(random.choice(("utf-16", "utf-8-sig", "latin-1", "utf-32")), "replace")


def _nest(content: bytes, random: Random) -> bytes:
    """A value inside of many lists or objects."""
    start, end = _token(content, random)
    depth, (left, right) = (
        random.choice((1, 60, 3000)),
        random.choice(((b"[", b"]"), (b"{a=", b"}"))),
    )
    return content[:start] + left * depth + content[start:end] + right * depth + content[end:]


_CHANGES: tuple[Callable[[bytes, Random], bytes], ...] = (
    *(_replace,) * 6,
    *(_replace_number,) * 5,
    *(_delete, _swap, _copy, _cut) * 2,
    *(_truncate, flip, _insert, _encode, _nest),
)
