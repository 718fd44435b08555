"""State that code between units changes, and how far the forward is by then."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from engines.blocks.forward_state import OF_TORCH
from profiles.torch_compat import version_of

_PLAIN = (bool, int, float, complex, str)


class StateBetween:
    """A watch of numbers, words and tensors that modules outside of units have.

    Attributes:
        changed: names of those that the forward changed, with the units that it had called before
            it did so last.
    """

    def __init__(self, model: nn.Module, units: Iterable[str]) -> None:
        self._units = {name: model.get_submodule(name) for name in units}
        within = {module for unit in self._units.values() for module in unit.modules()}
        self._outside = {p: m for p, m in model.named_modules() if m not in within}
        self._called: dict[str, None] = {}
        self._last: dict[str, tuple[object, int]] = {}
        self.changed: dict[str, tuple[str, ...]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around one forward of the model."""
        with ExitStack() as hooks:
            for name, unit in self._units.items():
                hooks.callback(unit.register_forward_pre_hook(self._before(name)).remove)
            self._last = dict(self._now())
            yield
            self._look()

    def _before(self, unit: str) -> Any:
        def hook(*_: object) -> None:
            self._look()
            self._called[unit] = None

        return hook

    def _look(self) -> None:
        now = dict(self._now())
        for name in now.keys() | self._last.keys():
            if not _is_same(now.get(name), self._last.get(name)):
                self.changed[name] = tuple(self._called)
        self._last = now

    def _now(self) -> Iterator[tuple[str, tuple[object, int]]]:
        for path, module in self._outside.items():
            for names in (vars(module), module._buffers):
                for name, value in names.items():
                    if name in OF_TORCH:
                        continue
                    if isinstance(value, Tensor):
                        yield f"{path}.{name}".lstrip("."), (value, version_of(value))
                    elif isinstance(value, _PLAIN):
                        yield f"{path}.{name}".lstrip("."), (value, 0)


def _is_same(now: tuple[object, int] | None, before: tuple[object, int] | None) -> bool:
    if now is None or before is None:
        return now is before
    (value, version), (old, old_version) = now, before
    if isinstance(value, Tensor) or isinstance(old, Tensor):
        return value is old and version == old_version
    return value == old
