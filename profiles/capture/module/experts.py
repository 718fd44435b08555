"""Modules that hold experts as weights with a dimension of their own, as in transformers."""

from __future__ import annotations

import inspect

from torch import nn


def experts_of(module: nn.Module) -> int:
    """Number of experts that the module holds; 0 if it is not a mixture-of-experts layer.

    Every weight of it has the experts first, some are a matrix for each, and its forward takes
    tokens, the numbers of some experts for each token, and what each of those weighs.
    """
    weights = list(module.parameters(recurse=False))
    firsts = {weight.shape[0] for weight in weights if weight.dim()}
    has_matrices = any(weight.dim() == 3 for weight in weights)
    if not has_matrices or len(firsts) != 1 or any(not weight.dim() for weight in weights):
        return 0
    kinds = [p.kind for p in inspect.signature(module.forward).parameters.values()]
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    takes_any = inspect.Parameter.VAR_POSITIONAL in kinds
    return firsts.pop() if takes_any or sum(kind in places for kind in kinds) == 3 else 0
