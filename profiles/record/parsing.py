"""JSON and TOML of files, within bounds that are checked before memory is taken.

What Python's parsers do not bound is refused here: nesting, which they follow by recursion; digits
of a number; the count of values; and texts that a terminal or a path would take for something else.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from profiles.errors import FileError, a_type
from profiles.record.reading import MOST_BYTES, read_text
from profiles.units import KIB, MIB

MOST_TOML_BYTES = 256 * KIB
"""People write TOML by hand: ten times the longest file here, and a second for Python's parser."""
MOST_KEY_PARTS, MOST_WORD = 16, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that a text may hold; the defaults are beyond all that people write or save.

    Attributes:
        values: numbers, texts and containers together, roughly 100 bytes of memory each.
        depth: containers inside one another.
        digits: of one number as written. A profile's largest has 30.
        magnitude: of a number. The largest there is, the FLOP of a training, have 27 digits; beyond
            the default products of a few numbers are infinite, and no number at all.
        characters: of one text.
        has_controls: texts may hold control characters: they are data, never shown.
    """

    values: int = 1_000_000
    depth: int = 64
    digits: int = 100
    magnitude: float = 1e30
    characters: int = MIB
    has_controls: bool = False


DEFAULT = Limits()

# Possessive, and the end is optional: linear also where a text does not end.
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")
# A newline and a tab are text; an escape character would drive the terminal that shows it.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_TOML_TOKEN = re.compile(
    r'"""[^"\\]*+(?:(?:\\.|"(?!""))[^"\\]*+)*+(?:"{3,5})?'
    r"|'''[^']*+(?:'(?!'')[^']*+)*+(?:'{3,5})?"
    r'|"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+"?'
    r"|'[^'\n]*+'?"
    r"|\#[^\n]*+"
    r"|[\[\]{}.,=\n]"
    r"|[^\s\"'\#\[\]{}.,=]++",
    re.DOTALL,
)


def json_file(path: str | os.PathLike[str], *, most: int = MOST_BYTES) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        FileError: see `read_text` and `json_object`.
    """
    return json_object(read_text(path, most=most), where=str(path))


def json_object(text: str, *, where: str | None = None, limits: Limits = DEFAULT) -> dict[str, Any]:
    """The object that `text` is.

    Raises:
        FileError: see `json_value`; or it is something else than an object.
    """
    data = json_value(text, where=where, limits=limits)
    if not isinstance(data, dict):
        raise FileError(f"a JSON object is wanted, this is {a_type(data)}", where=where)
    return data


def json_value(text: str, *, where: str | None = None, limits: Limits = DEFAULT) -> Any:
    """The value that `text` is. NaN, Infinity and a key given twice are refused: readers of such a
    text disagree on what it says.

    Raises:
        FileError: not JSON, or beyond `limits`.
    """
    bare = _STRING.sub("", text)
    count = bare.count(",") + bare.count("[") + bare.count("{")
    if count > limits.values:
        raise FileError(f"{count:,} values, {limits.values:,} are allowed", where=where)
    _require_shallow(_BRACKET.findall(bare), limits.depth, where)
    del bare
    hooks = _Hooks(limits, where)
    try:
        data = json.loads(
            text,
            parse_int=hooks.integer,
            parse_float=hooks.real,
            parse_constant=hooks.constant,
            object_pairs_hook=hooks.pairs,
        )
    except json.JSONDecodeError as error:
        place = f"{where or 'text'}, line {error.lineno}, column {error.colno}"
        raise FileError(f"not JSON: {error.msg}", where=place) from None
    _require_plain(data, where, limits)
    return data


@dataclass(frozen=True, slots=True)
class _Hooks:
    """Callbacks of the JSON parser, which takes more than it should."""

    limits: Limits
    where: str | None

    def integer(self, digits: str) -> int:
        self._require_short(digits)
        return int(digits)

    def real(self, digits: str) -> float:
        self._require_short(digits)
        return float(digits)

    def constant(self, name: str) -> NoReturn:
        raise FileError(f"`{name}` is not JSON: a finite number is wanted", where=self.where)

    def pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(pairs)
        if len(data) < len(pairs):
            twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise FileError(f"`{twice[:80]}` is given twice in one object", where=self.where)
        return data

    def _require_short(self, digits: str) -> None:
        most = self.limits.digits
        if len(digits) > most:
            raise FileError(
                f"`{digits[:20]}...` has {len(digits):,} digits, {most} are allowed",
                where=self.where,
            )


def toml_table(text: str, *, where: str | None = None) -> dict[str, Any]:
    """The table that a TOML text is.

    Raises:
        FileError: not TOML, or beyond the default `Limits` or those of keys and words.
    """
    if len(text) > MOST_TOML_BYTES:
        raise FileError(
            f"{len(text):,} characters, {MOST_TOML_BYTES:,} are allowed in TOML", where=where
        )
    tokens = _TOML_TOKEN.findall(text)
    _require_shallow((token for token in tokens if token in "[]{}"), DEFAULT.depth, where)
    parts = 1
    for token in tokens:
        if token == ".":
            parts += 1  # of a key, or of a number, which has two
        elif token in "[]{}=,\n":
            parts = 1
        elif len(token) > MOST_WORD and token[0] not in "\"'#":
            raise FileError(
                f"`{token[:20]}...` has {len(token)} characters, {MOST_WORD} are allowed in a"
                " number or a bare key",
                where=where,
            )
        if parts > MOST_KEY_PARTS:
            raise FileError(f"a key of more than {MOST_KEY_PARTS} parts", where=where)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FileError(f"not TOML: {error}", where=where) from None
    _require_plain(data, where, DEFAULT)
    return data


def _require_shallow(brackets: Iterable[str], most: int, where: str | None) -> None:
    depth = 0
    for bracket in brackets:
        if bracket in "[{":
            depth += 1
            if depth > most:
                raise FileError(f"nested more than {most} deep", where=where)
        elif depth:
            depth -= 1


def _require_plain(data: Any, where: str | None, limits: Limits) -> None:
    """Refuse texts and numbers that are too long or not what they seem."""
    rest = [data]
    while rest:
        match rest.pop():
            case str() as value:
                if len(value) > limits.characters:
                    raise FileError(
                        f"{value[:20]!r}... has {len(value):,} characters,"
                        f" {limits.characters:,} are allowed",
                        where=where,
                    )
                if not value.isprintable():
                    _require_text(value, where, limits)
            case dict() as value:
                rest += value
                rest += value.values()
            case list() as value:
                rest += value
            case float() as value if not math.isfinite(value):
                raise FileError(f"a number is {value}: a finite one is wanted", where=where)
            case int() | float() as value if abs(value) > limits.magnitude:
                raise FileError(
                    f"a number is {str(value)[:20]}...: {limits.magnitude:g} is the most",
                    where=where,
                )


def _require_text(value: str, where: str | None, limits: Limits) -> None:
    if _SURROGATE.search(value):
        raise FileError(f"{value[:40]!r} has half a character", where=where)
    if not limits.has_controls and _CONTROL.search(value):
        raise FileError(f"{value[:40]!r} has a control character", where=where)
