"""`python -m tests.benchmarks.stage_host`: host time of pipeline stages, besides their layers'.

Blocks of a tiny GPT on the first and the middle rank of three, in a fake world, against the same
blocks by hand: what a microbatch adds is Python code, of schedules, of the replayed forward and of
split backwards. The first rank has two embeddings too.
`advisor.cost.estimates.stage_host` has these figures in launches, which are timed beside them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import median

import torch
import torch.distributed as dist

from advisor.inputs.bundled.gpt import GPT, GPTConfig, loss
from engines.apply import apply_plan
from engines.plan import Plan, Schedule
from profiles.capture.capture import capture
from profiles.machine.bench.device import KERNELS, launch_timing
from tests.contract.fake_world import fake_rank
from tests.engines.cases import cpu_ranks

RANKS, ROWS, TOKENS, WIDTH, VOCABULARY = 3, 2, 16, 32, 64
FEW, MANY = 3, 12
WARM_UP, STEPS = 4, 15
BLOCKS = (1, 4)
SCHEDULES = (Schedule.GPIPE, Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE)


def gpt(blocks: int) -> GPT:
    """A GPT with so many blocks on each rank."""
    config = GPTConfig(
        vocab_size=VOCABULARY,
        context=TOKENS,
        num_layers=RANKS * blocks,
        num_heads=2,
        width=WIDTH,
    )
    return GPT(config)


def per_microbatch_s(schedule: Schedule, blocks: int, rank: int) -> float:
    """Seconds of the processor for a further microbatch on a rank."""
    took = []
    for microbatches in (FEW, MANY):
        model, ids = gpt(blocks), torch.zeros(ROWS * microbatches, TOKENS, dtype=torch.long)
        plan = Plan(
            pp=RANKS,
            schedule=schedule,
            stages=tuple(f"blocks.{stage * blocks}" for stage in range(1, RANKS)),
            microbatch_size=ROWS,
            microbatches=microbatches,
        )
        with fake_rank(rank, RANKS):
            parallel = apply_plan(
                model,
                plan,
                profile=capture(model, (ids, ids), loss_fn=loss),
                cluster=cpu_ranks(RANKS),
                loss_fn=loss,
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
                sample=(ids, ids),
            )
            took.append(processor_s(partial(parallel.train_step, (ids, ids))))
    return (took[1] - took[0]) / (MANY - FEW)


def by_hand_s(blocks: int) -> float:
    """Seconds of the processor for a forward and backward of the blocks of one rank."""
    own = list(gpt(blocks).blocks)[:blocks]
    x, gradient = (torch.randn(ROWS, TOKENS, WIDTH, requires_grad=takes) for takes in (True, False))

    def step() -> None:
        for _ in range(MANY):
            y = x
            for block in own:
                y = block(y)
            y.backward(gradient)

    return processor_s(step) / MANY


def processor_s(step: Callable[[], object]) -> float:
    took = []
    for _ in range(WARM_UP + STEPS):
        began = time.process_time()
        step()
        took.append(time.process_time() - began)
    return median(took[WARM_UP:])


def main() -> int:
    torch.set_num_threads(1)
    launch_s = launch_timing(torch.device("cpu"), seconds=1.0).median_s / KERNELS
    sys.stdout.write(f"a launch takes {launch_s * 1e6:.1f} us; launches a microbatch and stage:\n")
    for schedule in SCHEDULES:
        for rank, blocks in product((0, 1), BLOCKS):
            added = per_microbatch_s(schedule, blocks, rank) - by_hand_s(blocks)
            tensors = blocks * len(list(gpt(1).blocks[0].parameters()))
            sys.stdout.write(
                f"  {schedule}, rank {rank}, {blocks} blocks of {tensors} parameters:"
                f" {added / launch_s:.0f}\n"
            )
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
