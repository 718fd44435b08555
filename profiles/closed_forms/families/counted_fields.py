"""Fields of a config.json that count: what a model is made of one by one, and so is bounded.

Every config goes through here before a class of transformers or a closed form sees it: 10^9 layers
or labels are a list of as many, long before they are a model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from profiles.errors import InputError
from profiles.record.bounds import MOST_EXPERTS, MOST_LAYERS

MOST_LABELS = 100_000
"""Of a classifier; transformers writes a text for each. ImageNet-21k has 21,841."""
MOST_HEADS = 65_536
MOST_SIZE = 2**40
"""Of any other number: widths, vocabularies, positions, bases of rotary angles."""

_LAYERS = r"(^|_)(layers?|blocks?|depths?|stages?|repeats?|dense_replace)$"
_COUNTED = (
    (re.compile(_LAYERS), MOST_LAYERS),
    (re.compile(r"(^|_)(experts|experts_per_tok|routers)$"), MOST_EXPERTS),
    (re.compile(r"(^|_)(heads?|groups?|group)$"), MOST_HEADS),
    (re.compile(r"(^|_)labels$"), MOST_LABELS),
    (re.compile(r"_length$"), math.inf),  # a tokenizer without a bound is said to have 10^30
)


def require_countable(content: Mapping[str, object], *, where: str) -> None:
    """Refuse a config that counts further than any model goes, or below zero, which classes of
    transformers take for zero; names are transformers'. A `vision_feature_layer` of -2 is no count.

    Raises:
        InputError: with the field, its value and its bound.
    """
    rest: list[tuple[str, object]] = list(content.items())
    while rest:
        name, value = rest.pop()
        if isinstance(value, Mapping):
            rest += [(f"{name}.{key}", item) for key, item in value.items()]
        elif isinstance(value, list):
            rest += [(name, item) for item in value]
        elif isinstance(value, int | float):
            own = name.rpartition(".")[2]
            if value > (most := _most(own)):
                raise InputError(f"`{name[:80]}` = {value:,}: {most:,} is the most", where=where)
            if value < 0 and most < MOST_SIZE and own.startswith(("num_", "n_")):
                raise InputError(f"`{name[:80]}` = {value:,}: 0 is the least", where=where)


def _most(name: str) -> float:
    return next((most for words, most in _COUNTED if words.search(name)), MOST_SIZE)
