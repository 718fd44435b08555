"""Sequence parallelism: norms, dropout and residual sums of a block, split by tokens.

A block takes and returns the whole sequence. Inside, every rank has its share of the tokens, but
for the modules that mix tokens or have column-wise layers: these take all of them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from engines.tensor.collectives import SEQUENCE, Collectives
from engines.tensor.styles import Kind
from profiles.torch_compat import flatten, unflatten


def split_sequence(module: nn.Module, kind: Kind, collectives: Collectives) -> None:
    """Split the tokens of a block (`SEQUENCE`), or join them for a module in one (`JOINED`).

    The first floating-point tensor of arguments and of the output counts as the hidden values.
    """
    change = collectives.split_tokens if kind is Kind.SEQUENCE else collectives.join_tokens

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _with_first(change, (args, kwargs))

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        return _with_first(
            lambda part: collectives.gather(
                part, SEQUENCE, length=part.shape[1] * collectives.size
            ),
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
