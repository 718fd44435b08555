"""`advise check`: an estimate compared with a measured step of the same plan."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from advisor.cli.command import common_options, count, shared_option
from advisor.cli.machines import only_first_rank
from advisor.inputs.console import say, show_on_screen, writable, write

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from advisor.auto.check import Checked
    from advisor.learning.anchor import Anchor, Term, TermResidual


@click.command()
@click.argument("model")
@shared_option(
    "--cluster", "Machines that the plan is for, with devices as this one has; auto is this job."
)
@click.option("--plan", "partial", metavar="SETTINGS", default="", help="Settings that are fixed.")
@shared_option("--global-batch", "Samples per step.")
@shared_option("--seq", "Tokens per sample.")
@shared_option("--optimizer", "Is run too.")
@shared_option(
    "--precision", "Of forward and backward. Default: the dtype that the model is built in."
)
@click.option("--steps", callback=count, metavar="N", help="Steps to time. Default: 10.")
@click.option("--anchor", is_flag=True, help="Keep what was measured, for later plans and sizes.")
@click.option("--no-anchor", is_flag=True, help="Predict without what was kept here before.")
@click.option("-o", "--output", metavar="FILE", help="Write the anchor here, as JSON.")
@common_options
def check(
    model: str,
    cluster: str,
    partial: str,
    global_batch: int | None,
    seq: int | None,
    optimizer: str,
    precision: str | None,
    steps: int | None,
    anchor: bool,
    no_anchor: bool,
    output: str | None,
    no_color: bool,
) -> None:
    """Predict a step of MODEL, run it on this machine, and compare the two term by term.

    \b
      torchrun --nproc-per-node 2 -m advisor check gpt-10m --plan "dp_shard=2" --anchor
      advise check gpt-1.3b --cluster 4x8xH100-SXM-80GB --plan "pp=1" -o anchor.json

    Where this job has fewer ranks than the plan, one of them is run without the others: its
    computing and its memory are measured, communication is not. With `--anchor` later plans of such
    models on this machine rest on what was measured (`advise plan`, `auto_parallelize`).
    Exits with 1 if anything was measured outside its predicted range.
    """
    writable(output)
    from advisor.auto.check import STEPS, CheckRequest
    from advisor.auto.check import check as run_checked
    from advisor.learning.anchor import anchored
    from advisor.learning.residuals import anchor_of, terms_of
    from advisor.learning.run_log import anchor_here, keep_anchor
    from engines.runtime.world import leave_world
    from profiles.machine.clusters import resolve_cluster
    from profiles.timing.runs import machine_of

    asked = CheckRequest(
        model=model,
        settings=partial,
        global_batch_size=global_batch,
        sequence_length=seq,
        optimizer=optimizer,
        precision=precision,
        steps=steps or STEPS,
        times_links=anchor or output is not None,
    )
    try:
        checked = run_checked(asked, None if cluster == "auto" else resolve_cluster(cluster))
    finally:
        leave_world()
    only_first_rank()
    known = None if no_anchor else anchor_here(checked.facts)
    facts = anchored(checked.facts, known) if known is not None else checked.facts
    terms = terms_of(checked.plan, facts, checked.measured)
    show_on_screen(_table(model, checked, terms, known), no_color=no_color)
    if anchor or output is not None:
        measured = anchor_of(
            checked.plan, checked.facts, checked.measured, machine_of(checked.facts.cluster)
        )
        if output is not None:
            write(output, measured.to_json())
        if anchor:
            keep_anchor(measured)
            say("kept: later plans of such models on this machine rest on it")
    if any(residual.is_outside for residual in terms.values()):
        sys.exit(1)


def _table(
    model: str, checked: Checked, terms: dict[Term, TermResidual], known: Anchor | None
) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from profiles.units import format_gib, format_seconds

    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("predicted", "range", "measured", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for term, residual in terms.items():
        shown = format_gib if term.is_memory else format_seconds
        low, high = shown(residual.low), shown(residual.high)
        table.add_row(
            Text(str(term)),
            shown(residual.predicted),
            f"{low} to {high}",
            shown(residual.measured),
            f"{residual.ratio:.2f}" if residual.ratio else "",
            "outside" if residual.is_outside else "",
        )
    head = Text(f"{model} on {checked.facts.cluster.name}: {checked.plan}")
    return Group(head, Text(), table, Text(), *map(Text, _notes(checked, terms, known)))


def _notes(
    checked: Checked, terms: dict[Term, TermResidual], known: Anchor | None
) -> Iterator[str]:
    from advisor.auto.check import why_not_alone
    from advisor.auto.preflight import machine_risks

    measured, ranks = checked.measured, checked.plan.world_size
    timing = measured.step or measured.alone
    assert timing is not None
    yield f"Medians of {timing.repeats} steps; memory is that of the first rank."
    if measured.step is None:
        yield f"One of {ranks} ranks was run without the others: nothing is known of links."
    elif measured.alone is None:
        yield f"Computing and waiting are not told apart: {why_not_alone(checked.plan)}."
    if known is not None:
        yield f"Predicted with the step of {known.plan} that was kept on {known.measured_at[:10]}."
    outside = [str(term) for term, residual in terms.items() if residual.is_outside]
    if outside:
        yield f"Outside the predicted range: {', '.join(outside)}."
    else:
        yield "All within the predicted ranges."
    cluster = checked.facts.cluster
    risks = machine_risks(checked.plan, cluster, ranks=cluster.world_size)
    yield from (f"Preflight: {risk}." for risk in risks)
    if not risks:
        yield "Preflight: open files and direct copies between GPUs are no risk to the plan."
