"""The plan that a caller gives, in any of its forms, as settings that are fixed."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from engines.plan import PartialPlan, Plan, load_plan, read_settings
from engines.runtime.world import World
from profiles.errors import InputError, a_type

log = logging.getLogger(__name__)

PlanLike = Plan | PartialPlan | Mapping[str, Any] | str | PathLike[str] | None
WORLD_SIZE = "{world_size}"
"""In a path: the number of this job's ranks."""


def partial_plan_of(plan: PlanLike) -> PartialPlan:
    """Settings fixed by a plan, a file or a string.

    A whole plan fixes every setting; a string and a mapping only what they name.
    """
    match plan:
        case None:
            return PartialPlan()
        case PartialPlan():
            return plan
        case Plan():
            return plan.as_partial()
        case Mapping():
            return PartialPlan.build(dict(plan), where="plan")
        case str():
            return read_settings(plan)
        case PathLike():
            return load_plan(plan).as_partial()
    raise InputError(
        f"plan is {a_type(plan)}",
        hints=['give "dp_shard=8", {"dp_shard": 8}, a Plan, or the path of a plan.json'],
    )


def is_by_world_size(plan: PlanLike) -> bool:
    """Return True for the path of several plans, one for each number of ranks."""
    return isinstance(plan, str | PathLike) and WORLD_SIZE in os.fspath(plan)


def plan_for_world_size(plan: PlanLike, world: World) -> PartialPlan:
    """Settings fixed by the file for this many ranks; none where there is no such file.

    Raises:
        FileError: there is one and it holds no plan.
    """
    assert isinstance(plan, str | PathLike)
    path = Path(os.fspath(plan).replace(WORLD_SIZE, str(world.size)))
    if os.path.exists(path):
        return load_plan(path).as_partial()
    if world.rank == 0:
        log.warning("there is no `%s`: the plan of %d ranks is decided anew", path, world.size)
    return PartialPlan()
