"""Gradients of parameters after a backward."""

from __future__ import annotations

from profiles.closed_forms.families.tape import Array


def has_gradient(parameter: Array) -> bool:
    """True if a gradient arrived at the parameter."""
    return parameter.node is not None and any(parameter.node.gradients)


def gradient_number(parameter: Array) -> int | None:
    """Number of a parameter's gradient in the timeline, after backward."""
    gradients = parameter.node.gradients if parameter.node else []
    gradient = gradients[0] if gradients else None
    return None if gradient is None else gradient.storage.made.number
