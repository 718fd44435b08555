"""Blocks that only look equal: what is stood in for has to be what running every block shows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from profiles.capture import capture

WIDTH, DEPTH, ROWS = 8, 9, 4


class Block(nn.Module):
    """What `work` says, with what it is built with at hand."""

    def __init__(self, work: Callable[..., Any] | None = None, **attributes: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.work = work or usual
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args: Any) -> Any:
        return self.work(self, *args)


def usual(self: Block, x: Tensor) -> Tensor:
    return x + wide(self, self.norm(x))


def wide(self: Block, x: Tensor) -> Tensor:
    out: Tensor = self.out(torch.relu(self.mix(x)))
    return out


def one_by_one(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


class Chain(nn.Module):
    def __init__(
        self, make: Callable[[int], nn.Module], run: Callable[[Any, Tensor], Tensor] = one_by_one
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([make(number) for number in range(DEPTH)])
        self.head = nn.Linear(WIDTH, 2)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.run(self.blocks, self.stem(x)))
        return out


def plain(_: int) -> Block:
    return Block()


def of(work: Callable[..., Any]) -> Callable[[int], Block]:
    return lambda _: Block(work)


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


# State


def acts_on_its_number() -> nn.Module:
    def work(self: Any, x: Tensor) -> Tensor:
        return usual(self, x + self.out(x) if self.number % 3 == 2 else x)

    return Chain(lambda number: Block(work, number=number))


def tables_of_two_sizes() -> nn.Module:
    def work(self: Any, x: Tensor) -> Tensor:
        out: Tensor = x + self.mix(x) + (x @ self.table).mean()
        return out

    return Chain(lambda n: Block(work, table=torch.ones(WIDTH, 8 if n < 3 else 64)))


class Counts:
    count = 0

    def __init__(self) -> None:
        self.count = 0


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


def a_counter_of_its_own() -> nn.Module:
    def work(self: Any, x: Tensor) -> Tensor:
        self.count += 1
        return x + (self.mix(x) if self.count == 1 else wide(self, x))

    model = Chain(
        lambda _: Block(work, count=0),
        lambda blocks, x: one_by_one(blocks, one_by_one(blocks, x)),
    )
    return model


def a_counter_for_all(kind: type[Counts | Slotted]) -> nn.Module:
    shared = kind()

    def work(self: Any, x: Tensor) -> Tensor:
        self.shared.count += 1
        return x + (self.mix(x) if self.shared.count < 5 else wide(self, x))

    def run(blocks: Any, x: Tensor) -> Tensor:
        shared.count = 0
        return one_by_one(blocks, x)

    return Chain(lambda _: Block(work, shared=shared), run)


def a_step_set_by_the_model() -> nn.Module:
    shared = Counts()

    def work(self: Any, x: Tensor) -> Tensor:
        return x + (self.mix(x) if self.shared.count < 5 else wide(self, x))

    def run(blocks: Any, x: Tensor) -> Tensor:
        for number, block in enumerate(blocks):
            shared.count = number
            x = block(x)
        return x

    return Chain(lambda _: Block(work, shared=shared), run)


def a_count_in_a_closure() -> nn.Module:
    count = 0

    def work(self: Any, x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x + (self.mix(x) if count % DEPTH < 5 else wide(self, x))

    return Chain(of(work))


class Turns:
    """In a class, where nobody looks."""

    count = 0


def takes_turns_by_a_global() -> nn.Module:
    def work(self: Any, x: Tensor) -> Tensor:
        Turns.count += 1
        return x + (self.mix(x) if Turns.count % 2 else wide(self, x))

    def run(blocks: Any, x: Tensor) -> Tensor:
        Turns.count = 0
        return one_by_one(blocks, x)

    return Chain(of(work), run)


def draws_from_python() -> nn.Module:
    return Chain(of(lambda self, x: x + (self.mix(x) if random.random() < 0.5 else wide(self, x))))


def a_list_for_all() -> nn.Module:
    def work(self: Any, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        self.seen.append(x)
        return x

    def run(blocks: Any, x: Tensor) -> Tensor:
        seen = blocks[0].seen
        seen.clear()
        x = one_by_one(blocks, x)
        return x + torch.stack(seen).relu().sum(0)

    shared: list[Tensor] = []
    return Chain(lambda _: Block(work, seen=shared), run)


def an_output_left_in_an_attribute() -> nn.Module:
    def work(self: Any, x: Tensor) -> Tensor:
        self.latest = x + self.mix(x)
        latest: Tensor = self.latest
        return latest

    def run(blocks: Any, x: Tensor) -> Tensor:
        x = one_by_one(blocks, x)
        return x + sum(b.latest.relu() for b in blocks if b.latest is not None)

    return Chain(lambda _: Block(work, latest=None), run)


def hooks_on_inner_modules() -> nn.Module:
    features: list[Tensor] = []

    def run(blocks: Any, x: Tensor) -> Tensor:
        features.clear()
        x = one_by_one(blocks, x)
        return x + sum(feature.relu() for feature in features[2:])

    model = Chain(plain, run)
    for block in model.blocks:
        block.get_submodule("mix").register_forward_hook(
            lambda _, inputs, output: features.append(output)
        )
    return model


# Parameters


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


# Modes


def modes(context: Callable[[bool], Any]) -> nn.Module:
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


def _cases() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    for build in (
        ends_in_relu, ends_in_a_matmul, one_mask_for_three_blocks, a_view_of_the_input_is_returned,
        a_third_of_a_memory_is_returned, a_second_stream_that_nobody_reads,
        an_argument_that_is_not_used, attention_of_one_block_in_the_loss,
        backwards_with_a_shared_scale, out_after_six_with_a_shared_scale, two_scales_in_turn,
        skips_to_mirrors, every_block_three_times, every_block_twice_in_a_row,
        gradients_of_gradients, acts_on_its_number, tables_of_two_sizes, a_counter_of_its_own,
        a_step_set_by_the_model, a_count_in_a_closure, takes_turns_by_a_global, draws_from_python,
        a_list_for_all, an_output_left_in_an_attribute, hooks_on_inner_modules,
        a_linear_for_six_of_them, two_weights_that_are_one, the_next_ones_weight,
    ):  # fmt: skip
        yield build.__name__, build
    for context in (without_gradients, in_low_precision, by_other_kernels, offloaded):
        yield context.__name__, partial(modes, context)
    for kind in (Counts, Slotted):
        yield f"a_counter_for_all, {kind.__name__}", partial(a_counter_for_all, kind)
    for number in (1, 5):
        build_spare = partial(a_spare_parameter_that_the_model_uses, number)
        yield f"a_spare_parameter_of_{number}_that_the_model_uses", build_spare
    for first in (0, 4):
        for use_reentrant in (True, False):
            name = f"checkpointed from {first}, {'' if use_reentrant else 'not '}reentrant"
            yield name, partial(checkpointed, use_reentrant=use_reentrant, first=first)


CASES = dict(_cases())


@pytest.mark.parametrize("case", CASES)
def test_what_looks_equal_and_is_not_costs_what_every_block_costs(case: str) -> None:
    random.seed(0)
    model, sample = CASES[case](), torch.randn(ROWS, WIDTH)
    found = capture(model, sample)
    random.seed(0)
    assert found == capture(model, sample, every_block=True)
