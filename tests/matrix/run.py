"""Runs cells on a kept pool of ranks: each is trained, refused, or recorded as what it was."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator

import torch

from engines.legality import problems
from engines.plan import Plan
from engines.tensor.proposal import propose_styles
from profiles.capture.capture import capture
from profiles.errors import PlanError
from profiles.model.profile import ModelProfile
from tests.engines.cases import cpu_ranks
from tests.matrix.architectures import ARCHITECTURES, architecture_of
from tests.matrix.cell import TOLERANCE, Difference, Find, difference
from tests.matrix.plans import plan_for
from tests.matrix.results import Cell, Outcome
from tests.workers import Pool, RankFailure

RANKS = 8
"""As many as the largest plan has."""
LIMIT_S = 60.0
"""Of one cell; few take more than one second."""
START_S = 300.0
"""Of ranks that are new: importing torch and transformers takes 20 s, more on a busy machine."""


def cells_of(name: str, plans: Iterable[str], pool: Pool) -> Iterator[Cell]:
    """The cells of one row. The model is looked at once, in this process."""
    architecture = ARCHITECTURES[name]
    batch, loss_fn = architecture.batch, architecture.loss_fn
    torch.manual_seed(0)
    model = architecture.build()
    profile = capture(model, batch, loss_fn=loss_fn, name=name)

    @functools.lru_cache
    def styles(size: int) -> tuple[tuple[str, str], ...]:
        try:
            return propose_styles(
                model, batch, size=size, profile=profile, has_target=loss_fn is not None
            ).styles
        except PlanError:  # no layer can be split: legality refuses tensor plans without styles
            return ()

    for column in plans:
        plan = plan_for(column, profile, styles)
        yield cell_of(name, column, plan, profile=profile, pool=pool)


def start_ranks(pool: Pool) -> None:
    """Have the ranks ready, so that the limit of a cell is for its own work."""
    pool.run(_ready, world_size=pool.size, timeout_s=START_S)


def _ready() -> None:
    """To be here the ranks have imported all that cells need, but for what starts late."""
    import torch.distributed.pipelining  # noqa: F401


def cell_of(
    name: str,
    column: str,
    plan: Plan,
    *,
    profile: ModelProfile,
    pool: Pool,
    find: Find = architecture_of,
    tolerance: float = TOLERANCE,
    compare: Callable[..., Difference] | None = None,
) -> Cell:
    """Run `plan`, if it is legal, on the ranks of `pool` beside one process."""
    cell = Cell(architecture=name, plan=column, settings=str(plan), outcome=Outcome.REFUSED)
    refusals = problems(plan, profile, cpu_ranks(plan.world_size))
    if refusals:
        return cell.model_copy(update={"rule": refusals[0].rule, "text": refusals[0].what})
    ranks = plan.world_size
    try:
        every = pool.run(
            compare or difference, name, plan, profile, find, world_size=ranks, timeout_s=LIMIT_S
        )
    except RankFailure as failure:
        start_ranks(pool)
        return cell.model_copy(update={"outcome": Outcome.FAILED, "text": cause(str(failure))})
    return cell.model_copy(update=_largest(every, tolerance))


def cause(text: str) -> str:
    """The end of what the first rank says that did not just lose the others."""
    messages = re.split(r"^(?=rank \d+: )", text, flags=re.MULTILINE)
    first = next((t for t in messages if t and "lost contact" not in t), text)
    return first.strip()[-2000:]


def _largest(every: list[Difference], tolerance: float) -> dict[str, object]:
    """The worst of all ranks. A number that is none is no parity."""
    worst = max(every, key=lambda actual: actual.gradient)
    loss = max(actual.loss for actual in every)
    is_equal = all(actual.loss < tolerance and actual.gradient < tolerance for actual in every)
    if not (loss < float("inf") and worst.gradient < float("inf")):
        return {"outcome": Outcome.DIFFERED, "text": f"loss {loss}, gradient {worst.gradient}"}
    return {
        "outcome": Outcome.TRAINED if is_equal else Outcome.DIFFERED,
        "loss_error": float(f"{loss:.1e}"),
        "gradient_error": float(f"{worst.gradient:.1e}"),
        "worst_gradient": worst.worst_gradient,
    }
