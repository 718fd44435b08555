"""A rank of the demo: plan for this machine, train a small GPT, compare with the prediction."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch.utils.data import DataLoader, Subset

from advisor.auto.local_ranks import ended_with
from advisor.auto.parallelize import advise, auto_parallelize
from advisor.cost import CostModel
from advisor.cost.estimates.process_memory import process_memory
from advisor.decide.decision import Decision
from advisor.inputs.bundled.gpt import GPT, loss
from advisor.inputs.bundled.gpt_shapes import SHAPES
from advisor.inputs.console import COLUMNS, show_on_screen
from advisor.learning.run_log import keep_run
from advisor.tutorial.demo.launch import GLOBAL_BATCH
from advisor.tutorial.demo.text import ByteWindows, reference_text
from engines.parallel import ParallelModel
from engines.runtime.world import join_world, leave_world
from profiles.allocator.process_peak import peak_memory_bytes, reset_peak_memory
from profiles.capture.batch.call import Batch
from profiles.errors import AdvisorError, InputError, PlanError
from profiles.machine.bench import bench, progress
from profiles.machine.probe import probe
from profiles.units import format_gib, format_seconds

HELD_OUT_BATCHES = 4
LEARNT_FRACTION = 0.55  # stop at this part of the initial loss, well beyond noise
AVERAGED_STEPS = 5
MOST_STEPS = 150
LINE_EVERY_STEPS = 10
WARM_UP_STEPS = 2  # first steps allocate memory and build communication buckets
# nanoGPT warms up to 1e-3 for this size; without warm-up that sometimes overshoots, and a run that
# ends on such a step shows no learning.
LEARNING_RATE = 3e-4
SEED = 0  # the same weights and batches in every run
CHECKPOINT = Path("runs/demo")
BENCH_S = 10.0


@dataclass
class DemoRun:
    """Measurements of a training run."""

    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    held_out_before: float = 0.0
    held_out_after: float = 0.0
    peak_bytes: int = 0


@click.command()
@click.option("--plan", default=None)
@click.option("--steps", type=click.IntRange(min=WARM_UP_STEPS + 1), default=None)
@click.option("--exit-code", type=click.Path(path_type=Path), required=True)
def main(plan: str | None, steps: int | None, exit_code: Path) -> None:
    """Run one rank; started by `advise demo`.

    Errors before training that all ranks share (a rejected plan, say) are not process failures:
    rank 0 prints them and writes the exit code of the command to the file `exit_code`.
    """
    with ended_with(exit_code.parent):
        try:
            _demo(plan, steps, exit_code)
        finally:
            leave_world()


def _demo(plan: str | None, steps: int | None, exit_code: Path) -> None:
    world = join_world()
    torch.manual_seed(SEED)
    screen = Console(stderr=True) if world.rank == 0 else None
    config = SHAPES["gpt-10m"]
    text = reference_text()
    train = ByteWindows(text.train, length=config.context)
    held_out = ByteWindows(text.held_out, length=config.context)
    try:
        parallel = _parallel_model(GPT(config), train, plan, world.size, screen)
    except AdvisorError as error:
        if screen:
            click.echo(f"error: {error}", err=True)
            exit_code.write_text(str(error.exit_code))
        return
    run = _train(parallel, train, held_out, steps=steps, screen=screen)
    parallel.save(CHECKPOINT)
    keep_run(parallel, peak_bytes=run.peak_bytes)
    ranks = _ranks(parallel)
    if screen:
        assert isinstance(parallel.decision, Decision)
        click.echo(comparison(parallel.decision, run, CHECKPOINT, ranks=ranks))


def _parallel_model(
    model: GPT, train: ByteWindows, plan: str | None, ranks: int, screen: Console | None
) -> ParallelModel:
    """Profile, decide, print the report, wrap."""
    if screen:
        screen.print("looking at this machine and at the model ...", highlight=False)
    rows = [train[index] for index in range(max(1, GLOBAL_BATCH // ranks))]
    sample = torch.stack([tokens for tokens, _ in rows]), torch.stack([n for _, n in rows])
    cluster = None
    if ranks > 1 and plan:  # reject an invalid plan before the machine is timed
        advise(model, sample=sample, loss_fn=loss, plan=plan, global_batch_size=GLOBAL_BATCH)
    if ranks > 1:  # a cached bench of another hour would not predict this run's steps
        with progress(rank=dist.get_rank(), budget_s=BENCH_S) as tell:
            cluster = bench(probe(), budget_s=BENCH_S, tell=tell)
    parallel = auto_parallelize(
        model,
        sample=sample,
        loss_fn=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=LEARNING_RATE),
        plan=plan,
        global_batch_size=GLOBAL_BATCH,
        max_grad_norm=1.0,
        cluster=cluster,
    )
    if screen:
        assert isinstance(parallel.decision, Decision)
        show_on_screen(parallel.decision, no_color=False)
    return parallel


def _train(
    parallel: ParallelModel,
    train: ByteWindows,
    held_out: ByteWindows,
    *,
    steps: int | None,
    screen: Console | None,
) -> DemoRun:
    """Train until the loss has clearly fallen, or exactly `steps` times."""
    device = next(iter(parallel.parameters())).device
    loader = DataLoader(train, batch_size=GLOBAL_BATCH, shuffle=True, drop_last=True)
    fixed = Subset(held_out, range(HELD_OUT_BATCHES * GLOBAL_BATCH))
    unseen = parallel.shard(DataLoader(fixed, batch_size=GLOBAL_BATCH))
    run = DemoRun()
    reset_peak_memory(device)
    run.held_out_before = _held_out(parallel, unseen)
    most = steps or MOST_STEPS
    with _progress(screen, most) as advance:
        while len(run.losses) < most:
            for batch in parallel.shard(loader):
                began = time.perf_counter()
                value = parallel.train_step(batch).item()
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
    run.peak_bytes = _largest(peak_memory_bytes(device))
    run.held_out_after = _held_out(parallel, unseen)
    return run


def _held_out(parallel: ParallelModel, unseen: Iterable[Batch]) -> float:
    parallel.eval()
    losses = [parallel.eval_step(batch).item() for batch in unseen]
    parallel.train()
    return statistics.mean(losses)


@contextmanager
def _progress(screen: Console | None, steps: int) -> Iterator[Callable[[float], None]]:
    """Report each step's loss: a progress bar on a terminal, occasional lines elsewhere."""
    if screen is None:
        yield lambda value: None
    elif screen.is_terminal:
        loss_column = TextColumn("loss {task.fields[loss]:.2f}")
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), loss_column)
        with Progress(TextColumn("training"), *columns, console=screen) as bar:
            task = bar.add_task("", total=steps, loss=float("nan"))
            yield lambda value: bar.update(task, advance=1, loss=value)
    else:
        seen: list[float] = []

        def tell(value: float) -> None:
            seen.append(value)
            if len(seen) % LINE_EVERY_STEPS == 1:
                screen.print(f"step {len(seen)}: loss {value:.2f}", highlight=False)

        yield tell


def _ranks(parallel: ParallelModel) -> str:
    """Describe straggling ranks; empty for a single rank or few steps."""
    try:
        return str(parallel.imbalance())
    except (PlanError, InputError):  # raised on all ranks
        return ""


def comparison(decision: Decision, run: DemoRun, checkpoint: Path, *, ranks: str = "") -> str:
    """Compare predicted with measured values, and report the loss."""
    estimate, steady = decision.estimate, sorted(run.step_s[WARM_UP_STEPS:])
    median = statistics.median(steady)
    low, high = steady[len(steady) // 10], steady[-1 - len(steady) // 10]
    step = (estimate.step_s, estimate.step_low_s, estimate.step_high_s)
    peak = process_memory(CostModel(decision.facts), decision.plan, estimate)
    recent = statistics.mean(run.losses[-AVERAGED_STEPS:])
    waited = ""
    if ranks:
        waited = fill(f"ranks       {ranks}", width=COLUMNS, subsequent_indent=" " * 12) + "\n"
    return f"""
               predicted  (range)                 measured   (range)
  step time    {_row(format_seconds, (median, low, high), step)}
  peak memory  {_row(format_gib, (run.peak_bytes,), peak)}
  measured: the median of {len(steady)} steps after {WARM_UP_STEPS} of warm-up, 10th to 90th
  percentile; the fullest rank, interpreter and libraries included

loss in nats per byte
  training  {run.losses[0]:.2f} at first, {recent:.2f} after {len(run.losses)} steps
  held out  {run.held_out_before:.2f} at first, {run.held_out_after:.2f} after
{waited}checkpoint  {checkpoint.resolve()}"""


def _row(
    show: Callable[[float], str],
    measured: tuple[float, ...],
    predicted: tuple[float, float, float],
) -> str:
    """Format the predicted value, its range, the measured value, and the relative difference."""
    value, low, high = predicted
    cells = [show(value), f"{show(low)} - {show(high)}", show(measured[0])]
    cells.append(" - ".join(show(end) for end in measured[1:]))
    inside = "" if low <= measured[0] <= high else ", outside the range"
    widths = (11, 24, 11, 0)
    row = "".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))
    return f"{row}\n{'':15}measured is {measured[0] / value - 1:+.0%}{inside}"


def _largest(value: int) -> int:
    """Maximum over all ranks."""
    if not dist.is_initialized():
        return value
    maximum = torch.tensor(float(value))
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX)
    return int(maximum)


if __name__ == "__main__":
    main()
