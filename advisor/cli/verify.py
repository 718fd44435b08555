"""`advise verify`: a model of one's own under a plan, compared with one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from advisor.cli.command import common_options, count, report_error, shared_option
from advisor.inputs.console import progress, show_on_screen

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from advisor.auto.verify import Verified

LIMIT_S = 600
RANK_BYTES = 0.5 * 2**30
"""Of an interpreter with torch."""


@click.command()
@click.argument("model")
@click.option("--plan", "settings", metavar="SETTINGS", default="", help="Settings that are fixed.")
@click.option(
    "--ranks",
    callback=count,
    metavar="N",
    help="Processes to start. Default: the plan's, else as in `advise demo`.",
)
@shared_option("--seq", "Tokens per sample.")
@shared_option(
    "--precision", "Of forward and backward. Default: the dtype that the model is built in."
)
@click.option("--steps", callback=count, metavar="N", help="Optimizer steps. Default: 3.")
@click.option(
    "--exit-code",
    type=click.Path(path_type=Path),
    hidden=True,
    help="Write the exit code here; given to ranks that the command starts.",
)
@common_options
def verify(
    model: str,
    settings: str,
    ranks: int | None,
    seq: int | None,
    precision: str | None,
    steps: int | None,
    exit_code: Path | None,
    no_color: bool,
) -> None:
    """Train MODEL some steps under a plan and in one process, and compare the two.

    \b
      advise verify train:build --plan "tp=2"
      advise verify train:build --ranks 4            the plan that is decided for 4 ranks
      torchrun --nproc-per-node 8 -m advisor verify train:build --plan "dp_shard=8"

    Same weights, same batch: the sample that MODEL brings, shared out over the replicas. Compared
    are losses, gradients of the first step, and parameters after some steps of SGD. Ranks are
    started on this machine. Exits with 1 if a difference is more than rounding explains.
    """
    from profiles.machine.launcher import launcher

    _require_synchronous(settings)
    if exit_code is None and launcher().world_size == 1:
        sys.exit(_started(model, settings, ranks, seq, precision, steps, no_color=no_color))
    from advisor.auto.verify import STEPS, VerifyRequest

    asked = VerifyRequest(model, settings, seq, precision, steps or STEPS)
    if exit_code is None:
        sys.exit(_run(asked, no_color=no_color))
    from advisor.auto.local_ranks import ended_with

    with ended_with(exit_code.parent):
        try:
            code = _run(asked, no_color=no_color)
        except Exception as error:  # said once, and not by torchrun
            code = _said_once(error, exit_code, colour=not no_color)
        if launcher().rank == 0 and not exit_code.exists():
            exit_code.write_text(str(code))


def _started(
    model: str,
    settings: str,
    ranks: int | None,
    seq: int | None,
    precision: str | None,
    steps: int | None,
    *,
    no_color: bool,
) -> int:
    """The exit code of ranks that are started here."""
    from advisor.auto.local_ranks import has_too_few_gpus, run_local_ranks, usual_ranks
    from advisor.inputs.models import require_model
    from engines.plan import AXES, Plan, read_settings
    from profiles.errors import InputError, PlanError
    from profiles.machine.host import machine_memory_bytes
    from profiles.units import format_gib

    require_model(model)
    partial = read_settings(settings)
    needed = Plan.build(partial.fixed, where="plan").world_size
    has_degrees = partial.fixes(*AXES)
    if ranks is not None and has_degrees and ranks % needed:
        raise PlanError(
            f"plan `{settings}` needs {needed} ranks, or a multiple; {ranks} are to be started",
            hints=["leave `--ranks` out"],
        )
    ranks = ranks or (needed if has_degrees else usual_ranks())
    memory = machine_memory_bytes()
    if ranks * RANK_BYTES > memory:
        raise InputError(
            f"{ranks} ranks need {format_gib(ranks * RANK_BYTES)}, about {format_gib(RANK_BYTES)}"
            f" each before any model; this machine has {format_gib(memory)}",
            where="advise verify",
            hints=["verify the plan with smaller degrees: more ranks are shared out alike"],
        )
    options = {"--plan": settings, "--seq": seq, "--precision": precision, "--steps": steps}
    words = [str(word) for pair in options.items() if pair[1] for word in pair]
    words += ["--no-color"] if no_color else []
    where = ", on the CPU: there are fewer GPUs" * has_too_few_gpus(ranks)
    progress(f"starting {ranks} ranks{where} ...")
    # The hidden option precedes the words: `python -m advisor verify --exit-code FILE MODEL ...`.
    return run_local_ranks(
        ("advisor", "verify"),
        [model, *words],
        ranks=ranks,
        limit_s=LIMIT_S,
        name="the verification",
    )


def _require_synchronous(settings: str) -> None:
    from engines.plan import Compression, Plan, read_settings
    from profiles.errors import PlanError

    plan = Plan.build(read_settings(settings).fixed, where="plan")
    if plan.updates_in_step and plan.compression is Compression.NONE:
        return
    raise PlanError(
        "this plan is not meant to equal one process: it changes the training",
        where=f"plan: {settings}",
        hints=["verify the rest of it: without `updates=`, `servers=` and `compression=`"],
    )


def _run(asked: object, *, no_color: bool) -> int:
    from advisor.auto.verify import VerifyRequest
    from advisor.auto.verify import verify as verified
    from engines.runtime.world import leave_world

    assert isinstance(asked, VerifyRequest)
    try:
        result = verified(asked)
    finally:
        leave_world()
    if result is None:
        return 0
    show_on_screen(_report(asked.model, result), no_color=no_color)
    return 0 if result.is_equal else 1


def _said_once(error: Exception, exit_code: Path, *, colour: bool) -> int:
    """Print the error on the first rank that has one, and leave its exit code for the launcher."""
    try:
        with exit_code.open("x") as file:
            code = report_error(error, colour=colour, is_said=True)
            file.write(str(code))
    except FileExistsError:
        code = 0
    return code


def _report(model: str, result: Verified) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    ranks = result.plan.world_size
    head = f"{model}, {ranks} rank{'s' * (ranks > 1)} beside one process: {result.plan}"
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("largest difference", "tolerance"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("in")
    rows = {
        "loss": result.loss,
        "gradients": result.gradients,
        f"parameters after {result.steps} steps": result.parameters,
    }
    for name, difference in rows.items():
        outside = "" if difference.is_within(result.tolerance) else "  outside"
        table.add_row(
            name,
            f"{difference.value:.1e}",
            f"{result.tolerance.value:.0e}",
            Text(f"{difference.name}{outside}"),
        )
    return Group(Text(head), Text(), table, Text(), *map(Text, _notes(result)))


def _notes(result: Verified) -> Iterator[str]:
    yield f"{result.rows} samples a step, SGD. Relative to the largest element of each tensor."
    yield f"Tolerance: {result.tolerance.because}."
    for note in result.notes:
        yield f"Note: {note}."
    if result.is_equal:
        yield "The plan trains like one process."
    else:
        yield "The plan does NOT train like one process."
