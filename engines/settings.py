"""Settings of a plan in words: "key=value key=value", read and written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any, cast

from profiles.errors import PlanError, UnknownNameError

_SWITCHES = ("sync_batch_norm", "compile")
_MAY_BE_ZERO = ("zero", "servers", "backup_workers", "max_staleness")


def read_settings(
    text: str,
    *,
    known: Collection[str],
    choices: Mapping[str, type[Enum]],
    synonyms: Mapping[str, str],
) -> dict[str, Any]:
    """The settings that `text` names.

    Args:
        known: every key.
        choices: keys whose values are those of an enumeration; the others' are numbers and names.
        synonyms: what other tools call a key.

    Raises:
        UnknownNameError: a key or a choice that does not exist; the near miss is named.
        PlanError: a word that is not key=value, a key given twice, a value that is not a number.
    """
    settings: dict[str, Any] = {}
    for word in text.split():
        key, equals, value = word.partition("=")
        if "=" in value:
            raise PlanError(
                f"`{word}` is several settings",
                where=f"plan: {text}",
                hints=[f'separate them by spaces: "{word.replace(",", " ")}"'],
            )
        if not equals or not value:
            raise PlanError(
                f"`{word}` is not a setting",
                where=f"plan: {text}",
                hints=['write settings as "dp_shard=4 microbatches=2"'],
            )
        if key not in known:
            called = [f"`{key}` is called `{synonyms[key]}` here"] if key in synonyms else []
            raise UnknownNameError("plan setting", key, known, where=f"plan: {text}", hints=called)
        if key in settings:
            raise PlanError(f"`{key}` is given twice", where=f"plan: {text}")
        settings[key] = _read_value(key, value, choices, where=f"plan: {text}")
    return settings


def _read_value(key: str, value: str, choices: Mapping[str, type[Enum]], *, where: str) -> Any:
    if key in choices:
        words = [cast(str, choice.value) for choice in choices[key]]
        if value not in words:
            raise UnknownNameError(key, value, words, where=where)
        return value
    if key == "stages":
        return tuple(value.split(","))
    if key == "tensor_styles":
        pairs = [item.partition(":") for item in value.split(",")]
        if not all(style for _, _, style in pairs):
            raise PlanError(
                f"`{value}` is not a list of styles",
                where=where,
                hints=['write "tensor_styles=PATTERN:STYLE,PATTERN:STYLE"'],
            )
        return tuple((pattern, style) for pattern, _, style in pairs)
    if key in _SWITCHES:
        if value not in ("true", "false"):
            raise UnknownNameError(key, value, ("true", "false"), where=where)
        return value == "true"
    if not value.isdecimal() or (int(value) == 0 and key not in _MAY_BE_ZERO):
        raise PlanError(f"`{key}` wants a positive whole number, not `{value}`", where=where)
    return int(value)


def format_setting(value: Any) -> str:
    """A setting's value as `read_settings` reads it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(item if isinstance(item, str) else ":".join(item) for item in value)
    return str(value)
