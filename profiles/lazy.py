"""Public names that import their module on first use: importing a package stays cheap. And what
makes many objects that stay, without the searches for garbage that would find none."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


def attach(
    package: str, exports: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` for a package; `exports` maps name to module."""

    def __getattr__(name: str) -> object:
        if name not in exports:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with without_collections():  # modules stay, and torch is some hundred thousand objects
            module = importlib.import_module(exports[name])
        return getattr(module, name)

    names = sorted(exports)
    return __getattr__, lambda: names, names


@contextmanager
def without_collections() -> Iterator[None]:
    """Around making many objects that stay: a search for garbage in them takes as long again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
