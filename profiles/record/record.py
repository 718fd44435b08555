"""The base of every value that crosses a file or a user: frozen, strict, with friendly errors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic_core import core_schema

from profiles.errors import FileError, InputError, UnknownNameError
from profiles.lazy import without_collections
from profiles.record.parsing import json_object
from profiles.record.reading import read_text
from profiles.record.writing import write_text

MOST_MISTAKES = 1000
"""Beyond, mistakes are counted and not described: their descriptions take more than the file."""
_MOST_SHOWN = 80


def _fail_fast(schema: Any) -> None:
    """Set it for the collections of a record; records in them are schemas of their own."""
    if isinstance(schema, list):
        for part in schema:
            _fail_fast(part)
    elif isinstance(schema, dict):
        if schema.get("type") in ("dict", "list", "tuple"):
            schema["fail_fast"] = True
        for part in schema.values():
            _fail_fast(part)


class Record(BaseModel):
    """A frozen value: comparable, hashable where its parts are, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """Stop at the first mistake in a collection: descriptions of all would take longer to make
        than the file to read, and only one of them is shown."""
        schema = handler(source)
        _fail_fast(schema)
        return schema

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's, without the cached properties, which follow from the old fields."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied

    @classmethod
    def build(cls, data: Any, *, where: str | None = None) -> Self:
        """Validate `data`; a mistake becomes an `InputError` that names the key.

        Raises:
            UnknownNameError: a key that the record does not have; the near miss is named.
            InputError: a missing key, or a value of the wrong type or range.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise _friendly(error, cls, where) from None


class Document(Record):
    """A record that is saved as a JSON file with a schema version."""

    schema_version: int = 1

    def to_json(self) -> str:
        """The same bytes for the same value, on every machine."""
        return json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str, *, where: str | None = None) -> Self:
        """The inverse of `to_json`.

        Raises:
            FileError: `text` is not JSON, or of a schema version that this release cannot read.
            InputError: keys or values that the document does not have.
        """
        return cls.from_object(json_object(text, where=where), where=where)

    @classmethod
    def from_object(cls, data: dict[str, Any], *, where: str | None = None) -> Self:
        """The document that the content of its file is; as `from_json`."""
        newest = int(cls.model_fields["schema_version"].default)
        version = data.get("schema_version", newest)
        if version != newest:
            raise FileError(
                f"schema version {_shortened(version)} of {cls.__name__} is not readable here (this"
                f" release reads {newest})",
                where=where,
                hints=["write the file again with this release"],
            )
        with without_collections():
            return cls.build(data, where=where)

    def save(self, path: str | os.PathLike[str], *, is_private: bool = False) -> None:
        """Write the JSON file; an interrupted or refused write leaves the old file as it was.

        Args:
            is_private: nobody else may read it.
        """
        write_text(path, self.to_json(), is_private=is_private)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, is_private: bool = False) -> Self:
        """Read a file written by `save`.

        Args:
            is_private: it has to be this user's own, and writable by nobody else.
        """
        return cls.from_json(read_text(path, is_private=is_private), where=str(path))


def _friendly(error: ValidationError, cls: type[BaseModel], where: str | None) -> InputError:
    if error.error_count() > MOST_MISTAKES:
        return InputError(f"{error.error_count():,} of its values cannot be used", where=where)
    # A misspelt key is also a missing one: the misspelling is the cause.
    details = error.errors()
    first = next((item for item in details if item["type"] == "extra_forbidden"), details[0])
    key = ".".join(str(part) for part in first["loc"] if part != "[key]")
    place = f"{where}: {key}" if where and key else where or key or None
    if first["type"] == "extra_forbidden":
        known = _keys_at(cls, first["loc"][:-1])
        return UnknownNameError("key", str(first["loc"][-1]), known, where=place)
    if first["type"] == "missing":
        return InputError(f"`{key}` is missing", where=where or cls.__name__)
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InputError):
        cause.where = cause.where or place
        return cause
    value = first.get("input")
    is_shown = isinstance(value, (str, int, float, bool))
    shown = f"`{key}` = {_shortened(value)}: " if is_shown else ""
    message = first["msg"].removeprefix("Value error, ").replace("valid tuple", "list")
    if first["type"] == "greater_than":
        message = f"more than {first['ctx']['gt']} is wanted"
    if first["type"] == "less_than_equal":
        message = f"{first['ctx']['le']:,} is the most"
    return InputError(shown + message, where=place)


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _keys_at(cls: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """The keys of the record that `path` leads to; the outer record's where that is unclear."""
    current: type[BaseModel] = cls
    for part in path:
        field = current.model_fields.get(str(part))
        if field is None:
            continue
        nested = [field.annotation, *getattr(field.annotation, "__args__", ())]
        records = [t for t in nested if isinstance(t, type) and issubclass(t, BaseModel)]
        if not records:
            return list(current.model_fields)
        current = records[0]
    return list(current.model_fields)
