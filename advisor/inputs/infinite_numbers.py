"""Infinite numbers of a config.json: JSON has none, and limits that are no limits have.

The upper `time_step_limit` of Mamba 2 is one. transformers 4 wrote `Infinity`, transformers 5
writes `{"__float__": "Infinity"}`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from profiles.record import Limits, json_file

_CONFIG = Limits(has_infinities=True)
_TAG = "__float__"
_INFINITIES = {float(text): {_TAG: text} for text in ("Infinity", "-Infinity")}


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that may be a config, with infinite numbers as transformers 5 writes them: a
    profile holds it, and a profile is JSON.

    Raises:
        FileError: it cannot be read, or is no JSON object.
    """
    content: dict[str, Any] = _tagged(json_file(path, limits=_CONFIG))
    return content


def as_numbers(value: Any) -> Any:
    """Give what `read_json` read with infinite numbers as Python's."""
    if isinstance(value, list):
        return [as_numbers(each) for each in value]
    if not isinstance(value, dict):
        return value
    for number, tagged in _INFINITIES.items():
        if value == tagged:
            return number
    return {name: as_numbers(each) for name, each in value.items()}


def _tagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_tagged(each) for each in value]
    if isinstance(value, dict):
        return {name: _tagged(each) for name, each in value.items()}
    return _INFINITIES.get(value, value) if isinstance(value, float) else value
