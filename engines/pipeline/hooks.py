"""Users' forward hooks of units that a stage does not run: they may save an output."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from profiles.torch_compat import forward_hooks, map_tensors, tensors_in, version_of


class UserHooks:
    """The forward hooks that units had before a plan added its own."""

    def __init__(self, model: nn.Module, units: Iterable[str]) -> None:
        modules = {name: model.get_submodule(name) for name in units}
        self._of = {
            name: (unit, hooks) for name, unit in modules.items() if (hooks := forward_hooks(unit))
        }

    def show(self, name: str, args: Any, kwargs: Any, output: object) -> object:
        """Call the hooks of unit `name` on an output of another stage; returns the output to use.

        Their own results and in-place changes are in the output already.
        """
        if name not in self._of:
            return output
        unit, hooks = self._of[name]
        untouched = map_tensors(torch.clone, output)
        before = [version_of(tensor) for tensor in tensors_in(output)]
        for hook in hooks:
            hook(unit, args, kwargs, output)
        is_changed = before != [version_of(tensor) for tensor in tensors_in(output)]
        return untouched if is_changed else output
