"""The fields of a config.json: read by name; what is missing, odd or not understood is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from profiles.closed_forms.families.counted_fields import require_countable
from profiles.errors import FileError, InputError, UnknownNameError

# Fields that every transformers config may have, and the values that leave the forward as it is.
_PLAIN: Mapping[str, Sequence[object]] = {
    "chunk_size_feed_forward": (0, None),
    "output_attentions": (False, None),
    "output_hidden_states": (False, None),
    "pruned_heads": (None, {}),
    "torchscript": (False, None),
    "attn_implementation": (None, "sdpa"),
    "_attn_implementation": (None, "sdpa"),
}

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
"""Fields of most models, which have no default."""
WAY_OUT = "with torch and transformers every model is taken: `pip install 'parallel-advisor[hf]'`"


def require_whole_weights(content: Mapping[str, object], *, where: str) -> None:
    """Refuse a config of quantized weights: a plan for others would be taken for theirs.

    Raises:
        InputError: with what to leave out.
    """
    if content.get("quantization_config") is not None:
        raise InputError(
            "`quantization_config` is given, and quantized weights are not trained",
            where=where,
            hints=["leave it out to plan the training of the whole model"],
        )


class Fields:
    """A config as written, and the file it is from for messages.

    Fields that no method asks for are ignored, as transformers ignores what its classes do not
    have.
    """

    def __init__(self, content: Mapping[str, object], *, where: str) -> None:
        """Raises InputError for counts without bound, and what changes any model."""
        require_countable(content, where=where)
        self._content = content
        self.where = where
        for name, plain in _PLAIN.items():
            self.only(name, *plain)
        require_whole_weights(content, where=where)

    @property
    def family(self) -> str:
        return str(self._content.get("model_type"))

    def has(self, name: str) -> bool:
        """True if the field is present and not null."""
        return self._content.get(name) is not None

    def require(self, *names: str) -> None:
        """Refuse a config without these, which have no default.

        Raises:
            FileError: with all that are missing.
        """
        missing = [f"`{name}`" for name in names if not self.has(name)]
        if missing:
            raise FileError(
                f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing, without"
                f" which a `{self.family}` model has no shape",
                where=self.where,
            )

    def heads(self, width: str, count: str) -> tuple[int, int]:
        """A width and the number of heads that divides it.

        Raises:
            InputError: it does not.
        """
        whole, parts = self.size(width), self.size(count)
        self.divides(count, parts, width, whole)
        return whole, parts

    def divides(self, count: str, parts: int, width: str, whole: int) -> None:
        """Refuse a number of parts that does not divide what they are parts of.

        Raises:
            InputError: it does not.
        """
        if whole % parts:
            raise InputError(
                f"`{count}` = {parts} does not divide `{width}` = {whole}", where=self.where
            )

    def is_null(self, name: str) -> bool:
        """True if the field is present and null."""
        return name in self._content and not self.has(name)

    def size(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number, `least` or more; without a default it is required.

        Raises:
            InputError: it is something else.
        """
        if default is None:
            self.require(name)
        value = self._content.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refusal(name, value, f"a whole number from {least} is wanted")
        return value

    def optional_size(self, name: str, default: int | None) -> int | None:
        """A positive integer, or none where the field is null; the default where it is missing."""
        if name not in self._content:
            return default
        return self.size(name) if self.has(name) else None

    def share(self, name: str, default: float) -> float:
        """A probability or fraction."""
        value = self._content.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise self.refusal(name, value, "a number from 0 to 1 is wanted")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._content.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refusal(name, value, "true or false is wanted")
        return value

    def choice(self, name: str, default: str, known: Sequence[str]) -> str:
        """One of some words.

        Raises:
            UnknownNameError: another one; the near miss is named.
        """
        value = self._content.get(name, default) or default
        if value not in known:
            raise UnknownNameError(f"`{name}`", str(value), known, where=self.where)
        return str(value)

    def words(self, name: str, count: int | None = None) -> list[str]:
        """A list of words, `count` of them if given; empty where there is none."""
        value = self._content.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refusal(name, value, "a list of words is wanted")
        if count is not None and len(value) != count:
            raise self.refusal(name, value, f"one word for each of {count} layers is wanted")
        return value

    def numbers(self, name: str) -> list[int]:
        """A list of whole numbers; empty where there is none."""
        value = self._content.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise self.refusal(name, value, "a list of whole numbers is wanted")
        return value

    def inner(self, name: str) -> Fields:
        """The fields of a field; empty where it is missing or null."""
        value = self._content.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.refusal(name, value, "an object is wanted")
        return Fields(value or {}, where=f"{self.where}: {name}")

    def count(self, name: str, default: int) -> int:
        """Number of entries of an object."""
        value = self._content.get(name)
        return len(value) if isinstance(value, dict | list) and value else default

    def only(self, name: str, *plain: object) -> None:
        """Refuse a field that changes the model in a way that has no closed form here."""
        value = self._content.get(name, plain[0])
        if value not in plain:
            wanted = " or ".join(_as_json(item) for item in plain)
            raise InputError(
                f"`{name}` = {_as_json(value)} changes the model in a way that has no closed form"
                f" here ({wanted} has)",
                where=self.where,
                hints=[WAY_OUT],
            )

    def architecture(self, *known: str, default: str | None = None) -> str:
        """The class of the model: of `architectures`, or the default where that is missing."""
        named = self.words("architectures")
        if not named and default is None:
            raise FileError(
                f"`architectures` is missing, and `{self.family}` models have several",
                where=self.where,
                hints=[f'add "architectures": ["{known[0]}"]'],
            )
        name = named[0] if named else str(default)
        if name not in known:
            raise UnknownNameError(
                "architecture without transformers",
                name,
                known,
                where=f"{self.where}: architectures",
            )
        return name

    def refusal(self, name: str, value: object, wanted: str) -> InputError:
        """The error for a value that cannot be: what is wanted of the field."""
        return InputError(f"`{name}` = {_as_json(value)}: {wanted}", where=self.where)


def _as_json(value: object) -> str:
    shown = {None: "null", True: "true", False: "false"}
    return shown.get(value, repr(value)) if isinstance(value, bool | None) else repr(value)
