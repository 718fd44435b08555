"""The model classes that the automatic mappings of the installed transformers name."""

from __future__ import annotations

import functools
import random

import transformers
from torch import nn
from transformers.models.auto import modeling_auto


@functools.cache
def class_names() -> tuple[str, ...]:
    """Every class of every mapping, in alphabetical order; nothing is imported."""
    names: set[str] = set()
    for mapping in (m for m in dir(modeling_auto) if m.endswith("MAPPING_NAMES")):
        if mapping != "CONFIG_MAPPING_NAMES":
            for entry in getattr(modeling_auto, mapping).values():
                names.update(entry if isinstance(entry, tuple | list) else [entry])
    return tuple(sorted(names, key=str.lower))


def sampled(count: int, seed: int) -> list[str]:
    """So many of all classes: the first ones of a seeded order, which a larger sample contains."""
    names = list(class_names())
    random.Random(seed).shuffle(names)
    return names[:count]


def class_of(name: str) -> type[nn.Module]:
    """The class, with all that its module imports.

    Raises:
        ImportError, AttributeError, RuntimeError: it needs a package that is not installed.
    """
    kind: type[nn.Module] = getattr(transformers, name)
    if not issubclass(kind, nn.Module):
        raise AttributeError(f"{name} is no module")
    return kind
