"""Hooks of a user's own on modules."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

AROUND_CALLS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""The attributes with hooks that run in a forward or a backward."""


def own_hooks(module: nn.Module) -> Iterator[tuple[str, object]]:
    """The hooks of a user's own code, each with the attribute that has it.

    torch's own make weights (weight_norm), and are told by what they change; those of this project
    watch, or belong to an engine.
    """
    for name, hooks in vars(module).items():
        if name.endswith("_hooks") and isinstance(hooks, dict):
            yield from ((name, hook) for hook in hooks.values() if _is_own(hook))


def _is_own(hook: object) -> bool:
    origin = getattr(hook, "__module__", None) or type(hook).__module__
    return not str(origin).startswith(("torch.", "profiles.", "engines."))
