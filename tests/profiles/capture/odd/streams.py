"""Blocks that differ in what they keep, what they hand on, and which gradients come back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.profiles.capture.odd.chain import WIDTH, Block, Chain, of, one_by_one, plain

# What blocks keep and hand on


def ends_in_relu() -> nn.Module:
    return Chain(of(lambda self, x: torch.relu(self.mix(x))))


def ends_in_a_matmul() -> nn.Module:
    return Chain(of(lambda self, x: self.mix(torch.relu(x))))


def one_mask_for_three_blocks() -> nn.Module:
    def run(blocks: Any, x: Tensor) -> Tensor:
        masks = [torch.rand_like(x) for _ in range(3)]
        for number, block in enumerate(blocks):
            x = block(x, masks[number // 3])
        return x

    return Chain(of(lambda self, x, mask: x + self.mix(x) * mask), run)


def a_view_of_the_input_is_returned() -> nn.Module:
    def run(blocks: Any, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for block in blocks:
            x, part = block(x)
            total = total + part.square().sum()
        return x + total

    return Chain(of(lambda self, x: (x + self.mix(x), x[:, :4])), run)


def a_third_of_a_memory_is_returned() -> nn.Module:
    def work(self: Any, x: Tensor) -> Tensor:
        first: Tensor = self.wide(x).chunk(3, -1)[0]
        return first

    return Chain(lambda _: Block(work, wide=nn.Linear(WIDTH, 3 * WIDTH)))


# Which gradients come back


def a_second_stream_that_nobody_reads() -> nn.Module:
    def run(blocks: Any, x: Tensor) -> Tensor:
        second = x * 2
        for block in blocks:
            x, second = block(x, second)
        return x

    return Chain(of(lambda self, x, y: (x + self.mix(x), y + self.out(y))), run)


def an_argument_that_is_not_used() -> nn.Module:
    def run(blocks: Any, x: Tensor) -> Tensor:
        spare = x * 2
        for block in blocks:
            x = block(x, spare)
        return x

    return Chain(of(lambda self, x, _: x + self.mix(x)), run)


def attention_of_one_block_in_the_loss() -> nn.Module:
    def run(blocks: Any, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for number, block in enumerate(blocks):
            x, weights = block(x)
            total = total + weights.sum() if number == 5 else total
        return x + total

    def work(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.mix(x).softmax(-1)
        return x + weights * x, weights

    return Chain(of(work), run)


def scaled(self: Block, x: Tensor, scale: Tensor) -> Tensor:
    return x + self.mix(x) * scale


def backwards_with_a_shared_scale() -> nn.Module:
    def run(blocks: Any, x: Tensor) -> Tensor:
        scale = x * 2
        for block in reversed(blocks):
            x = block(x, scale)
        return x

    return Chain(of(scaled), run)


def out_after_six_with_a_shared_scale() -> nn.Module:
    def run(blocks: Any, x: Tensor) -> Tensor:
        scale = x * 2
        for block in blocks[:6]:
            x = block(x, scale)
        return x

    return Chain(of(scaled), run)


def two_scales_in_turn() -> nn.Module:
    def run(blocks: Any, x: Tensor) -> Tensor:
        scales = x * 2, x * 3
        for number, block in enumerate(blocks):
            x = block(x, scales[number % 2])
        return x

    return Chain(of(scaled), run)


def skips_to_mirrors() -> nn.Module:
    def run(blocks: Any, x: Tensor) -> Tensor:
        skips = []
        for number, block in enumerate(blocks):
            skips.append(x)
            x = block(x) if number <= 4 else block(x, skips[8 - number])
        return x

    return Chain(of(lambda self, x, skip=None: x + self.mix(x if skip is None else x * skip)), run)


def every_block_three_times() -> nn.Module:
    return Chain(plain, lambda blocks, x: one_by_one(list(blocks) * 3, x))


def every_block_twice_in_a_row() -> nn.Module:
    return Chain(plain, lambda blocks, x: one_by_one([b for b in blocks for _ in range(2)], x))


def gradients_of_gradients() -> nn.Module:
    def run(blocks: Any, x: Tensor) -> Tensor:
        energy = one_by_one(blocks, x).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return x + force.square()

    return Chain(of(lambda self, x: x + torch.tanh(self.mix(x))), run)


def a_spare_parameter_that_the_model_uses(number: int) -> nn.Module:
    def run(blocks: Any, x: Tensor) -> Tensor:
        out: Tensor = one_by_one(blocks, x) + blocks[number].spare.weight.sum()
        return out

    return Chain(lambda _: Block(spare=nn.Linear(WIDTH, WIDTH)), run)


MODELS = (
    ends_in_relu,
    ends_in_a_matmul,
    one_mask_for_three_blocks,
    a_view_of_the_input_is_returned,
    a_third_of_a_memory_is_returned,
    a_second_stream_that_nobody_reads,
    an_argument_that_is_not_used,
    attention_of_one_block_in_the_loss,
    backwards_with_a_shared_scale,
    out_after_six_with_a_shared_scale,
    two_scales_in_turn,
    skips_to_mirrors,
    every_block_three_times,
    every_block_twice_in_a_row,
    gradients_of_gradients,
)
