"""Less to send on slow links: steps and losses of DDP's ways, and of the one that is chosen.

`python -m tests.benchmarks.less_to_send` (root, Linux) measures and writes
`tests/validation/less_to_send.json`; `--show` prints its table. Two nodes of two ranks at 100
Mbit/s (tests.namespaces) train a small GPT on real text, by every plan from the same parameters on
the same batches. The machines are benched first, and `auto_parallelize` takes one of the plans with
`allow_lossy=True`: its loss must follow plain DDP's within `TOLERANCE`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from advisor.auto.facts_from_module import facts_from_module
from advisor.cost import estimate
from advisor.inputs.bundled.gpt import GPT, GPTConfig, loss
from advisor.inputs.facts import Facts
from engines.plan import Plan
from profiles.machine.cluster import ClusterProfile
from profiles.record import Document, Record
from tests.namespaces import torchrun, two_nodes
from tests.validation.command import NO_FACTS, command

REPORT = Path(__file__).parents[1] / "validation" / "less_to_send.json"
RATE_BYTES_PER_S = 12.5e6  # 100 Mbit/s
BENCH_S = 20.0
TIME_LIMIT_S = 540.0
STEPS, FIRST_TIMED = 30, 4  # DDP settles on its buckets, PowerSGD begins
RANKS, SEQUENCE, ROWS = 4, 32, 2  # rows of a rank
# Of the mean loss of the last `TAIL` steps over plain DDP's. PowerSGD's and bf16's gradients are
# others: the papers promise the same quality after a training, not the same steps.
TOLERANCE, TAIL = 0.05, 10
LEAST_GAIN = 3.0
PLAIN = "dp_replicate=4"
PLANS = (
    PLAIN,
    f"{PLAIN} aggregation=hierarchical",
    f"{PLAIN} compression=bf16",
    f"{PLAIN} aggregation=hierarchical compression=bf16",
    f"{PLAIN} compression=powersgd compression_rank=4",
)


class Row(Record):
    """One plan.

    Attributes:
        step_s: the median of its steps on the slowest rank.
        predicted_s, predicted_low_s, predicted_high_s: of the same machines.
        losses: of every step, over all ranks.
        is_chosen: it is the plan that was taken.
    """

    plan: str
    step_s: float
    predicted_s: float = 0.0
    predicted_low_s: float = 0.0
    predicted_high_s: float = 0.0
    losses: tuple[float, ...]
    is_chosen: bool

    @property
    def last_loss(self) -> float:
        """The mean of the last steps."""
        return statistics.mean(self.losses[-TAIL:])


class Report(Document):
    """All plans, and on what they ran.

    Attributes:
        cluster: as benched before the steps, from which they are predicted; None in reports of
            before it was stored.
    """

    measured_at: str
    machine: str
    torch: str
    line_bytes_per_s: float
    parameters: int
    reasons: tuple[str, ...]
    rows: tuple[Row, ...]
    cluster: ClusterProfile | None = None

    @property
    def plain(self) -> Row:
        return self.rows[0]

    @property
    def chosen(self) -> Row:
        return next(row for row in self.rows if row.is_chosen)


def measure() -> Report:
    """All plans in one job.

    Raises:
        RuntimeError: a rank failed; with its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        program = ["-m", "tests.benchmarks.less_to_send", "--rank", str(path)]
        with two_nodes(rate_bytes_per_s=RATE_BYTES_PER_S) as nodes:
            exits = torchrun(nodes, program, ranks_per_node=2, timeout_s=TIME_LIMIT_S)
        if any(node.code for node in exits) or not path.exists():
            raise RuntimeError("\n".join(node.output for node in exits))
        return Report.load(path)


def built() -> GPT:
    """The model, with the same parameters on every rank."""
    torch.manual_seed(1)
    return GPT(GPTConfig(vocab_size=256, context=SEQUENCE, num_layers=4, num_heads=4, width=256))


def adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def facts_on(cluster: ClusterProfile) -> Facts:
    """The model's training on these machines."""
    tokens = torch.zeros(ROWS, SEQUENCE, dtype=torch.long)
    return facts_from_module(
        built(),
        (tokens, tokens),
        loss_fn=loss,
        cluster=cluster,
        optimizer=adam,
        global_batch_size=ROWS * RANKS,
    )


def priced(row: Row, facts: Facts) -> Row:
    """With what is predicted for it today."""
    cost = estimate(Plan.parse(row.plan), facts)
    return row.model_copy(
        update={
            "predicted_s": cost.step_s,
            "predicted_low_s": cost.step_low_s,
            "predicted_high_s": cost.step_high_s,
        }
    )


def repriced() -> Report:
    """Load the committed report, predicted by today's code if it stores its cluster."""
    report = Report.load(REPORT)
    if report.cluster is None:
        return report
    facts = facts_on(report.cluster)
    return report.model_copy(update={"rows": tuple(priced(row, facts) for row in report.rows)})


def table(report: Report) -> str:
    """The report for a person."""
    plain = report.plain
    lines = [
        f"{report.parameters / 1e6:.1f} M parameters, 2 nodes of 2 ranks at"
        f" {report.line_bytes_per_s / 1e6:.1f} MB/s, {report.machine}, torch {report.torch}",
        f"{'plan':<76}{'step':>8}{'gain':>6}{'predicted':>11}{'(range)':>16}{'last loss':>11}",
    ]
    for row in report.rows:
        span = f"{row.predicted_low_s:.2f} to {row.predicted_high_s:.2f}"
        lines.append(
            f"{row.plan:<76}{row.step_s:>7.2f}s{plain.step_s / row.step_s:>6.1f}"
            f"{row.predicted_s:>10.2f}s{span:>16}{row.last_loss:>11.3f}"
            f"{'  <- chosen' if row.is_chosen else ''}"
        )
    if report.cluster is None:
        lines.append(NO_FACTS)
    return "\n".join(lines)


def _rank(path: str) -> None:
    """One rank of `measure`."""
    import torch.distributed as dist

    from advisor.auto.parallelize import auto_parallelize
    from advisor.decide.decision import Decision
    from advisor.tutorial.demo.text import ByteWindows, reference_text
    from engines.apply import apply_plan
    from engines.parallel import ParallelModel
    from engines.runtime.world import join_world, leave_world
    from profiles.machine.bench import bench
    from profiles.machine.probe import probe

    world = join_world(timeout_s=120.0)
    cluster = bench(probe(), budget_s=BENCH_S)
    windows = ByteWindows(reference_text().train, length=SEQUENCE)
    picks = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's rows of a step's batch."""
        first = (step * world.size + world.rank) * ROWS
        rows = [windows[int(pick)] for pick in picks[first : first + ROWS]]
        tokens, following = zip(*rows, strict=True)
        return torch.stack(tokens), torch.stack(following)

    def trained(parallel: ParallelModel) -> tuple[float, list[float]]:
        losses, seconds = [], []
        for step in range(STEPS):
            dist.barrier()
            began = time.perf_counter()
            losses.append(parallel.train_step(batch(step)).item())
            seconds.append(time.perf_counter() - began)
        slowest = torch.tensor(statistics.median(seconds[FIRST_TIMED:]), dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest), losses

    chosen = auto_parallelize(
        built(),
        sample=batch(0),
        loss_fn=loss,
        optimizer=adam,
        global_batch_size=ROWS * world.size,
        cluster=cluster,
        allow_lossy=True,
        learns=False,
    )
    decision = chosen.decision
    assert isinstance(decision, Decision)
    runs = {str(decision.plan): trained(chosen)}
    del chosen
    for text in PLANS:
        plan = Plan.parse(f"{text} microbatch_size={ROWS}")
        if str(plan) not in runs:
            facts = decision.facts
            parallel = apply_plan(
                built(),
                plan,
                profile=facts.model,
                cluster=facts.cluster,
                loss_fn=loss,
                optimizer=adam,
                world=world,
            )
            runs[str(plan)] = trained(parallel)
    if world.rank == 0:
        rows, known = [], facts_on(cluster)
        order = [str(Plan.parse(f"{text} microbatch_size={ROWS}")) for text in PLANS]
        for text in dict.fromkeys([*order, *runs]):
            seconds, losses = runs[text]
            row = Row(
                plan=text,
                step_s=seconds,
                losses=tuple(round(value, 4) for value in losses),
                is_chosen=text == str(decision.plan),
            )
            rows.append(priced(row, known))
        report = Report(
            measured_at=datetime.now(UTC).strftime("%Y-%m-%d"),
            machine=f"{os.cpu_count()} cores",
            torch=torch.__version__,
            line_bytes_per_s=RATE_BYTES_PER_S,
            parameters=known.model.parameters,
            reasons=decision.reasons,
            rows=tuple(rows),
            cluster=cluster,
        )
        Path(path).write_text(json.dumps(report.model_dump(mode="json"), indent=2) + "\n")
    dist.barrier()
    leave_world()


def main() -> int:
    """The command."""
    return command(
        REPORT, about=__doc__, rank=_rank, measure=measure, repriced=repriced, table=table
    )


if __name__ == "__main__":
    sys.exit(main())
