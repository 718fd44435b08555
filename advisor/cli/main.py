"""The `advise` command: thin functions from options to answers.

Heavy packages (torch, networkx, jinja2, rich) are imported inside the commands, so that `advise
--help` is fast.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from advisor.cli.check import check
from advisor.cli.command import (
    Advise,
    Command,
    common_options,
    count,
    fraction,
    one_of,
    seconds,
    shared_option,
)
from advisor.cli.machines import look, only_first_rank, timed_here
from advisor.cli.options import facts_of
from advisor.cli.run import run
from advisor.cli.sweep import sweep
from advisor.cli.verify import verify
from advisor.inputs.console import progress, show_on_screen, writable, write
from profiles.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from advisor.decide.decision import Decision
    from advisor.inputs.models import LoadedModel

OF_A_JOB = ("check", "plan", "probe", "run", "sweep", "verify")  # ranks may all have to take part
sequence_option = shared_option(
    "--seq", "Tokens per sample, where MODEL brings no sample of its own."
)
json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
pins_option = click.option(
    "--plan",
    "partial",
    metavar="SETTINGS",
    default="",
    help='Settings that are fixed, as in "dp_shard=4 recompute=full"; the rest is decided. Or a'
    " plan.json.",
)


def format_option(text: str) -> Callable[[Command], Command]:
    """`--format text|mermaid`, explained by `text`."""
    return click.option(
        "--format",
        "form",
        metavar="[text|mermaid]",
        callback=one_of("text", "mermaid"),
        default="text",
        show_default=True,
        help=text,
    )


@click.group("advise", cls=Advise, context_settings={"max_content_width": 100})
@click.version_option(package_name="parallel-advisor", prog_name="advise")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Plan how to spread a PyTorch model over devices, if it fits, how fast it will be, and why.

    \b
      advise gpt-7b --cluster 4x8xH100-SXM-80GB --global-batch 256 --precision bf16
      advise train:build_model --cluster auto -o plan.json

    `advise MODEL` is short for `advise plan MODEL`; its options: `advise plan --help`.
    """
    if ctx.invoked_subcommand not in OF_A_JOB:
        only_first_rank()


@cli.command()
@click.argument("model")
@shared_option(
    "--cluster",
    "Machines: 4x8xH100-SXM-80GB, a system's name, a .toml file; auto is this machine.",
)
@shared_option(
    "--global-batch",
    "Samples per optimizer step over all devices. Default: the sample's batch on each device.",
)
@sequence_option
@shared_option(
    "--optimizer", "Whose states take memory: sgd, adamw, adafactor, muon, adamw-8bit, ..."
)
@shared_option(
    "--precision",
    "Of forward and backward. Default: bf16 on devices with units for it, else as built.",
)
@click.option(
    "--samples",
    callback=count,
    metavar="COUNT",
    help="Samples in the training set, for steps per epoch.",
)
@click.option(
    "--critical-batch",
    callback=count,
    metavar="SAMPLES",
    help="As `parallel.noise_scale` measured it; a larger global batch is warned of.",
)
@click.option(
    "--host-overhead",
    callback=seconds,
    metavar="SECONDS",
    help="Of a step in which devices wait for data or the host. Default: none is assumed.",
)
@pins_option
@click.option(
    "--objective",
    metavar="[tree|time|memory]",
    callback=one_of("tree", "time", "memory"),
    default="tree",
    show_default=True,
    help="Follow the decision tree; or take the fastest, or the smallest plan.",
)
@click.option(
    "--allow-lossy",
    is_flag=True,
    help="Allow rounded or compressed gradients if that is predicted faster.",
)
@click.option(
    "--imbalance",
    callback=fraction,
    metavar="FRACTION",
    help="How much ranks' computing times scatter: deviation over mean. Default: as runs here did.",
)
@click.option(
    "--allow-stale",
    is_flag=True,
    help="Allow asynchronous or periodic updates (servers, local SGD) if predicted faster.",
)
@click.option("--anchor", metavar="FILE", help="A measured step, from `advise check --anchor`.")
@click.option("--no-anchor", is_flag=True, help="Leave out a step that was measured here before.")
@click.option(
    "--stack",
    metavar="NAME",
    help="Software that will run it (`advise explain stacks`). Default: our engines.",
)
@click.option("-o", "--output", metavar="FILE", help="Write the decision here, as JSON.")
@click.option("--no-bench", is_flag=True, help="Under torchrun, time nothing: take usual speeds.")
@json_option
@common_options
def plan(
    model: str,
    cluster: str,
    global_batch: int | None,
    seq: int | None,
    optimizer: str,
    precision: str | None,
    samples: int | None,
    critical_batch: int | None,
    host_overhead: float | None,
    partial: str,
    objective: str,
    allow_lossy: bool,
    imbalance: float | None,
    allow_stale: bool,
    anchor: str | None,
    no_anchor: bool,
    stack: str | None,
    output: str | None,
    no_bench: bool,
    as_json: bool,
    no_color: bool,
) -> None:
    """Decide how to spread MODEL over the cluster, and say why.

    MODEL is a bundled name (gpt-10m, gpt-125m, gpt-1.3b, gpt-7b, gpt-13b, gpt-70b, or a network on
    images as resnet50-224px), pkg.module:factory or file.py:factory, a Hugging Face config.json, or
    a profile written by `advise profile`. Nothing is downloaded. Under torchrun `--cluster auto` is
    the job: its devices and links are timed for 20 seconds, once (see `advise probe --bench`), and
    rank 0 answers.
    """
    from engines.plan import read_settings

    if anchor is not None and no_anchor:
        raise InputError(
            f"`--anchor {anchor}` and `--no-anchor` contradict each other",
            where="advise plan",
            hints=["leave one of them out"],
        )
    settings = read_settings(partial)
    writable(output)
    loaded: list[LoadedModel] = []
    facts = facts_of(
        model,
        cluster=cluster,
        bench=not no_bench,
        global_batch=global_batch,
        sequence_length=seq,
        optimizer=optimizer,
        precision=precision or settings.precision,
        samples=samples,
        critical_batch=critical_batch,
        host_overhead_s=host_overhead or 0.0,
        imbalance=imbalance,
        on_load=loaded.append,
        anchor=anchor,
        uses_anchor=not no_anchor,
        stack=stack,
    )
    from advisor.auto.proved_splits import check_of, choose_checked
    from advisor.decide.choose import choose
    from advisor.inputs.policy import Objective, Policy
    from advisor.whatif.suggestions import with_suggestions

    progress(f"weighing plans on {facts.cluster.name} ...")
    policy = Policy(
        objective=Objective(objective), allow_lossy=allow_lossy, allow_stale=allow_stale
    )
    if loaded:
        check = check_of(loaded[0], facts.model)
        decision = choose_checked(facts, policy=policy, partial=settings, check=check)
    else:
        decision = choose(facts, policy=policy, partial=settings)
    decision = with_suggestions(decision)
    if as_json:
        click.echo(decision.to_json(), nl=False)
    else:
        show_on_screen(decision, no_color=no_color)
    if output is not None:
        write(output, decision.to_json())


@cli.command()
@click.argument("file")
@click.option(
    "--format",
    "form",
    metavar="[text|html|json]",
    callback=one_of("text", "html", "json"),
    default="text",
    show_default=True,
    help="html is one page that needs no network.",
)
@click.option("-o", "--output", metavar="FILE", help="Write the report here, not to stdout.")
@common_options
def show(file: str, form: str, output: str | None, no_color: bool) -> None:
    """The report of a decision that `advise plan -o FILE` wrote."""
    writable(output)
    decision = _saved_decision(file)
    if form == "text" and output is None:
        show_on_screen(decision, no_color=no_color)
        return
    if form == "html":
        from advisor.report.html import page

        text = page(decision)
    else:
        text = decision.to_json() if form == "json" else f"{decision}\n"
    if output is None:
        click.echo(text, nl=False)
    else:
        write(output, text)


def _saved_decision(path: str) -> Decision:
    from advisor.decide.decision import Decision

    try:
        return Decision.load(path)
    except InputError as error:
        error.hints = (*error.hints, "`advise plan MODEL -o plan.json` writes a decision")
        raise


@cli.command()
@click.argument("words", nargs=-1, metavar="[TERM] [FILE]")
@click.option("--why-not", metavar="SETTINGS", help='Why another plan lost, as in "zero=3".')
@common_options
def explain(words: tuple[str, ...], why_not: str | None, no_color: bool) -> None:
    """Explain a plan's choice, or define a term with the plan's number.

    \b
      advise explain plan.json            the questions, answers and numbers that decided
      advise explain bubble [plan.json]   two sentences, and the plan's bubble
      advise explain levers plan.json     what other kernels, fp8 or LoRA would do to the plan
      advise explain                      all terms
      advise explain stacks               software that `--stack` names, and what it changes
    """
    is_file = bool(words) and (words[-1].endswith(".json") or os.path.isfile(words[-1]))
    term = " ".join(words[:-1] if is_file else words)
    if why_not is not None and (term or not is_file):
        raise InputError(
            "`--why-not` asks of a saved decision",
            where="advise explain",
            hints=['write `advise explain plan.json --why-not "zero=3"`'],
        )
    decision = _saved_decision(words[-1]) if is_file else None
    if decision is not None and term == "levers":
        from advisor.decide.levers import Levers

        show_on_screen(Levers(decision), no_color=no_color)
        return
    if decision is not None and not term:
        asked = decision.why_not(why_not) if why_not else decision.trace
        show_on_screen(asked, no_color=no_color)
        return
    if term.split()[:1] in (["stacks"], ["stack"]):
        from advisor.inputs.stacks import Presets

        show_on_screen(Presets(term.partition(" ")[2] or None), no_color=no_color)
        return
    from advisor.report import glossary

    shown = glossary.explain(term, decision) if term else glossary.Listing()
    show_on_screen(shown, no_color=no_color)


@cli.command()
@click.option("-o", "--output", metavar="FILE", help="Write it here, as TOML for `--cluster`.")
@click.option("--bench", is_flag=True, help="Time the device and, under torchrun, all links.")
@click.option(
    "--nccl-tests",
    "logs",
    multiple=True,
    metavar="LOG",
    help="The machines of this nccl-tests output, not this one; may be repeated.",
)
@click.option("--disk", metavar="FOLDER", help="Time its disk too, where plans may offload to.")
@common_options
def probe(
    output: str | None, bench: bool, logs: tuple[str, ...], disk: str | None, no_color: bool
) -> None:
    """Look at this machine, or at the job that `advise` was started in.

    \b
      torchrun --nproc-per-node 8 -m advisor probe --bench -o cluster.toml
      advise probe --nccl-tests all_reduce.log --nccl-tests all_gather.log -o cluster.toml

    With `--bench` under torchrun every mesh axis is timed, in 20 seconds; start it on all nodes.
    Logs are those of all_reduce_perf, all_gather_perf, reduce_scatter_perf, alltoall_perf and
    sendrecv_perf; they tell the nodes and devices too.
    """
    from profiles.machine.clusters import to_toml

    writable(output)
    if logs:
        if bench:
            raise InputError("`--bench` times this job, `--nccl-tests` reads of others: take one")
        only_first_rank()
        from profiles.machine.nccl_tests import cluster_of_logs

        machines = cluster_of_logs(logs)
    else:
        machines = timed_here() if bench else look()
    if disk is not None:
        from profiles.machine.bench.disk import with_disk

        machines = with_disk(machines, disk)
    if output is None:
        click.echo(to_toml(machines), nl=False)
    else:
        write(output, to_toml(machines))


@cli.command()
@click.argument("model")
@sequence_option
@click.option("--time", "timed", is_flag=True, help="Run its blocks here, and take their times.")
@click.option("-o", "--output", metavar="FILE", help="Write the profile here, as JSON.")
@format_option("mermaid draws which unit feeds which, with the bytes of one sample.")
@json_option
@common_options
def profile(
    model: str,
    seq: int | None,
    timed: bool,
    output: str | None,
    form: str,
    as_json: bool,
    no_color: bool,
) -> None:
    """Profile MODEL: parameters, FLOP and activations, unit by unit."""
    from advisor.inputs.models import profile_model
    from profiles.model.profile import Numerics

    if as_json and form == "mermaid":
        raise InputError("`--json` and `--format mermaid` both want stdout: take one")
    writable(output)
    result = profile_model(
        model, samples=1, sequence_length=seq, numerics=tuple(Numerics), timed=timed
    )
    if as_json:
        click.echo(result.to_json(), nl=False)
    elif form == "mermaid":
        click.echo(result.flow.mermaid())
    else:
        from advisor.cli.model_table import model_table

        show_on_screen(model_table(result), no_color=no_color)
    if output is not None:
        write(output, result.to_json())


@cli.command()
@format_option("mermaid is drawn by GitHub and by notebooks.")
@common_options
def tree(form: str, no_color: bool) -> None:
    """The decision tree: every question, before any model is looked at."""
    from advisor.decide import tree as decision_tree

    click.echo(decision_tree.mermaid() if form == "mermaid" else decision_tree.text())


@cli.command()
@click.option(
    "--ranks",
    callback=count,
    metavar="N",
    help="Processes to start. Default: 2, but no more than there are GPUs.",
)
@pins_option
@click.option("--steps", callback=count, metavar="N", help="Optimizer steps to train.")
@common_options
def demo(ranks: int | None, partial: str, steps: int | None, no_color: bool) -> None:
    """Decide for this machine, train a small GPT as decided, compare with what was predicted."""
    from advisor.tutorial.demo.launch import run as launched

    sys.exit(launched(ranks=ranks, plan=partial, steps=steps))


cli.add_command(check)
cli.add_command(run)
cli.add_command(sweep)
cli.add_command(verify)


def main() -> None:
    """The console script."""
    cli()
