"""Rules of offloading. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

from engines.legality.problem import Problem
from engines.plan import Offload, OffloadTo, Plan, Recompute
from profiles.machine.cluster import ClusterProfile
from profiles.model.profile import ModelProfile


def offload(plan: Plan, model: ModelProfile, cluster: ClusterProfile) -> Iterator[Problem]:
    """States of shards go with FSDP2, those of whole parameters step by step, activations block by
    block; files take what is read back tensor by tensor."""
    what = plan.offload
    if what.states and not plan.data_parallel.is_sharded:
        yield Problem(
            rule="offload-unsharded",
            what=f"offload={what} needs a sharded plan, data_parallel is {plan.data_parallel}",
            hint="add zero=1, 2 or 3 (zero=3 works on one device too)",
        )
    if what.optimizer and plan.data_parallel.is_sharded:
        yield Problem(
            rule="offload-sharded",
            what=f"offload={what} moves states of whole parameters, data_parallel is"
            f" {plan.data_parallel}",
            hint=f"set offload={what.value.replace('optimizer', 'states')}: shards take theirs"
            " along",
        )
    if what.optimizer or what.activations:
        yield from _one_piece_in_step(plan)
    if what.activations:
        yield from _activations(plan, model)
    yield from _disk(plan)


def _one_piece_in_step(plan: Plan) -> Iterator[Problem]:
    """Pipelines and asynchronous updates order their accesses themselves: they are refused."""
    if plan.pp > 1:
        yield Problem(
            rule="offload-stages",
            what=f"offload={plan.offload} is for models in one piece, pp is {plan.pp}",
            hint="set pp=1, or offload=states with a zero kind",
        )
    if not plan.updates_in_step:
        yield Problem(
            rule="offload-async-updates",
            what=f"offload={plan.offload} is for replicas that update in step,"
            f" updates={plan.updates} servers={plan.servers}",
            hint="leave `updates` and `servers` out, or set offload=none",
        )


def _activations(plan: Plan, model: ModelProfile) -> Iterator[Problem]:
    """Activations are offloaded while the forward of their block runs."""
    if not any(model.blocks()):
        yield Problem(
            rule="offload-without-blocks",
            what=f"offload={plan.offload} works on repeated blocks, {model.name} has none",
            hint="leave activations where they are",
        )
    if plan.recompute is not Recompute.NONE:
        # Inputs that recompute saves are arguments of its own: autograd's hooks do not see them.
        yield Problem(
            rule="offload-recomputed",
            what=f"recompute={plan.recompute} saves little of a block, and none of it where"
            f" offload={plan.offload} could move it",
            hint="set recompute=none, or leave activations where they are",
        )
    if plan.compile:
        yield Problem(
            rule="offload-compiled",
            what="compiled blocks choose their saved activations themselves, compile=true",
            hint="set compile=false, or leave activations where they are",
        )


def _disk(plan: Plan) -> Iterator[Problem]:
    if plan.offload_to is OffloadTo.HOST:
        return
    if plan.offload is Offload.NONE:
        yield Problem(
            rule="disk-without-offload",
            what=f"offload_to={plan.offload_to} names a place, offload=none moves nothing there",
            hint="add offload=optimizer, states or activations, or leave offload_to out",
        )
