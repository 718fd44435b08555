"""One rank of the demo: decide for this machine, train a small GPT, compare with the prediction."""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch.utils.data import DataLoader, Subset

from advisor.auto import auto_parallelize
from advisor.command import show_on_screen
from advisor.cost.breakdown import Estimate
from advisor.decision import Decision
from advisor.demo.gpt import GPT, SHAPES, loss
from advisor.demo.text import ByteWindows, reference_text
from engines.parallel import ParallelModel
from engines.world import join_world
from profiles.errors import AdvisorError
from profiles.memory import peak_memory_bytes, reset_peak_memory
from profiles.units import format_gib, format_seconds

GLOBAL_BATCH = 16
HELD_OUT_BATCHES = 4
LEARNT_FRACTION = 0.55  # stop when the loss is this part of its first value: far beyond noise
AVERAGED_STEPS = 5
MOST_STEPS = 150
WARM_UP_STEPS = 2  # first steps allocate and build communication buckets
CHECKPOINT = Path("runs/demo")


@dataclass
class Run:
    """What was seen while training."""

    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    held_out_before: float = 0.0
    held_out_after: float = 0.0
    peak_bytes: int = 0


@click.command()
@click.option("--plan", default=None)
@click.option("--steps", type=click.IntRange(min=WARM_UP_STEPS + 1), default=None)
def main(plan: str | None, steps: int | None) -> None:
    """Run one rank; started by `advise demo`."""
    world = join_world()
    first = world.rank == 0
    screen = Console(stderr=True)
    try:
        config = SHAPES["gpt-10m"]
        torch.manual_seed(0)
        model = GPT(config)
        text = reference_text()
        train = ByteWindows(text.train, length=config.context)
        held_out = ByteWindows(text.held_out, length=config.context)
        rows = [train[i] for i in range(GLOBAL_BATCH // world.size)]
        sample = (torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows]))
        if first:
            screen.print("looking at this machine and at the model ...", highlight=False)
        parallel = auto_parallelize(
            model,
            sample=sample,
            loss_fn=loss,
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
            plan=plan,
            global_batch_size=GLOBAL_BATCH,
            max_grad_norm=1.0,
        )
        assert isinstance(parallel.decision, Decision)
        if first:
            show_on_screen(parallel.decision, no_color=False)
        run = _train(parallel, train, held_out, steps=steps, screen=screen if first else None)
        parallel.save(CHECKPOINT)
        run.peak_bytes = _largest(run.peak_bytes)
        if first:
            click.echo(comparison(parallel.decision.estimate, run, CHECKPOINT))
    except AdvisorError as error:
        if first:
            click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _train(
    parallel: ParallelModel,
    train: ByteWindows,
    held_out: ByteWindows,
    *,
    steps: int | None,
    screen: Console | None,
) -> Run:
    """Step until the loss has clearly fallen, or exactly `steps` times."""
    device = next(iter(parallel.parameters())).device
    loader = DataLoader(train, batch_size=GLOBAL_BATCH, shuffle=True, drop_last=True)
    fixed = Subset(held_out, range(HELD_OUT_BATCHES * GLOBAL_BATCH))
    unseen = parallel.shard(DataLoader(fixed, batch_size=GLOBAL_BATCH))
    run = Run()
    reset_peak_memory(device)
    run.held_out_before = _held_out(parallel, unseen)
    most = steps or MOST_STEPS
    with _progress(screen, most) as advance:
        while len(run.losses) < most:
            for inputs, targets in parallel.shard(loader):
                began = time.perf_counter()
                value = parallel.train_step((inputs, targets)).item()
                run.step_s.append(time.perf_counter() - began)
                run.losses.append(value)
                advance(value)
                recent = run.losses[-AVERAGED_STEPS:]
                learnt = (
                    len(run.losses) > WARM_UP_STEPS + AVERAGED_STEPS
                    and statistics.mean(recent) < LEARNT_FRACTION * run.losses[0]
                )
                if len(run.losses) == most or (steps is None and learnt):
                    most = len(run.losses)
                    break
    run.peak_bytes = peak_memory_bytes(device)
    run.held_out_after = _held_out(parallel, unseen)
    return run


def _held_out(parallel: ParallelModel, unseen: object) -> float:
    parallel.eval()
    losses = [parallel.eval_step(tuple(batch)).item() for batch in unseen]  # type: ignore[attr-defined]
    parallel.train()
    return statistics.mean(losses)


def comparison(estimate: Estimate, run: Run, checkpoint: Path) -> str:
    """Predicted against measured, and what was learnt."""
    steady = sorted(run.step_s[WARM_UP_STEPS:])
    median = statistics.median(steady)
    low, high = steady[len(steady) // 10], steady[-1 - len(steady) // 10]
    step = (estimate.step_s, estimate.step_low_s, estimate.step_high_s)
    peak = (estimate.peak_bytes, estimate.peak_low_bytes, estimate.peak_high_bytes)
    lines = [
        "",
        f"predicted against measured over {len(steady)} steps"
        f" (the first {WARM_UP_STEPS} are warm-up)",
        "               predicted (range)                measured (10th-90th percentile)",
        f"  step time    {_range(format_seconds, *step):<33}"
        f"{format_seconds(median)} ({format_seconds(low)} - {format_seconds(high)}){_verdict(median, *step)}",
        f"  peak memory  {_range(format_gib, *peak):<33}"
        f"{format_gib(run.peak_bytes)} on the fullest rank{_verdict(run.peak_bytes, *peak)}",
        "",
        f"loss in nats per byte: {run.losses[0]:.2f} at first,"
        f" {statistics.mean(run.losses[-AVERAGED_STEPS:]):.2f} after {len(run.losses)} steps;"
        f" on held-out text {run.held_out_before:.2f} -> {run.held_out_after:.2f}",
        f"checkpoint: {checkpoint.resolve()}",
    ]
    return "\n".join(lines)


def _range(show: object, value: float, low: float, high: float) -> str:
    assert callable(show)
    return f"{show(value)} ({show(low)} - {show(high)})"


def _verdict(measured: float, predicted: float, low: float, high: float) -> str:
    ratio = f"{measured / predicted - 1:+.0%}"
    return f", {ratio}" if low <= measured <= high else f", {ratio}: outside the range"


def _largest(value: int) -> int:
    if not dist.is_initialized():
        return value
    held = torch.tensor(float(value))
    dist.all_reduce(held, op=dist.ReduceOp.MAX)
    return int(held)


if __name__ == "__main__":
    main()
