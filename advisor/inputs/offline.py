"""A config of strangers made into a model: no network, no code but transformers', a bounded size.

What a config can name and must not get: code of its own (`auto_map`), attention kernels and weights
of a hub.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from profiles.errors import InputError

MOST_MODULES = 150_000
"""Of one model: 10,000 layers of Llama have 130,000; a module takes some 7 KiB without memory."""
IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
"""Of attention and experts, that transformers has itself; others it fetches as kernels."""
_PRETRAINED = ("use_pretrained_backbone", "use_timm_backbone")


@contextmanager
def offline() -> Iterator[None]:
    """Make huggingface_hub refuse every request while it lasts; the environment is left alone.

    The variables `HF_HUB_OFFLINE` and `TRANSFORMERS_OFFLINE` are read once, when it is imported.
    """
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def bounded_modules(path: Path) -> Iterator[None]:
    """Stop the making of a model at `MOST_MODULES` modules, while it lasts.

    Raises:
        InputError: it has more.
    """
    from torch.nn.modules.module import register_module_module_registration_hook

    count = 0

    def note(*_: object) -> None:
        nonlocal count
        count += 1
        if count > MOST_MODULES:
            raise InputError(
                f"the model has more than {MOST_MODULES:,} modules, the most that are built",
                where=str(path),
                hints=["plan it with fewer layers: its blocks are equal"],
            )

    handle = register_module_module_registration_hook(note)
    try:
        yield
    finally:
        handle.remove()


def without_code(content: Mapping[str, object], path: Path) -> dict[str, Any]:
    """`content` without the code that it names.

    Raises:
        InputError: it names kernels or weights that would have to be fetched.
    """
    return {
        name: _inner(name, value, path) for name, value in content.items() if name != "auto_map"
    }


def _inner(name: str, value: object, path: Path) -> object:
    if name.endswith("_implementation"):
        named = value.values() if isinstance(value, Mapping) else [value]
        for each in named:
            if each is not None and each not in IMPLEMENTATIONS:
                raise InputError(
                    f"`{name[:80]}` = {str(each)[:80]!r} is none of {', '.join(IMPLEMENTATIONS)}:"
                    " kernels are not fetched",
                    where=str(path),
                    hints=["leave it out"],
                )
    if name in _PRETRAINED and value:
        raise InputError(
            f"`{name}` is true: neither its weights nor its code are fetched",
            where=str(path),
            hints=["write a factory for `pkg.module:factory`"],
        )
    if isinstance(value, Mapping):
        return without_code(value, path)
    if isinstance(value, list):
        return [_inner("", item, path) for item in value]
    return value
