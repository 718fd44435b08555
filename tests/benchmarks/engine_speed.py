"""Our engines against hand-written torch of the same plan, step by step in turns.

    python -m tests.benchmarks.engine_speed [--case NAME ...] [--steps N] [--out FILE.json]

Both variants of a case live on the same ranks in one run. Their steps take turns, each between two
barriers, so that whatever else the machine does hits both; what counts is the median of the ratios
of neighbouring steps. Memory is the highest sum of live tensor storages on a rank, in a run of its
own for each variant. Targets: time at most 1.02 (data parallel) and 1.05 (tensor, pipeline), memory
at most 1.02; against Accelerate and DeepSpeed at most 1. A case whose plan or package is not there
is left out with the reason.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.benchmarks import by_hand
from tests.benchmarks.subject import BATCH, GPT, loss_fn, make_batch
from tests.workers import Pool, RankFailure

Step = Callable[[], object]
WARM_UP = 3
LIMIT_S = 900.0


@dataclass(frozen=True)
class Case:
    """`rows`: of a rank's batch. `limit`: the target of the time's ratio."""

    plan: str
    ranks: int
    hand: Callable[[GPT, Tensor, Tensor], Step]
    limit: float
    rows: int = BATCH
    needs: str = ""


CASES = {
    "ddp": Case("dp_replicate=2", 2, by_hand.ddp, 1.02),
    "zero1": Case("dp_replicate=2 zero=1", 2, by_hand.zero1, 1.02),
    "zero3": Case("dp_shard=2", 2, by_hand.zero3, 1.02),
    "tp": Case("tp=2", 2, by_hand.tensor, 1.05),
    "pp": Case(
        "pp=2 schedule=1f1b microbatches=4 stages=blocks.2", 2, by_hand.pipeline, 1.05, rows=4
    ),
    "pp-ddp": Case(
        "pp=2 dp_replicate=2 schedule=1f1b microbatches=4 stages=blocks.2",
        4,
        by_hand.pipeline_ddp,
        1.05,
        rows=4,
    ),
    "tp-zero3": Case("tp=2 dp_shard=2", 4, by_hand.tensor_zero3, 1.05),
    "accelerate-ddp": Case("dp_replicate=2", 2, by_hand.accelerate_ddp, 1.0, needs="accelerate"),
    "deepspeed-zero1": Case(
        "dp_replicate=2 zero=1", 2, by_hand.deepspeed_zero1, 1.0, needs="deepspeed"
    ),
    "deepspeed-zero3": Case("dp_shard=2", 2, by_hand.deepspeed_zero3, 1.0, needs="deepspeed"),
}


@dataclass(frozen=True)
class Lap:
    """Seconds by the clock, until all ranks are there, and of this rank's processor."""

    clock_s: float
    cpu_s: float


@dataclass(frozen=True)
class Result:
    """Ratios are ours over theirs; `low` and `high` are the quartiles of the ratios of pairs.

    `cpu_ratio`: of processor seconds of all ranks, which other programs disturb less than they do
    the clock; waiting does not count.
    """

    case: str
    ratio: float
    low: float
    high: float
    limit: float
    ours_s: float
    theirs_s: float
    cpu_ratio: float
    memory_ratio: float
    ours_bytes: int
    theirs_bytes: int
    steps: int


def build(case: Case, *, ours: bool) -> Step:
    """A step of the case's plan on a fresh model, the same on every rank."""
    warnings.simplefilter("ignore")  # of other packages: the pool makes errors of them
    torch.manual_seed(0)
    model = GPT()
    is_split = "pp=" in case.plan or "tp=" in case.plan  # ranks of a replica have the same rows
    ids, targets = make_batch(case.rows, seed=0 if is_split else dist.get_rank())
    if not ours:
        return case.hand(model, ids, targets)
    from engines.apply import apply_plan
    from engines.plan import Plan
    from engines.tensor.proposal import propose_styles
    from profiles.capture.capture import capture
    from tests.engines.cases import cpu_ranks

    plan, batch = Plan.parse(case.plan), (ids, targets)
    profile = capture(model, batch, loss_fn=loss_fn)
    if plan.tp > 1:
        proposal = propose_styles(model, batch, size=plan.tp, profile=profile, has_target=True)
        plan = plan.model_copy(update={"tensor_styles": proposal.styles})
    parallel = apply_plan(
        model,
        plan,
        profile=profile,
        cluster=cpu_ranks(case.ranks),
        loss_fn=loss_fn,
        optimizer=by_hand.adam,
        sample=batch,
    )
    return lambda: parallel.train_step(batch)


def timed(name: str, steps: int) -> list[tuple[Lap, Lap]]:
    """Laps of our steps and of theirs, on this rank."""
    case = CASES[name]
    variants = [build(case, ours=True), build(case, ours=False)]
    results = []
    for number in range(WARM_UP + steps):
        order = (0, 1) if number % 2 else (1, 0)
        laps_of = {variant: lap(variants[variant]) for variant in order}
        if number >= WARM_UP:
            results.append((laps_of[0], laps_of[1]))
    return results


def lap(step: Step) -> Lap:
    gc.collect()
    dist.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    step()
    used = time.process_time() - cpu
    dist.barrier()
    return Lap(time.perf_counter() - start, used)


def peak_tensor_bytes(name: str, ours: bool) -> int:
    """Most bytes of live tensors on this rank in a step, of all it has since before the model."""
    from tests.contract.watch import LiveBytes

    watched = LiveBytes([])
    with watched:
        step = build(CASES[name], ours=ours)
        step()
        gc.collect()
        watched.peak_bytes = 0
        for _ in range(2):
            step()
    return watched.peak_bytes


def compare(name: str, *, steps: int) -> Result | str:
    """Measurements of one plan, or the reason why there are none."""
    case = CASES[name]
    if case.needs and importlib.util.find_spec(case.needs) is None:
        return f"{case.needs} is not installed"
    try:
        pairs = _run(timed, case, name, steps)
        ours, theirs = (
            max(_run(peak_tensor_bytes, case, name, is_ours)) for is_ours in (True, False)
        )
    except RankFailure as error:
        return _reason(str(error))
    ours_s, theirs_s = ([pair[side].clock_s for pair in pairs[0]] for side in (0, 1))
    ours_cpu_s, theirs_cpu_s = (
        [sum(lap[side].cpu_s for lap in ranks) for ranks in zip(*pairs, strict=True)]
        for side in (0, 1)
    )
    ratios = [a / b for a, b in zip(ours_s, theirs_s, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    return Result(
        case=name,
        ratio=median,
        low=low,
        high=high,
        limit=case.limit,
        ours_s=statistics.median(ours_s),
        theirs_s=statistics.median(theirs_s),
        cpu_ratio=statistics.median(a / b for a, b in zip(ours_cpu_s, theirs_cpu_s, strict=True)),
        memory_ratio=ours / theirs,
        ours_bytes=ours,
        theirs_bytes=theirs,
        steps=steps,
    )


def _run(function: Callable[..., Any], case: Case, *args: object) -> list[Any]:
    """In processes of its own: DeepSpeed keeps groups of an earlier job."""
    pool = Pool(case.ranks)
    try:
        return pool.run(function, *args, world_size=case.ranks, timeout_s=LIMIT_S)
    finally:
        pool.close()


def _reason(text: str) -> str:
    """The line of the error in a traceback of a rank."""
    lines = [line for line in text.splitlines() if line and not line.startswith((" ", "hint"))]
    return next((line for line in lines if "Error" in line.split(":")[0]), lines[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", action="append", choices=list(CASES), help="all if left out")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    print(
        f"{'case':16} {'ours':>8} {'theirs':>8} {'ratio':>6}  {'quartiles':13} {'limit':>5} memory"
    )
    rows: dict[str, object] = {}
    for name in options.case or CASES:
        comparison = compare(name, steps=options.steps)
        if isinstance(comparison, str):
            print(f"{name:16} left out: {comparison}", flush=True)
            rows[name] = {"left_out": comparison}
            continue
        print(
            f"{name:16} {comparison.ours_s * 1e3:5.0f} ms {comparison.theirs_s * 1e3:5.0f} ms"
            f" {comparison.ratio:6.3f}  {comparison.low:.3f}"
            f" - {comparison.high:.3f} {comparison.limit:5.2f}"
            f" {comparison.cpu_ratio:6.3f} {comparison.memory_ratio:6.3f}",
            flush=True,
        )
        rows[name] = asdict(comparison)
    if options.out is not None:
        about = {"torch": torch.__version__, "cores": os.cpu_count(), "cases": rows}
        options.out.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
