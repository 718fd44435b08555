"""Settings of a plan in words: "key=value key=value", read and written."""

from __future__ import annotations

from enum import Enum
from typing import Any, cast

from engines.plan.settings import (
    AXES,
    Aggregation,
    Compression,
    DataParallel,
    Offload,
    OffloadTo,
    Precision,
    Recompute,
    Schedule,
    Updates,
)
from profiles.errors import PlanError, UnknownNameError

AFTER_DEGREES = (
    "microbatch_size",
    "microbatches",
    "accumulation",
    "schedule",
    "stages",
    "recompute",
    "precision",
    "offload",
    "sync_batch_norm",
    "compile",
    "tensor_styles",
    "aggregation",
    "compression",
    "compression_rank",
    "updates",
    "sync_every",
    "servers",
    "backup_workers",
    "max_staleness",
    "offload_to",
)
"""Every setting but the degrees, in the order in which plans are written."""
SETTINGS = (*AXES, "ep", "zero", "data_parallel", *AFTER_DEGREES)
"""Every key that `Plan.parse` knows."""
_SYNONYMS = {
    "tensor": "tp",
    "pipeline": "pp",
    "context": "cp",
    "expert": "ep",
    "data": "dp_replicate",
    "dp": "dp_replicate",
    "ddp": "dp_replicate",
    "fsdp": "dp_shard",
    "dtype": "precision",
    "checkpointing": "recompute",
    "gradient_accumulation": "accumulation",
    "batch_size": "microbatch_size",
    "local_steps": "sync_every",
    "parameter_servers": "servers",
    "staleness": "max_staleness",
}
"""Words that people bring along from other tools, and what they are called here."""
_CHOICES: dict[str, type[Enum]] = {
    "data_parallel": DataParallel,
    "schedule": Schedule,
    "recompute": Recompute,
    "precision": Precision,
    "offload": Offload,
    "offload_to": OffloadTo,
    "aggregation": Aggregation,
    "compression": Compression,
    "updates": Updates,
}
_SWITCHES = ("sync_batch_norm", "compile")
_MAY_BE_ZERO = ("zero", "servers", "backup_workers", "max_staleness")


def parse_settings(text: str) -> dict[str, Any]:
    """The settings that a string names, and only those: a partial plan.

    Keyword arguments for `Plan`, or pins that a search must respect.

    >>> parse_settings("tp=2 recompute=full")
    {'tp': 2, 'recompute': 'full'}

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
        if key not in SETTINGS:
            called = [f"`{key}` is called `{_SYNONYMS[key]}` here"] if key in _SYNONYMS else []
            raise UnknownNameError(
                "plan setting", key, SETTINGS, where=f"plan: {text}", hints=called
            )
        if key in settings:
            raise PlanError(f"`{key}` is given twice", where=f"plan: {text}")
        settings[key] = _read_value(key, value, where=f"plan: {text}")
    return settings


def _read_value(key: str, value: str, *, where: str) -> Any:
    if key in _CHOICES:
        words = [cast(str, choice.value) for choice in _CHOICES[key]]
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
    """A setting's value as `parse_settings` reads it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(item if isinstance(item, str) else ":".join(item) for item in value)
    return str(value)
