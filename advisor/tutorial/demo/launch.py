"""Launch the demo's ranks on this machine with torchrun, and wait with a timeout."""

from __future__ import annotations

from advisor.auto.local_ranks import run_local_ranks, usual_ranks
from advisor.inputs.console import say
from engines.plan import AXES, PartialPlan, Plan
from profiles.errors import InputError, PlanError
from profiles.machine.host import machine_cores, machine_memory_bytes
from profiles.units import GIB, format_gib

GLOBAL_BATCH = 16
TIME_LIMIT_S = 900.0  # longer means a hang
# The fullest rank of 1 to 4 peaks at 0.6 to 0.8 GiB; half of that is the interpreter and torch.
RANK_BYTES = 0.8 * GIB


def run(*, ranks: int | None, plan: str, steps: int | None) -> int:
    """Train on `ranks` local processes; return the job's exit code.

    `ranks`: None for the usual ones.

    Raises:
        InputError: this machine, or the batch, is too small for so many ranks.
        PlanError: the plan needs another number of ranks, or there is no prediction for it.
        RankError: the job did not end within `TIME_LIMIT_S`.
    """
    ranks = ranks or usual_ranks()
    _require_room(ranks)
    needed = Plan.parse(plan).world_size
    if PartialPlan.parse(plan).fixes(*AXES) and needed != ranks:
        raise PlanError(
            f"plan `{plan}` needs {needed} ranks, the demo starts {ranks}",
            hints=[f"`advise demo --ranks {needed} --plan '{plan}'`"],
        )
    cores = machine_cores()
    if ranks > cores:
        say(f"note: {ranks} ranks on {cores} cores take turns: steps are slow, and vary")
    words = ["--plan", plan] if plan else []
    words += ["--steps", str(steps)] if steps is not None else []
    return run_local_ranks(
        ["advisor.tutorial.demo.train"],
        words,
        ranks=ranks,
        limit_s=TIME_LIMIT_S,
        name="the demo",
    )


def _require_room(ranks: int) -> None:
    possible = [count for count in range(1, GLOBAL_BATCH + 1) if GLOBAL_BATCH % count == 0]
    memory = machine_memory_bytes()
    fitting = [count for count in possible if count * RANK_BYTES <= memory] or possible[:1]
    hint = f"take {', '.join(map(str, fitting))}"
    if ranks not in possible:
        raise InputError(
            f"the demo's batch of {GLOBAL_BATCH} samples does not divide over {ranks} ranks",
            where="--ranks",
            hints=[hint],
        )
    if ranks not in fitting:
        raise InputError(
            f"{ranks} ranks need {format_gib(ranks * RANK_BYTES)}, about"
            f" {format_gib(RANK_BYTES)} each; this machine has {format_gib(memory)}",
            where="--ranks",
            hints=[hint],
        )
