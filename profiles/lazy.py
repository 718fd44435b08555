"""Public names that import their module on first use: importing a package stays cheap."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def attach(
    package: str, exports: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` for a package; `exports` maps name to module."""

    def __getattr__(name: str) -> object:
        if name not in exports:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(exports[name]), name)

    names = sorted(exports)
    return __getattr__, lambda: names, names
