"""Bench results on links of known rate, and the tree's verdict: a table, and a report.

`python -m tests.validation.shaped_links` (root, Linux) measures and writes `shaped_links.json`
beside this file; `--show` prints the table of the file. Two nodes of two ranks (tests.namespaces),
at 100 Mbit/s, 1 Gbit/s and unshaped, each benched by all four ranks; then the decision for the
demo's model on those machines.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from profiles.machine.cluster import ClusterProfile, Collective
from profiles.record import Document, Record
from tests.namespaces import torchrun, two_nodes
from tests.validation.command import NO_FACTS, command

REPORT = Path(__file__).with_name("shaped_links.json")
RATES_BYTES_PER_S = (12.5e6, 125e6, None)  # 100 Mbit/s, 1 Gbit/s, as fast as the machine can
RANKS_PER_NODE = 2
WORLD = 2 * RANKS_PER_NODE
BENCH_S = 30.0
TIME_LIMIT_S = 180.0
# Of the demo's model: so many that what ZeRO-3 needs lies between the two shaped rates.
GLOBAL_BATCH = 48


class Row(Record):
    """One rate.

    Attributes:
        line_bytes_per_s: what the cards were shaped to; None: not at all.
        inter_bytes_per_s: the link between nodes as benched.
        collectives_bytes_per_s: the same of each collective.
        intra_bytes_per_s, intra_low_bytes_per_s, intra_high_bytes_per_s: inside a node.
        flop_per_s: of one rank's matrix products.
        needed_bytes_per_s, given_bytes_per_s: what the tree compares.
        verdict, because: the tree's answer.
        formula_needed_bytes_per_s: see `needed_by_formula`.
        cluster: the bench, from which all other figures follow; None in reports of before it was
            stored.
    """

    line_bytes_per_s: float | None
    inter_bytes_per_s: float
    collectives_bytes_per_s: dict[Collective, float]
    intra_bytes_per_s: float
    intra_low_bytes_per_s: float
    intra_high_bytes_per_s: float
    flop_per_s: float
    needed_bytes_per_s: float
    given_bytes_per_s: float
    formula_needed_bytes_per_s: float
    verdict: str
    because: str
    cluster: ClusterProfile | None = None


class Report(Document):
    """All rates, and on what they were measured."""

    measured_at: str
    machine: str
    torch: str
    rows: tuple[Row, ...]

    @property
    def is_priced(self) -> bool:
        """True if every row stores its bench."""
        return all(row.cluster is not None for row in self.rows)


def bench_at(rate_bytes_per_s: float | None) -> ClusterProfile:
    """Two nodes with such a link, benched by their own ranks.

    Raises:
        RuntimeError: the nodes cannot be built, or a rank failed; with its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.json"
        program = ["-m", "tests.validation.shaped_links", "--rank", str(path)]
        with two_nodes(rate_bytes_per_s=rate_bytes_per_s) as nodes:
            exits = torchrun(nodes, program, ranks_per_node=RANKS_PER_NODE, timeout_s=TIME_LIMIT_S)
        if any(node.code for node in exits) or not path.exists():
            raise RuntimeError("\n".join(node.output for node in exits))
        return ClusterProfile.load(path)


def row_of(cluster: ClusterProfile, line_bytes_per_s: float | None) -> Row:
    """The figures of a bench, and the decision for the demo's model on such machines."""
    import torch

    from advisor.auto.facts_from_module import facts_from_module
    from advisor.cost import CostModel
    from advisor.decide.choose import choose
    from advisor.decide.walk import given_bytes_per_s, needed_bytes_per_s
    from advisor.inputs.bundled.gpt import GPT, loss
    from advisor.inputs.bundled.gpt_shapes import SHAPES
    from engines.plan import Plan, Recompute

    config = SHAPES["gpt-10m"]
    tokens = torch.zeros(GLOBAL_BATCH // WORLD, config.context, dtype=torch.long)
    facts = facts_from_module(
        GPT(config),
        (tokens, tokens),
        loss_fn=loss,
        cluster=cluster,
        global_batch_size=GLOBAL_BATCH,
    )
    decision = choose(facts)
    step = next(step for step in decision.trace.steps if "between nodes" in step.question)
    costs = CostModel(facts)
    # As the tree does: the plan that needs least. Recompute stretches the computing.
    plans = [
        Plan.parse(f"dp_shard={WORLD} microbatch_size={GLOBAL_BATCH // WORLD} recompute={kind}")
        for kind in Recompute
    ]
    assert cluster.intra is not None
    assert cluster.inter is not None
    intra, rate = cluster.intra.bandwidth_bytes_per_s, cluster.device.flop_per_s["float32"].value
    return Row(
        line_bytes_per_s=line_bytes_per_s,
        inter_bytes_per_s=cluster.inter.bandwidth_bytes_per_s.value,
        collectives_bytes_per_s={
            kind: result.busbw_bytes_per_s for kind, result in cluster.inter.fits.items()
        },
        intra_bytes_per_s=intra.value,
        intra_low_bytes_per_s=intra.low,
        intra_high_bytes_per_s=intra.high,
        flop_per_s=rate,
        needed_bytes_per_s=min(needed_bytes_per_s(costs.estimate(plan)) for plan in plans),
        given_bytes_per_s=given_bytes_per_s(cluster),
        formula_needed_bytes_per_s=needed_by_formula(
            rate, tokens=GLOBAL_BATCH // WORLD * config.context
        ),
        verdict=step.answer,
        because=step.because,
        cluster=cluster,
    )


def repriced() -> Report:
    """Load the committed report, decided by today's code where a row stores its bench."""
    report = Report.load(REPORT)
    rows = [
        row_of(row.cluster, row.line_bytes_per_s) if row.cluster else row for row in report.rows
    ]
    return report.model_copy(update={"rows": tuple(rows)})


def needed_by_formula(flop_per_s: float, *, tokens: int) -> float:
    """Bandwidth that ZeRO-3 needs to hide in fp32, of P parameters on W ranks.

    It sends 2 gathers and a reduction of 4 P bytes, (W - 1) / W of each on the link, while it
    computes 6 P FLOP a token: P goes out. An upper bound, for a step does more than products; a
    third of it is a lower one: recompute makes 8 of the 6, and what a decoder does besides products
    takes less time than those.
    """
    return 3 * 4 * (WORLD - 1) / WORLD / (6 * tokens / flop_per_s)


def table(report: Report) -> str:
    """The report for a person, in MB/s."""
    lines = [
        f"two nodes of {RANKS_PER_NODE} gloo ranks, {report.machine}, torch {report.torch}, MB/s",
        f"{'line rate':>10}{'between':>9}{'of line':>9}{'in node':>9}{'(range)':>16}"
        f"{'needed':>9}{'given':>9}  verdict",
    ]
    for row in report.rows:
        line = row.line_bytes_per_s
        span = f"{row.intra_low_bytes_per_s / 1e6:.0f} to {row.intra_high_bytes_per_s / 1e6:.0f}"
        lines.append(
            f"{f'{line / 1e6:.1f}' if line else 'unshaped':>10}"
            f"{row.inter_bytes_per_s / 1e6:>9.1f}"
            f"{f'{row.inter_bytes_per_s / line:.0%}' if line else '-':>9}"
            f"{row.intra_bytes_per_s / 1e6:>9.0f}{span:>16}"
            f"{row.needed_bytes_per_s / 1e6:>9.1f}{row.given_bytes_per_s / 1e6:>9.1f}"
            f"  {row.verdict}"
        )
    if not report.is_priced:
        lines.append(NO_FACTS)
    return "\n".join(lines)


def measure() -> Report:
    """All rates, one after another."""
    import torch

    rows = [row_of(bench_at(rate), rate) for rate in RATES_BYTES_PER_S]
    return Report(
        measured_at=datetime.now(UTC).strftime("%Y-%m-%d"),
        machine=f"{os.cpu_count()} cores {platform.machine()}",
        torch=torch.__version__,
        rows=tuple(rows),
    )


def _rank(path: str) -> None:
    """One rank of `bench_at`."""
    from engines.runtime.world import join_world, leave_world
    from profiles.machine.bench import bench
    from profiles.machine.probe import probe

    world = join_world(timeout_s=TIME_LIMIT_S)
    cluster = bench(probe(), budget_s=BENCH_S)
    if world.rank == 0:
        cluster.save(path)
    leave_world()


def main() -> int:
    """The command."""
    return command(
        REPORT, about=__doc__, rank=_rank, measure=measure, repriced=repriced, table=table
    )


if __name__ == "__main__":
    sys.exit(main())
