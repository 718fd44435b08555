"""One decision for all ranks of a job: the same request, and rank 0's answer."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping

from advisor.decide.decision import Decision
from engines.apply import Proofs
from engines.plan import PartialPlan
from engines.runtime.failures import outlive_readers, wait_for_text, why_absent
from engines.runtime.world import World, rank_error_context, require_same
from profiles.errors import AdvisorError, InputError, RankError
from profiles.record import json_object
from profiles.torch_compat import default_store


@rank_error_context("comparing settings")
def require_same_request(
    partial: PartialPlan,
    world: World,
    global_batch_size: int | None,
    precision: str | None,
    objective: str,
    allowed: Mapping[str, bool],
) -> None:
    """Rank 0 decides for all; a rank with different arguments must raise."""
    asked = {
        **partial.fixed,
        "global_batch_size": global_batch_size,
        "precision": precision,
        "objective": objective,
        **allowed,
    }
    words = " ".join(f"{key}={value}" for key, value in sorted(asked.items()) if value is not None)
    require_same("settings", f"{hashlib.sha256(words.encode()).hexdigest()[:8]} {words}", world)


@rank_error_context("deciding")
def from_rank_zero(
    decide: Callable[[], tuple[Decision, Proofs]], world: World
) -> tuple[Decision, Proofs]:
    """Return rank 0's decision and proofs, or raise its error, on all ranks; through the store,
    with a timeout."""
    if world.size == 1:
        return decide()
    store = default_store()
    turn = store.add(f"advisor/decision/calls/{world.rank}", 1)
    key = f"advisor/decision/{turn}"
    if world.rank == 0:
        try:
            decision, proofs = decide()
        except BaseException as error:
            is_known = isinstance(error, AdvisorError)
            store.set(key, f"{'refused' if is_known else 'failed'} {type(error).__name__}: {error}")
            outlive_readers(store, (f"{key}/heard/{rank}" for rank in range(1, world.size)))
            raise
        store.set(key, f"plan {proofs.model_dump_json()}\n{decision.to_json()}")
        return decision, proofs
    said = wait_for_text(store, key, rank=0, timeout_s=world.timeout_s)
    if said is None:
        raise RankError(
            why_absent(0) or f"rank 0 did not decide within {world.timeout_s:.0f} s",
            where=f"rank {world.rank} of {world.size}",
            hints=["look at the output of rank 0"],
        )
    kind, _, text = said.partition(" ")
    if kind != "plan":
        with contextlib.suppress(RuntimeError):  # rank 0 may have ended since
            store.set(f"{key}/heard/{world.rank}", "")
        first, *rest = text.splitlines()
        if kind == "failed":
            raise RankError(
                f"rank 0 failed while deciding: {first}",
                where=f"rank {world.rank} of {world.size}",
                hints=["look at the output of rank 0"],
            )
        raise InputError(f"rank 0 found no plan: {first}", where="\n".join(rest) or None)
    known, _, decided = text.partition("\n")
    return Decision.from_json(decided), Proofs.build(json_object(known), where="rank 0")
