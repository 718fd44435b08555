"""Splits that a model brings along: `tp_plan` of transformers' models."""

from __future__ import annotations

from torch import nn

from engines.tensor.styles import Kind, Style, matches

_STYLES = {
    "colwise": Kind.COLUMN,
    "rowwise": Kind.ROW,
    "colwise_rep": Kind.GATHER,
    "colwise_gather_output": Kind.GATHER,
}
"""Their words for layers; those for experts, sequences and caches have no layer of ours."""


def shipped_styles(model: nn.Module) -> dict[str, Style]:
    """The styles of its layers by module path, as the model's authors wrote them down.

    They are hints: written for the library's own code, and not for every number of ranks.
    """
    plan = getattr(model, "tp_plan", None)
    if not isinstance(plan, dict):
        return {}
    paths = [path for path, _ in model.named_modules()]
    return {
        path: Style(kind=_STYLES[word])
        for pattern, word in plan.items()
        if word in _STYLES
        for path in paths
        if matches(pattern, path)
    }
