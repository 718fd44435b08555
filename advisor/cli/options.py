"""Facts from a command's options: model, cluster and workload."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from advisor.cli.machines import resolve
from advisor.inputs.console import progress, say

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from advisor.inputs.facts import Facts
    from advisor.inputs.models import LoadedModel
    from profiles.model.profile import ModelProfile, Numerics


def facts_of(
    model: str,
    *,
    cluster: str,
    bench: bool,
    global_batch: int | None,
    sequence_length: int | None,
    optimizer: str,
    precision: str | None,
    samples: int | None,
    critical_batch: int | None,
    host_overhead_s: float = 0.0,
    imbalance: float | None = None,
    on_load: Callable[[LoadedModel], None] | None = None,
    anchor: str | None = None,
    uses_anchor: bool = True,
    stack: str | None = None,
) -> Facts:
    """Build facts from the options; cheap checks come first.

    Args:
        on_load: called with the module, where one is built.
        anchor: a file of `advise check --anchor`; None is the one that was kept on this machine,
            where `uses_anchor` and the cluster is this machine.
    """
    from advisor.learning.anchor import Anchor

    progress(f"looking at {model} ...")
    from advisor.inputs.facts import Facts
    from advisor.inputs.manual_placement import with_parts
    from advisor.inputs.models import require_model
    from advisor.inputs.precision import AUTO, MIXED, NARROW, default_precision, reduced_precision
    from advisor.inputs.stacks import stack_of
    from advisor.learning.run_log import pace_of, with_anchor, with_runs
    from advisor.learning.shortages import below, failed_here
    from engines.plan import Precision
    from profiles.workload.optimizers import optimizer_profile
    from profiles.workload.workload import Workload

    optimizer_facts, software = optimizer_profile(optimizer), stack_of(stack)
    known = Anchor.load(anchor) if anchor is not None else None
    if cluster == "auto":
        require_model(model)  # before a job is measured for it
    machines = resolve(cluster, bench=bench)
    is_open = precision in (None, AUTO)
    may_reduce = is_open and reduced_precision(machines.device) is not None
    reduced = MIXED if precision in NARROW or may_reduce else ()
    profile = _profile(
        model,
        sequence_length,
        reduced,
        may_leave_out=may_reduce,
        on_processor=machines.device.kind == "cpu",
        on_load=on_load,
    )
    _note_other_kind(profile, machines.device.kind)
    machines = with_parts(machines, profile)
    if global_batch is None:
        global_batch = profile.samples * machines.world_size
        say(f"note: no `--global-batch`: {profile.samples} per device, {global_batch} in all")
    if precision is None or precision == AUTO:
        taken = default_precision(profile, machines.device, asked=precision)
        precision = (taken or Precision.FP32).value
    if cluster == "auto":
        machines = with_runs(machines, dtype=Precision(precision).product_dtype)
    workload = Workload(
        global_batch_size=global_batch,
        tokens_per_sample=profile.tokens_per_sample,
        optimizer=optimizer_facts,
        precision=precision,
        dataset_samples=samples,
        critical_batch_size=critical_batch,
        host_overhead_s=host_overhead_s,
        given=_given(),
        **pace_of(imbalance, machines, profile, learns=cluster == "auto"),
    )
    facts = Facts(model=profile, cluster=machines, workload=workload, stack=software)
    if known is not None or (uses_anchor and cluster == "auto"):
        facts = with_anchor(facts, known)
    return below(facts, failed_here(facts)) if cluster == "auto" else facts


def _profile(
    model: str,
    sequence_length: int | None,
    numerics: Sequence[Numerics],
    *,
    may_leave_out: bool,
    on_processor: bool,
    on_load: Callable[[LoadedModel], None] | None,
) -> ModelProfile:
    """Profile with these numerics; as built only if the model does not support others and none were
    requested."""
    from advisor.inputs.models import profile_model
    from profiles.errors import ModelError

    try:
        return profile_model(
            model,
            samples=1,
            sequence_length=sequence_length,
            numerics=numerics,
            on_processor=on_processor,
            on_load=on_load,
        )
    except ModelError as error:
        if not may_leave_out:
            raise
        profile = profile_model(
            model,
            samples=1,
            sequence_length=sequence_length,
            on_processor=on_processor,
            on_load=on_load,
        )
        say(f"note: planned in {profile.dtype}, as the model does not run in 16 bits: {error.what}")
        return profile


def _note_other_kind(profile: ModelProfile, kind: str) -> None:
    """Say that a saved profile counts operators otherwise than these machines run them."""
    if profile.on_processor is None or profile.on_processor == (kind == "cpu"):
        return
    counted, here = ("processors", "accelerators")[:: 1 if profile.on_processor else -1]
    say(
        f"note: the saved profile counts operators as {counted} run them; on {here} memory differs"
        " where attention has dropout or autocast is on: name the model itself"
    )


def _given() -> tuple[str, ...]:
    """Workload fields given on the command line."""
    options = {
        "global_batch_size": "global_batch",
        "tokens_per_sample": "seq",
        "optimizer": "optimizer",
        "precision": "precision",
        "host_overhead_s": "host_overhead",
        "dataset_samples": "samples",
        "critical_batch_size": "critical_batch",
        "imbalance": "imbalance",
    }
    source_of = click.get_current_context().get_parameter_source
    typed = click.core.ParameterSource.COMMANDLINE
    return tuple(field for field, option in options.items() if source_of(option) is typed)
