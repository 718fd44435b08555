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
from itertools import chain
from typing import Any

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
        values: numbers, texts and containers together, roughly 100 bytes of memory each. As many
            records as they make are built within a second; a profile of 450 layers has them.
        keys: of one object. Indexes of the largest models have 100,000.
        depth: containers inside one another.
        digits: of one number as written. A profile's largest has 30.
        magnitude: of a number. The largest there is, the FLOP of a training, have 27 digits; beyond
            the default products of a few numbers are infinite, and no number at all.
        characters: of one text.
        has_controls: texts may hold control characters: they are data, never shown.
        has_infinities: numbers may be infinite, as Python writes them and JSON does not.
    """

    values: int = 500_000
    keys: int = 200_000
    depth: int = 64
    digits: int = 100
    magnitude: float = 1e30
    characters: int = MIB
    has_controls: bool = False
    has_infinities: bool = False


DEFAULT = Limits()

# Possessive, and the end is optional: linear also where a text does not end.
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")
# A newline and a tab are text; an escape character would drive the terminal that shows it.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_NUMBERS = {int, float}  # not bool, which is an int of its own type
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


def json_file(
    path: str | os.PathLike[str], *, most: int = MOST_BYTES, limits: Limits = DEFAULT
) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        FileError: see `read_text` and `json_object`.
    """
    return json_object(read_text(path, most=most), where=str(path), limits=limits)


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
    _require_short(bare, limits.digits, where)
    del bare
    hooks = _Hooks(limits.keys, limits.has_infinities, where)
    try:
        data = json.loads(text, parse_constant=hooks.constant, object_pairs_hook=hooks.pairs)
    except json.JSONDecodeError as error:
        place = f"{where or 'text'}, line {error.lineno}, column {error.colno}"
        raise FileError(f"not JSON: {error.msg}", where=place) from None
    _require_plain(data, where, limits)
    return data


@dataclass(frozen=True, slots=True)
class _Hooks:
    """Callbacks of the JSON parser, which takes more than it should."""

    most_keys: int
    has_infinities: bool
    where: str | None

    def constant(self, name: str) -> float:
        if self.has_infinities and name != "NaN":
            return float(name)
        raise FileError(f"`{name}` is not JSON: a finite number is wanted", where=self.where)

    def pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(pairs) > self.most_keys:
            raise FileError(
                f"{len(pairs):,} keys in one object, {self.most_keys:,} are allowed",
                where=self.where,
            )
        data = dict(pairs)
        if len(data) < len(pairs):
            twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise FileError(f"`{twice[:80]}` is given twice in one object", where=self.where)
        return data


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


def _require_short(bare: str, most: int, where: str | None) -> None:
    """Refuse numbers of more than `most` digits, in JSON without its strings."""
    # Tried where a number begins alone: elsewhere each of its digits would begin another try.
    if match := re.search(rf"(?<![-+.0-9eE])[-+.0-9eE]{{{most + 1},}}+", bare):
        digits = match[0]
        raise FileError(
            f"`{digits[:20]}...` has {len(digits):,} digits, {most} are allowed", where=where
        )


def _require_plain(data: Any, where: str | None, limits: Limits) -> None:
    """Refuse texts and numbers that are too long or not what they seem.

    Level by level and kind by kind: all that are allowed are looked at in a tenth of a second.
    """
    level, most = [data], limits.magnitude
    while level:
        kinds = set(map(type, level))
        if str in kinds:
            _require_texts([value for value in level if type(value) is str], where, limits)
        if kinds & _NUMBERS:
            numbers = (value for value in level if type(value) in _NUMBERS)
            wrong = [value for value in numbers if not math.inf > abs(value) <= most]
            if limits.has_infinities:
                wrong = [value for value in wrong if abs(value) != math.inf]
            if wrong:
                is_large = abs(wrong[0]) < math.inf
                said = f"{str(wrong[0])[:20]}...: {most:g} is the most"
                said = said if is_large else f"{wrong[0]}: a finite one is wanted"
                raise FileError(f"a number is {said}", where=where)
        dicts = [value for value in level if type(value) is dict] if dict in kinds else []
        lists = [value for value in level if type(value) is list] if list in kinds else []
        _require_texts([key for each in dicts for key in each], where, limits)
        values = (each.values() for each in dicts)
        level = list(chain.from_iterable(chain(lists, values)))


def _require_texts(texts: list[str], where: str | None, limits: Limits) -> None:
    longest = max(texts, key=len, default="")
    if len(longest) > limits.characters:
        raise FileError(
            f"{longest[:20]!r}... has {len(longest):,} characters,"
            f" {limits.characters:,} are allowed",
            where=where,
        )
    combined = "".join(texts)
    if combined.isprintable():
        return
    refused = {_SURROGATE: "half a character"}
    if not limits.has_controls:
        refused[_CONTROL] = "a control character"
    for pattern, what in refused.items():
        if pattern.search(combined):
            text = next(text for text in texts if pattern.search(text))
            raise FileError(f"{text[:40]!r} has {what}", where=where)
