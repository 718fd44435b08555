"""Sequence parallelism (arXiv:2205.05198): norms, dropout and residual sums, split by tokens.

Between its split layers a block has its rank's share of the tokens. Modules that mix tokens, or the
column-wise layers themselves, gather them; row-wise layers scatter their sums. Shares go on from
block to block; the first of a chain splits whole sequences, the last one gathers them.

A rank draws the dropout of its share from the axis's common numbers: other masks than on whole
sequences, and the same one for the share of every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from engines.tensor.collectives import Collectives
from engines.tensor.styles import Kind
from profiles.torch_compat import flatten, unflatten


def exchange_tokens(
    module: nn.Module, kind: Kind, collectives: Collectives, join: Callable[[Tensor], Tensor]
) -> None:
    """Make `module` split (`ENTRY`) or gather (`JOINED`) the tokens that it takes, or gather those
    that it returns (`EXIT`). What counts are its hidden values, see `hidden_values`.

    Args:
        join: `collectives.join_tokens`, once for all modules that take the same tensor.
    """

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        change = collectives.split_tokens if kind is Kind.ENTRY else join
        return _with_hidden_values(change, (args, kwargs))

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        return _with_hidden_values(collectives.gather_tokens, output)

    if kind is Kind.EXIT:
        module.register_forward_hook(leave)
    else:
        module.register_forward_pre_hook(enter, with_kwargs=True)


def hidden_values(leaves: Sequence[object]) -> tuple[int, Tensor] | None:
    """The hidden values among the leaves of a call's arguments or of its output, and their number:
    the first floating-point tensor."""
    tensors = ((n, leaf) for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    return next(((n, tensor) for n, tensor in tensors if tensor.is_floating_point()), None)


def _with_hidden_values(change: Callable[[Tensor], Tensor], tree: object) -> Any:
    leaves, structure = flatten(tree)
    hidden = hidden_values(leaves)
    if hidden is not None:
        leaves[hidden[0]] = change(hidden[1])
    return unflatten(leaves, structure)
