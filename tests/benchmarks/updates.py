"""Ranks that update apart from each other, over links of a known rate: measured beside predicted.

`python -m tests.benchmarks.updates` (root, Linux) measures and writes
`tests/validation/updates.json`; `--show` prints its table. Four nodes around a switch, 100 Mbit/s
each way (tests.namespaces), one rank each, train a small GPT: first all alike, then with a
straggler, the last rank, which sleeps in every forward.

The machines are benched first, and the prediction is given that bench and `SLEEP_S`; nothing else
of what is measured here is. Bytes are those that the kernel sent.
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
from tests.engines.cases import cpu_ranks
from tests.namespaces import star, torchrun
from tests.validation.command import NO_FACTS, command

REPORT = Path(__file__).parents[1] / "validation" / "updates.json"
RATE_BYTES_PER_S = 12.5e6  # 100 Mbit/s
BENCH_S = 20.0
TIME_LIMIT_S = 540.0
RANKS, ROWS, SEQUENCE = 4, 2, 32
# Whole periods, so that a mean has its share of meetings.
STEPS, WARM_UP = 16, 2
SLEEP_S = 0.5
PLAIN = "dp_replicate=4"
LOCAL = f"{PLAIN} updates=local sync_every="
ONE_SERVER = "dp_replicate=3 servers=1"
BACKUP = "dp_replicate=2 servers=1 backup_workers=1"
PLANS = (
    PLAIN,
    f"{LOCAL}4",
    f"{LOCAL}16",
    f"{PLAIN} updates=diloco sync_every=16",
    ONE_SERVER,
    BACKUP,
    "dp_replicate=2 servers=2",
    "dp_replicate=1 servers=2 backup_workers=1",
    f"{ONE_SERVER} updates=asynchronous",
    f"{ONE_SERVER} updates=asynchronous max_staleness=1",
)


class Row(Record):
    """One plan, without a straggler or with one.

    Attributes:
        sleep_s: of the last rank, in every step.
        step_s: the mean of the steps of the middle one of the workers that do not sleep.
        predicted_s, predicted_low_s, predicted_high_s: of the same machines.
        sent_bytes: by the card of that worker in a step, headers and all.
        predicted_bytes: that a worker puts on its link in a step.
        says: the report of the first rank.
    """

    plan: str
    sleep_s: float
    step_s: float
    predicted_s: float = 0.0
    predicted_low_s: float = 0.0
    predicted_high_s: float = 0.0
    sent_bytes: float
    predicted_bytes: float = 0.0
    says: str

    @property
    def is_in_range(self) -> bool:
        return self.predicted_low_s <= self.step_s <= self.predicted_high_s


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
    rows: tuple[Row, ...]
    cluster: ClusterProfile | None = None

    def row(self, plan: str, *, straggler: bool = False) -> Row:
        """The one of a plan as `PLANS` names it."""
        return next(r for r in self.rows if r.plan == plan and bool(r.sleep_s) == straggler)


def measure() -> Report:
    """All plans in one job.

    Raises:
        RuntimeError: a rank failed; with its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        program = ["-m", "tests.benchmarks.updates", "--rank", str(path)]
        with star(RANKS, rate_bytes_per_s=RATE_BYTES_PER_S) as nodes:
            exits = torchrun(nodes, program, ranks_per_node=1, timeout_s=TIME_LIMIT_S)
        if any(node.code for node in exits) or not path.exists():
            raise RuntimeError("\n".join(node.output for node in exits))
        return Report.load(path)


def built() -> GPT:
    """The model, with the same parameters on every rank."""
    torch.manual_seed(1)
    return GPT(GPTConfig(vocab_size=256, context=SEQUENCE, num_layers=2, num_heads=4, width=128))


def batch_of_a_rank() -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of every step, the same on every rank."""
    tokens = torch.arange(ROWS * (SEQUENCE + 1)).reshape(ROWS, SEQUENCE + 1) % 256
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def facts_on(cluster: ClusterProfile) -> Facts:
    """The model's training on these machines."""
    return facts_from_module(
        built(),
        batch_of_a_rank(),
        loss_fn=loss,
        cluster=cluster,
        optimizer=adam,
        global_batch_size=ROWS * RANKS,
    )


def priced(row: Row, facts: Facts) -> Row:
    """With what is predicted for it today, with a straggler that is late by its sleep."""
    plan = Plan.parse(f"{row.plan} microbatch_size={ROWS}")
    own = estimate(plan, facts).time
    late = row.sleep_s / (own.compute_s + own.launch_s)
    workload = facts.workload.model_copy(update={"straggling": late})
    cost = estimate(plan, facts.model_copy(update={"workload": workload}))
    given = [t for t in cost.traffic if t.purpose != "parameters from servers"]
    return row.model_copy(
        update={
            "predicted_s": cost.step_s,
            "predicted_low_s": cost.step_low_s,
            "predicted_high_s": cost.step_high_s,
            "predicted_bytes": sum(t.bus_bytes for t in given),
        }
    )


def repriced() -> Report:
    """Load the committed report, predicted by today's code from the cluster that it stores.

    Without one, bytes alone: they are the same at any rate.
    """
    report = Report.load(REPORT)
    facts = facts_on(report.cluster or cpu_ranks(RANKS, nodes=RANKS))
    rows = [priced(row, facts) for row in report.rows]
    if report.cluster is None:
        rows = [
            then.model_copy(update={"predicted_bytes": now.predicted_bytes})
            for then, now in zip(report.rows, rows, strict=True)
        ]
    return report.model_copy(update={"rows": tuple(rows)})


def table(report: Report) -> str:
    """The report for a person."""
    lines = [
        f"{report.parameters / 1e6:.2f} M parameters, {RANKS} nodes of 1 rank at"
        f" {report.line_bytes_per_s / 1e6:.1f} MB/s, {report.machine}, torch {report.torch}",
        f"{'plan':<60}{'sleep':>6}{'step':>8}{'predicted':>10}{'(range)':>15}{'':>4}"
        f"{'KB sent':>9}{'said':>7}  first rank's report",
    ]
    for row in report.rows:
        span = f"{row.predicted_low_s:.3f} to {row.predicted_high_s:.3f}"
        lines.append(
            f"{row.plan:<60}{row.sleep_s:>6.1f}{row.step_s:>7.3f}s{row.predicted_s:>9.3f}s"
            f"{span:>15}{'' if row.is_in_range else ' out':>4}{row.sent_bytes / 1e3:>9.0f}"
            f"{row.predicted_bytes / 1e3:>7.0f}  {row.says}".rstrip()
        )
    if report.cluster is None:
        lines.append(NO_FACTS)
    return "\n".join(lines)


def _rank(path: str) -> None:
    """One rank of `measure`."""
    import torch.distributed as dist

    from engines.apply import apply_plan
    from engines.runtime.world import join_world, leave_world
    from profiles.machine.bench import bench
    from profiles.machine.probe import probe

    world = join_world(timeout_s=60.0)
    cluster = bench(probe(), budget_s=BENCH_S)
    batch, known = batch_of_a_rank(), facts_on(cluster)
    card = Path("/sys/class/net") / os.environ["GLOO_SOCKET_IFNAME"] / "statistics" / "tx_bytes"

    def one(plan: Plan, sleep_s: float) -> tuple[float, float, str]:
        """Mean step and bytes sent, of the middle one of the workers that do not sleep; what the
        first rank reports."""
        parallel = apply_plan(
            built(),
            plan,
            profile=known.model,
            cluster=known.cluster,
            loss_fn=loss,
            optimizer=adam,
            world=world,
        )
        if sleep_s and world.rank == RANKS - 1:
            parallel.module.register_forward_pre_hook(lambda *_: time.sleep(sleep_s))
        seconds, before = [], 0
        for step in range(WARM_UP + STEPS):
            if step == WARM_UP:
                before = int(card.read_text())
            began = time.perf_counter()
            parallel.train_step(batch)
            seconds.append(time.perf_counter() - began)
            if step + 1 == WARM_UP:
                parallel.synchronise()  # what follows are whole periods, and nobody is ahead
                dist.barrier()
        sent = (int(card.read_text()) - before) / STEPS
        report = parallel.update_report
        parallel.synchronise()
        dist.barrier()  # nobody leaves before all are done
        results: list[tuple[float, float, str]] = [(0.0, 0.0, "")] * RANKS
        mine = statistics.fmean(seconds[WARM_UP:]), sent, str(report) if report else ""
        dist.all_gather_object(results, mine)
        workers = sorted(results[plan.servers : RANKS - 1])
        return workers[len(workers) // 2][0], workers[len(workers) // 2][1], results[0][2]

    rows = []
    for sleep_s in (0.0, SLEEP_S):
        for text in PLANS:
            step_s, sent, says = one(Plan.parse(f"{text} microbatch_size={ROWS}"), sleep_s)
            row = Row(plan=text, sleep_s=sleep_s, step_s=step_s, sent_bytes=sent, says=says)
            rows.append(priced(row, known))
            if world.rank == 0:
                sys.stderr.write(f"{rows[-1]}\n")
    if world.rank == 0:
        report = Report(
            measured_at=datetime.now(UTC).strftime("%Y-%m-%d"),
            machine=f"{os.cpu_count()} cores",
            torch=torch.__version__,
            line_bytes_per_s=RATE_BYTES_PER_S,
            parameters=known.model.parameters,
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
