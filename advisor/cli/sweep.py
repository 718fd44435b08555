"""`advise sweep`: from its options to a table, a CSV file and a plot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from advisor.cli.command import common_options, count, seconds, shared_option
from advisor.cli.machines import only_first_rank
from advisor.cli.options import facts_of
from advisor.inputs.console import say, show_on_screen, writable, write
from profiles.errors import InputError
from profiles.record.bounds import MOST_BATCH, whole_number

if TYPE_CHECKING:
    from advisor.whatif.sweep.points import Sweep, Swept
    from engines.plan import PartialPlan

# The option of each quantity; the values are those of `Swept`, which is imported when it is needed.
QUANTITIES = {
    "split_size": "split size",
    "microbatches": "microbatches",
    "bandwidth": "bandwidth",
    "devices": "devices",
    "batch": "global batch",
    "stack": "stack",
}


@click.command()
@click.argument("model")
@shared_option("--cluster", "Machines, as for `advise plan`.")
@shared_option("--global-batch", "Samples per step.")
@shared_option("--seq", "Tokens per sample.")
@shared_option("--optimizer", "Whose update a step ends with.")
@click.option(
    "--plan",
    "plans",
    metavar="SETTINGS",
    multiple=True,
    help="Settings that are fixed; several times, and these are compared.",
)
@click.option("--split-size", metavar="1,3,...", help="Samples of a microbatch.")
@click.option("--microbatches", metavar="1,2,...", help="Pieces of the batch in flight.")
@click.option("--bandwidth", metavar="'10 GB/s,...'", help="Of the links between nodes, or in one.")
@click.option("--devices", metavar="1,2,...", help="Of the cluster's kind; the batch stays.")
@click.option("--batch", metavar="32,64,...", help="Samples per step over all devices.")
@click.option(
    "--stack",
    metavar="NAME,NAME,...",
    help="Software (`advise explain stacks`); several are compared, one is that of every value.",
)
@click.option("--measure", is_flag=True, help="Run each plan on this job's ranks, and time it.")
@click.option("--steps", callback=count, metavar="N", help="Steps to time for each. Default: 10.")
@click.option(
    "--timeout", callback=seconds, metavar="SECONDS", help="To wait for a rank. Default: 120."
)
@click.option("-o", "--output", metavar="FILE", help="Write all numbers here, as CSV.")
@click.option("--png", metavar="FILE", help="Draw it: a curve, or bars for plans. (matplotlib)")
@common_options
def sweep(
    model: str,
    cluster: str,
    global_batch: int | None,
    seq: int | None,
    optimizer: str,
    plans: tuple[str, ...],
    stack: str | None,
    measure: bool,
    steps: int | None,
    timeout: float | None,
    output: str | None,
    png: str | None,
    no_color: bool,
    **quantities: str | None,
) -> None:
    """One quantity at several values: seconds per step, predicted or measured too.

    \b
      advise sweep resnet50-128px --cluster 2xV100-PCIe-32GB --global-batch 120
          --plan "pp=2 schedule=gpipe stages=layer3.0" --split-size 1,3,5,8,10,12,20,40,60
      torchrun --nproc-per-node 2 -m advisor sweep resnet50-64px --global-batch 24 --measure
          --plan "dp_replicate=1" --plan "pp=2 schedule=naive stages=layer3.0"

    What `--plan` leaves open is decided anew at every value. Several plans are bars: each on as
    many devices as its degrees multiply to.
    """
    from advisor.whatif.sweep.points import Swept
    from engines.plan import read_settings

    asked = {name: text for name, text in quantities.items() if text is not None}
    if stack is not None and ("," in stack or not (asked or len(plans) > 1)):
        asked["stack"], stack = stack, None
    option, texts = _one_quantity(asked, plans)
    swept = Swept(QUANTITIES[option]) if option else Swept.PLAN
    settings = read_settings(plans[0] if option and plans else "")
    for name, given in {"--steps": steps, "--timeout": timeout}.items():
        if given is not None and not measure:
            raise InputError(
                f"`{name} {given:g}` is about runs, and nothing is run without `--measure`",
                where=name,
                hints=[f"leave `{name}` out, or add `--measure` and start it under torchrun"],
            )
    for path in (output, png):
        writable(path)
    if png is not None:
        from advisor.whatif.sweep.picture import require_matplotlib

        require_matplotlib()
    if option == "batch" and global_batch is None:
        global_batch = whole_number(texts[0], "--batch", most=MOST_BATCH)  # the first one serves
    if measure and (stack is not None or swept is Swept.STACK):
        raise InputError(
            "`--measure` runs our engines, whose stack is no option",
            where="--stack",
            hints=["leave `--stack` out, or `--measure`", 'compare --plan "compile=true"'],
        )
    asking = SweepRequest(model, swept, texts, settings, global_batch, seq, optimizer, stack)
    try:
        if measure:
            result = _measured(asking, cluster, steps=steps, timeout_s=timeout)
        else:
            only_first_rank()
            result = _predicted(asking, cluster)
    except InputError as error:
        error.where = error.where or f"--{(option or 'plan').replace('_', '-')}"
        raise
    _show(result, output=output, png=png, no_color=no_color)


def _one_quantity(asked: dict[str, str], plans: tuple[str, ...]) -> tuple[str | None, list[str]]:
    """Return the swept option and its values; None and the plans for a sweep over plans."""
    if len(asked) == 1 and len(plans) <= 1:
        option, text = next(iter(asked.items()))
        values = [value.strip() for value in text.split(",")]
        if not all(values):
            raise InputError(f"`{text}` is no list of values", hints=["write `1,3,5`"])
        return option, values
    if not asked and len(plans) > 1:
        return None, list(plans)
    names = [f"--{name.replace('_', '-')}" for name in (asked or QUANTITIES)]
    if asked:
        raise InputError(
            f"one quantity is swept at a time: {' and '.join(names)}"
            f"{' over several plans' if len(plans) > 1 else ''}",
            where="advise sweep",
            hints=["write one command for each"],
        )
    raise InputError(
        "no quantity to sweep over",
        where="advise sweep",
        hints=[f"one of {', '.join(names)}", "or several times `--plan`, to compare plans"],
    )


@dataclass(frozen=True, slots=True)
class SweepRequest:
    """Quantity to sweep, and fixed settings."""

    model: str
    swept: Swept
    values: list[str]
    settings: PartialPlan
    batch: int | None
    seq: int | None
    optimizer: str
    stack: str | None = None


def _predicted(asking: SweepRequest, cluster: str) -> Sweep:
    from advisor.whatif.sweep.points import shown_link
    from advisor.whatif.sweep.points import sweep as predict

    facts = facts_of(
        asking.model,
        cluster=cluster,
        bench=False,
        global_batch=asking.batch,
        sequence_length=asking.seq,
        optimizer=asking.optimizer,
        precision=asking.settings.precision,
        samples=None,
        critical_batch=None,
        stack=asking.stack,
    )
    if asking.swept == QUANTITIES["bandwidth"]:
        say(f"note: {shown_link(facts)}")
    return predict(facts, asking.swept, asking.values, settings=asking.settings)


def _measured(
    asking: SweepRequest, cluster: str, *, steps: int | None, timeout_s: float | None
) -> Sweep:
    if cluster != "auto":
        raise InputError(
            f"`--measure` runs on this job's devices, not on {cluster}",
            where="--cluster",
            hints=["leave `--cluster` out, or `--measure`"],
        )
    from advisor.auto.measure import PATIENCE_S, STEPS, measured_sweep
    from engines.runtime.world import leave_world

    try:
        result = measured_sweep(
            asking.model,
            asking.swept,
            asking.values,
            settings=asking.settings,
            global_batch_size=asking.batch,
            sequence_length=asking.seq,
            optimizer=asking.optimizer,
            steps=steps or STEPS,
            timeout_s=timeout_s or PATIENCE_S,
        )
    finally:
        leave_world()
    only_first_rank()
    return result


def _show(result: Sweep, *, output: str | None, png: str | None, no_color: bool) -> None:
    from advisor.whatif.sweep.table import sweep_csv, sweep_table

    show_on_screen(sweep_table(result), no_color=no_color)
    if output is not None:
        write(output, sweep_csv(result))
    if png is not None:
        from advisor.whatif.sweep.picture import picture
        from profiles.record import write_bytes

        write_bytes(png, picture(result))
        say(f"wrote {png}")
