"""Runs one class under the plans: on ranks of a kept pool, each call of which has a time limit."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.parallel.parity import relative_errors
from engines.plan import Plan
from engines.tensor.proposal import propose_styles
from profiles.capture.batch.call import call_model, loss_of
from profiles.capture.capture import capture
from profiles.errors import AdvisorError, PlanError
from profiles.model.profile import ModelProfile
from tests.fuzz_modules.parity import LARGEST, NUDGES, nudge
from tests.matrix.cell import Difference, difference
from tests.matrix.plans import completed
from tests.matrix.results import Cell, Outcome
from tests.matrix.run import cause, cell_of, start_ranks
from tests.workers import Pool, RankFailure
from tests.zoo_classes.subjects import Choice, NotTrained, first_that_trains

PLANS: dict[str, str] = {
    "ddp": "dp_replicate=2",
    "zero3": "dp_shard=2",
    "tp2": "tp=2",
    "pp2": "pp=2 schedule=1f1b microbatches=2",
}
RANKS = 2
TOLERANCE = 1e-4
CHOICE_S = 90.0
"""Of finding a config that one process trains."""
LOOK_S = 150.0
"""Of looking at the model and of proposing its split."""
NO_SPLIT = "no-split"
CRASHED = "Traceback: "
NAMED = re.compile(r"^profiles\.errors\.(PlanError|ModelError|BatchError): (.*)", re.MULTILINE)
"""A refusal that comes after the legality, when the plan is applied."""


@dataclass(frozen=True)
class Looked:
    """A class as the main process knows it: of `profile` and `refusal` one is there.

    Attributes:
        styles: of tp=2; none, and `no_split` says why.
    """

    profile: ModelProfile | None = None
    refusal: str = ""
    styles: tuple[tuple[str, str], ...] = ()
    no_split: str = ""


def chosen(name: str) -> Choice | str:
    """The config and batch that one process trains, or why there are none; runs on a rank."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return first_that_trains(name)
    except NotTrained as error:
        return str(error)


def look(name: str, choice: Choice, wants_styles: bool) -> Looked:
    """Profile a class, and propose its split; runs on a rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = choice(name)
        torch.manual_seed(0)
        model = row.build()
        try:
            profile = capture(model, row.batch, loss_fn=row.loss_fn, name=name)
        except AdvisorError as error:
            return Looked(refusal=f"{type(error).__name__}: {error}")
        if not wants_styles:
            return Looked(profile)
        try:
            proposal = propose_styles(
                model, row.batch, size=2, profile=profile, has_target=row.loss_fn is not None
            )
        except PlanError as error:
            return Looked(profile, no_split=str(error))
        except Exception:
            return Looked(profile, no_split=f"{CRASHED}{traceback.format_exc()}")
        return Looked(profile, styles=proposal.styles)


def cells_of(name: str, plans: Iterable[str], pool: Pool) -> Iterator[Cell] | str:
    """The cells of a class, or why it does not count."""
    plans = list(plans)
    try:
        (choice,) = pool.run(chosen, name, world_size=1, timeout_s=CHOICE_S)
    except RankFailure as failure:
        start_ranks(pool)
        choice = cause(str(failure))
    if isinstance(choice, str):
        return choice
    try:
        (looked,) = pool.run(look, name, choice, "tp2" in plans, world_size=1, timeout_s=LOOK_S)
    except RankFailure as failure:
        start_ranks(pool)
        return _all(name, plans, Outcome.FAILED, "look", cause(str(failure)))
    if looked.profile is None:
        return _all(name, plans, Outcome.REFUSED, "look", looked.refusal)
    try:
        return iter(list(_cells(name, plans, choice, looked, looked.profile, pool)))
    except _Unsteady as error:
        return str(error)


class _Unsteady(Exception):
    """A class whose gradients in one process are rounding, or chance, alone."""


def _all(name: str, plans: list[str], outcome: Outcome, rule: str, text: str) -> Iterator[Cell]:
    for column in plans:
        yield Cell(architecture=name, plan=column, settings=PLANS[column], outcome=outcome,
                   rule=rule, text=text)  # fmt: skip


def _cells(
    name: str, plans: list[str], choice: Choice, looked: Looked, profile: ModelProfile, pool: Pool
) -> Iterator[Cell]:
    for column in plans:
        plan = completed(Plan.parse(PLANS[column]), profile, lambda _: looked.styles)
        if plan.tp > 1 and looked.no_split:
            crashed = looked.no_split.startswith(CRASHED)
            outcome = Outcome.FAILED if crashed else Outcome.REFUSED
            yield from _all(name, [column], outcome, NO_SPLIT, looked.no_split)
            continue
        cell = cell_of(name, column, plan, profile=profile, pool=pool, find=choice,
                       tolerance=TOLERANCE, compare=quiet_difference)  # fmt: skip
        error = NAMED.search(cell.text) if cell.outcome is Outcome.FAILED else None
        if error:
            refused = {"outcome": Outcome.REFUSED, "rule": error[1], "text": error[2]}
            cell = cell.model_copy(update=refused)
        if cell.outcome is Outcome.DIFFERED and (cell.loss_error or 0) < TOLERANCE:
            (rounded,) = pool.run(rounding, name, choice, cell.worst_gradient, world_size=1)
            if rounded > LARGEST:
                raise _Unsteady(
                    f"a last bit, or other random numbers, change the gradient of"
                    f" {cell.worst_gradient} by {rounded:.1e}"
                )
            if (cell.gradient_error or 0) <= 2 * rounded:  # both sides are rounded
                why = f"a last bit, or other random numbers, change it by {rounded:.1e}"
                cell = cell.model_copy(update={"outcome": Outcome.TRAINED, "text": why})
        yield cell


def rounding(name: str, find: Choice, parameter: str) -> float:
    """The largest relative error of a gradient in one process whose parameters were moved by a last
    bit, and whose forward draws other numbers. Behind norms of nearly equal numbers it can be as
    large as the gradient."""
    row = find(name)

    def gradients(seed: int | None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = row.build()
        if seed is not None:
            nudge(model, torch.Generator().manual_seed(seed))
            torch.manual_seed(1 + seed)
        output = call_model(model, row.batch, has_target=row.loss_fn is not None)
        loss_of(output, row.batch, row.loss_fn).backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    wanted = gradients(None)
    errors = [relative_errors(gradients(seed), wanted) for seed in range(NUDGES)]
    return max(error.get(parameter, 0.0) for error in errors)


def quiet_difference(name: str, plan: Plan, profile: ModelProfile, find: Choice) -> Difference:
    """As the matrix compares; models of transformers warn of much, which is no failure here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return difference(name, plan, profile, find)
