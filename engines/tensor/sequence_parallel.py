"""Blocks whose norms, dropout and residual sums are split by tokens (sequence parallelism).

A block takes the whole sequence and returns it whole. Inside, every rank has its share of the
tokens, but for the modules that mix tokens or hold column-wise layers: they take all of them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from engines.tensor.collectives import SEQUENCE, Collectives
from engines.tensor.styles import Kind
from profiles.torch_compat import flatten, unflatten


def share_tokens(module: nn.Module, kind: Kind, exchange: Collectives) -> None:
    """Split the tokens of a block (`SEQUENCE`), or join them for a module in one (`JOINED`).

    Of the arguments and of the output the first floating-point tensor is meant: the hidden values.
    """
    change = exchange.split_tokens if kind is Kind.SEQUENCE else exchange.join_tokens

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _with_first(change, (args, kwargs))

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        return _with_first(
            lambda part: exchange.gather(part, SEQUENCE, length=part.shape[1] * exchange.size),
            output,
        )

    module.register_forward_pre_hook(enter, with_kwargs=True)
    if kind is Kind.SEQUENCE:
        module.register_forward_hook(leave)


def _with_first(change: Any, tree: Any) -> Any:
    leaves, structure = flatten(tree)
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            leaves[number] = change(leaf)
            break
    return unflatten(leaves, structure)
