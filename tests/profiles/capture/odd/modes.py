"""Blocks that differ in their parameters, and in the mode in which they run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests.profiles.capture.odd.chain import WIDTH, Block, Chain, of, plain


def a_linear_for_six_of_them() -> nn.Module:
    shared = nn.Linear(WIDTH, WIDTH)
    return Chain(lambda n: Block(out=shared) if n > 2 else Block())


def two_weights_that_are_one() -> nn.Module:
    def make(number: int) -> Block:
        block = Block()
        if number > 3:
            block.out.weight = block.mix.weight
        return block

    return Chain(make)


def the_next_ones_weight() -> nn.Module:
    def work(self: Any, x: Tensor) -> Tensor:
        out: Tensor = x + self.mix(x)
        return out + self.next[0].mix(x) if self.next else out

    model = Chain(lambda _: Block(work, next=()))
    for one, other in zip(model.blocks, model.blocks[1:], strict=False):
        one.next = (other,)  # type: ignore[assignment]
    return model


def two_modes(context: Callable[[bool], Any]) -> nn.Module:
    """The first four blocks in another mode than the rest."""

    def run(blocks: Any, x: Tensor) -> Tensor:
        for number, block in enumerate(blocks):
            with context(number < 4):
                x = block(x)
        return x

    def attends(self: Any, x: Tensor) -> Tensor:
        query = self.mix(x).view(-1, 1, 2, 4)
        out = nn.functional.scaled_dot_product_attention(query, query, query)
        return x + out.reshape(x.shape)

    return Chain(of(attends), run)


def without_gradients(is_first: bool) -> Any:
    return torch.set_grad_enabled(not is_first)


def in_low_precision(is_first: bool) -> Any:
    return torch.autocast("cpu", torch.bfloat16, enabled=is_first)


def by_other_kernels(is_first: bool) -> Any:
    return sdpa_kernel([SDPBackend.MATH] if is_first else [SDPBackend.FLASH_ATTENTION])


def offloaded(is_first: bool) -> Any:
    hooks = (lambda tensor: tensor.clone() if is_first else tensor), (lambda tensor: tensor)
    return torch.autograd.graph.saved_tensors_hooks(*hooks)


def checkpointed(*, use_reentrant: bool, first: int) -> nn.Module:
    def run(blocks: Any, x: Tensor) -> Tensor:
        for number, block in enumerate(blocks):
            again = partial(checkpoint, block, use_reentrant=use_reentrant)
            x = again(x) if number >= first else block(x)
        return x

    return Chain(plain, run)


MODELS = (
    a_linear_for_six_of_them,
    two_weights_that_are_one,
    the_next_ones_weight,
)
CONTEXTS = (without_gradients, in_low_precision, by_other_kernels, offloaded)
"""Two modes each, for `two_modes`."""
