"""Programs on a kept pool of two ranks, under every plan; and smaller ones that fail alike."""

from __future__ import annotations

import functools
import re
import traceback
import warnings
from collections.abc import Iterator, Sequence

from engines.legality import problems
from engines.plan import Plan
from engines.tensor.proposal import propose_styles
from profiles.capture.capture import capture
from profiles.errors import AdvisorError
from profiles.model.profile import ModelProfile
from tests.engines.cases import cpu_ranks
from tests.fuzz_modules.parity import Alone, Measured, measure
from tests.fuzz_modules.program import Program
from tests.fuzz_modules.results import ALLOWED, Case, Outcome
from tests.matrix.plans import borders_for
from tests.workers import Pool, RankFailure

PLANS = ("dp_replicate=2", "dp_shard=2", "tp=2", "pp=2 schedule=1f1b microbatches=2")
LIMIT_S = 40.0
"""Of one program under one plan, which takes a tenth of a second."""
START_S = 300.0


def ready() -> None:
    """To be here the ranks have imported all that programs need."""
    import torch.distributed.pipelining  # noqa: F401


def measure_all(program: Program, plans: Sequence[Plan], profile: ModelProfile) -> list[Measured]:
    """Under one plan after the other: one job costs less than several."""
    return [measure(program, plan, profile) for plan in plans]


def cases_of(program: Program, plans: Sequence[str], pool: Pool) -> Iterator[Case]:
    """The program under each plan.

    Raises:
        AssertionError: it does not train in one process, so that it is no program.
    """
    case = functools.partial(Case, program=str(program), again=program.again)
    require_trains(program)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            profile = capture(program.build(), program.batch(0), loss_fn=program.loss_fn)
    except AdvisorError as error:
        for plan in plans:
            yield case(plan=plan, outcome=Outcome.REFUSED, text=f"capture: {error.what}")
        return
    except Exception:
        for plan in plans:
            yield case(plan=plan, outcome=Outcome.CRASHED, text=_traceback(traceback.format_exc()))
        return
    legal: dict[str, Plan] = {}
    for text in plans:
        try:
            plan = plan_of(text, program, profile)
        except AdvisorError as error:
            yield case(plan=text, outcome=Outcome.REFUSED, text=f"split: {error.what}")
            continue
        except Exception:
            yield case(plan=text, outcome=Outcome.CRASHED, text=_traceback(traceback.format_exc()))
            continue
        broken = problems(plan, profile, cpu_ranks(plan.world_size))
        if broken:
            what = f"{broken[0].rule}: {broken[0].what}"
            yield case(plan=text, outcome=Outcome.REFUSED, text=what)
        else:
            legal[text] = plan
    for text, (outcome, why) in _outcomes(program, legal, profile, pool).items():
        yield case(plan=text, outcome=outcome, text=why)


def require_trains(program: Program) -> None:
    """Require that the generator made a program that one process trains on its batches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = Alone(program, replicas=1, microbatches=2)
        loss, gradients = alone.forward_backward(program.batch(0))
    assert loss == loss, f"no number: {program}"
    assert gradients, f"no gradients: {program}"


def shrunk(program: Program, case: Case, pool: Pool) -> Program:
    """The program without the blocks that `case` does not need to fail under its plan."""
    for number in list(program.numbers):
        smaller = Program(program.seed, program.without | {number}, program.only)
        if not smaller.numbers:
            continue
        try:
            again = list(cases_of(smaller, [case.plan], pool))
        except Exception:  # without the block it is no program
            continue
        if again[0].outcome is case.outcome:
            program = smaller
    return program


def plan_of(text: str, program: Program, profile: ModelProfile) -> Plan:
    plan = Plan.parse(text)
    further: dict[str, object] = {"stages": borders_for(plan, profile)}
    if plan.tp > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            proposal = propose_styles(
                program.build(),
                program.batch(0),
                size=plan.tp,
                profile=profile,
                has_target=program.loss_fn is not None,
            )
        further["tensor_styles"] = proposal.styles
    return plan.model_copy(update=further)


def _outcomes(
    program: Program, plans: dict[str, Plan], profile: ModelProfile, pool: Pool
) -> dict[str, tuple[Outcome, str]]:
    """All plans in one job; one after the other where that fails."""
    if not plans:
        return {}
    ranks = max(plan.world_size for plan in plans.values())
    try:
        limit = LIMIT_S * len(plans)
        every = pool.run(
            measure_all, program, list(plans.values()), profile, world_size=ranks, timeout_s=limit
        )
        return {
            text: _outcome([rank[number] for rank in every]) for number, text in enumerate(plans)
        }
    except RankFailure as failure:
        start(pool)
        if len(plans) == 1:
            return dict.fromkeys(plans, _failure(str(failure)))
    return {
        text: _outcomes(program, {text: plan}, profile, pool)[text] for text, plan in plans.items()
    }


def start(pool: Pool) -> None:
    """Have the ranks ready, so that the limit of a case is for its own work."""
    pool.run(ready, world_size=pool.size, timeout_s=START_S)


def _outcome(ranks: list[Measured]) -> tuple[Outcome, str]:
    for measured in ranks:
        if measured.refused:
            return Outcome.REFUSED, measured.refused
    for measured in ranks:
        if measured.late:
            return Outcome.LATE, measured.late
    wrong = next((measured for measured in ranks if not measured.is_equal), None)
    if wrong is None:
        return Outcome.TRAINED, ""
    errors = f"loss {wrong.loss:.1e}, gradient {wrong.gradient:.1e}"
    return Outcome.DIFFERED, f"{errors}, parameter {wrong.parameter:.1e} ({wrong.worst})"


def _failure(text: str) -> tuple[Outcome, str]:
    messages = [m for m in re.split(r"^(?=rank \d+: )", text, flags=re.MULTILINE) if m.strip()]
    own = [m for m in messages if "did not finish" not in m]
    if not own:
        return Outcome.HUNG, text
    first = next((m for m in own if "lost contact" not in m and "Connection" not in m), own[0])
    return Outcome.CRASHED, _traceback(first)


def _traceback(text: str) -> str:
    """The last frames of a traceback, and the first line of its error at the end."""
    lines = text.strip().splitlines()
    errors = [
        n for n, line in enumerate(lines) if re.match(r"\w[\w.]*(Error|Exception|died)\b", line)
    ]
    if not errors:
        return text.strip()[-2000:]
    frames = [line for line in lines[: errors[-1]] if line.startswith("  File ")]
    return "\n".join([*frames[-9:], lines[errors[-1]]])


def is_right(case: Case) -> bool:
    return case.outcome in ALLOWED
