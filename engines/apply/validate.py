"""Refuse what cannot be done, before any work."""

from __future__ import annotations

from engines.apply.build import Build
from engines.apply.plain import require_plain
from engines.apply.topics import topics_of
from engines.blocks.compile import require_compilable
from engines.blocks.eight_bits import require_eight_bits
from engines.data.dense_gradients import require_dense
from engines.data.finite import OnNonfinite
from engines.data.noise_scale import require_measurable
from engines.legality import require_legal
from engines.offload.pool import steps_offloaded
from engines.optional.data_parallel import require_devices
from engines.plan import DataParallel, Plan
from engines.runtime.failures import all_ranks_succeed
from engines.runtime.rank_agreement import require_agreement
from engines.runtime.world import World, require_same_plan
from engines.state.optimizer_parts import indivisible, sparse_alone, why_not_chunked
from profiles.errors import InputError, PlanError, a_type
from profiles.record.bounds import is_whole
from profiles.workload.optimizers import DIVISIBLE


def validate(build: Build) -> None:
    """Refuse what the ranks disagree on, and a plan that this model, job or machine cannot run."""
    require_same_plan(build.plan, build.world)
    require_agreement(topics_of(build), build.world)
    with all_ranks_succeed("checking the plan", timeout_s=build.world.timeout_s):
        _require_possible(build)


def require_function(given: object, name: str, example: str) -> None:
    """Require what can be called, or nothing.

    Raises:
        InputError: it is something else.
    """
    if given is not None and not callable(given):
        raise InputError(
            f"{name} is {a_type(given)}, it must be callable", hints=[f"`{name}={example}`"]
        )


def require_seed(seed: int) -> int:
    """`seed`, if torch's generators take it.

    Raises:
        InputError: it is no whole number, or beyond 64 bits.
    """
    if not is_whole(seed, least=-(2**63)) or seed >= 2**64:
        raise InputError(f"`seed` wants a whole number of 64 bits, not `{seed!s:.40}`")
    return seed


def _require_possible(build: Build) -> None:
    plan, world, training = build.plan, build.world, build.training
    is_divided = plan.data_parallel.is_sharded or plan.tp * plan.ep * plan.pp > 1
    reasons = indivisible(training.optimizer, build.model) if is_divided else DIVISIBLE
    require_legal(plan, build.profile, build.cluster, indivisible=reasons)
    if plan.data_parallel is DataParallel.THREADS:
        require_devices(plan.dp_replicate, world, where=f"plan: {plan}")
    else:
        _require_ranks(plan, world)
    if steps_offloaded(plan):
        _require_chunked(plan, why_not_chunked(training.optimizer))
    if training.measure_noise:
        require_measurable(plan)
    if training.on_nonfinite is OnNonfinite.SKIP:
        _require_common_steps(plan)
    require_plain(build.model)
    sparse = build.profile.sparse_gradients
    require_dense(build.model, plan, sparse, sparse_alone=sparse_alone(training.optimizer))
    require_compilable(build.model, plan, profile=build.profile, device=world.device)
    require_eight_bits(build.model, plan, profile=build.profile)


def _require_ranks(plan: Plan, world: World) -> None:
    """A cluster that was named may have more devices than the job has ranks."""
    if plan.world_size != world.size:
        ranks = f"{world.size} rank{'s' * (world.size > 1)}"
        raise PlanError(
            f"the plan is for {plan.world_size} ranks, this job has {ranks}",
            where=f"plan: {plan}",
            hints=[
                f"start {plan.world_size} ranks: torchrun --nproc-per-node, with --nnodes for more"
                " nodes",
                'or plan for the machines of this job (`cluster="auto"`)',
            ],
        )


def _require_chunked(plan: Plan, because: str) -> None:
    if because:
        raise PlanError(
            because,
            where=f"plan: {plan}",
            hints=["leave its states on the device (offload=none), or take AdamW"],
        )


def _require_common_steps(plan: Plan) -> None:
    if not plan.updates_in_step:
        raise PlanError(
            '`on_nonfinite="skip"` leaves a step out on all ranks; these step at different times',
            where=f"plan: {plan}",
            hints=['`on_nonfinite="stop"`, or a plan whose ranks exchange gradients in every step'],
        )
