"""The base of every value that crosses a file or a user: frozen, strict, with friendly errors."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from profiles.errors import FileError, InputError, UnknownNameError


class Record(BaseModel):
    """A frozen value: comparable, hashable where its parts are, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

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
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            place = f"{where or 'text'}, line {error.lineno}, column {error.colno}"
            raise FileError(f"not JSON: {error.msg}", where=place) from None
        if not isinstance(data, dict):
            raise FileError(
                f"a JSON object is wanted, this is a {type(data).__name__}", where=where
            )
        newest = int(cls.model_fields["schema_version"].default)
        version = data.get("schema_version", newest)
        if version != newest:
            raise FileError(
                f"schema version {version} of {cls.__name__} is not readable here (this release"
                f" reads {newest})",
                where=where,
                hints=["write the file again with this release"],
            )
        return cls.build(data, where=where)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON file; an interrupted or refused write leaves the old file as it was."""
        write_text(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file written by `save`."""
        return cls.from_json(read_text(path), where=str(path))


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file.

    Raises:
        FileError: missing, a folder, not readable, or not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise FileError(f"cannot read `{path}`: {error.strerror}") from None
    except UnicodeDecodeError:
        raise FileError(f"cannot read `{path}`: it is not UTF-8 text") from None


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """As `write_bytes`, in UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write through a temporary file beside `path` and rename it into place.

    Raises:
        FileError: no space, no right, no such folder. The old file is untouched.
    """
    target = Path(path)
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except OSError as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        raise _unwritable(target, error) from None


def require_writable(path: str | os.PathLike[str]) -> None:
    """Find out before long work, not after it, that `write_text` would be refused.

    Raises:
        FileError: no right, no such folder, or `path` is a folder.
    """
    target = Path(path)
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}."):
            pass
    except OSError as error:
        raise _unwritable(target, error) from None


def _unwritable(target: Path, error: OSError) -> FileError:
    note = "; the old file is as it was" if target.is_file() else ""
    return FileError(
        f"cannot write `{target}`: {error.strerror}{note}", hints=["name another place with `-o`"]
    )


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _friendly(error: ValidationError, cls: type[BaseModel], where: str | None) -> InputError:
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
    shown = f"`{key}` = {value!r}: " if isinstance(value, (str, int, float, bool)) else ""
    message = first["msg"].removeprefix("Value error, ").replace("valid tuple", "list")
    if first["type"] == "greater_than":
        message = f"more than {first['ctx']['gt']} is wanted"
    return InputError(shown + message, where=place)


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
