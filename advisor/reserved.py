"""Reserved memory of the plan that was taken: its step replayed in the caching allocator.

A constant share of what is allocated is all that a search can afford; of the one plan that is shown
the step is replayed (`profiles.step_replay`), 5 to 25 ms. Validated for plans whose ranks hold the
whole model; of the others the estimate's share stands.
"""

from __future__ import annotations

from math import ceil

from advisor.cost import CostModel
from advisor.cost.buffers import BUCKET_BYTES
from advisor.cost.loads import Loads
from advisor.cost.memory import kept_bytes
from advisor.decision import Decision
from advisor.facts import Facts
from engines.plan import DataParallel, Offload, Plan, Recompute
from profiles.model import Numerics
from profiles.step_replay import Standing, UnitMemory, replay
from profiles.unit_memory import kept_tensors, parameter_tensors, scaled

_WHOLE = (DataParallel.NONE, DataParallel.REPLICATE)


def reserved_bytes(decision: Decision) -> float:
    """What the process takes of its device for the plan of `decision`, context included."""
    own, plan, facts = decision.estimate, decision.plan, decision.facts
    if not _is_whole(plan, facts):
        return own.reserved_bytes
    costs = CostModel(facts)
    loads, context = costs.loads(plan), own.memory.context
    update = costs.update(plan, 0, len(facts.model.units))
    parameters = loads.parameter_bytes
    copies = update.state_bytes / parameters
    buckets = ceil(loads.gradient_bytes / BUCKET_BYTES) if plan.is_replicated else 0
    replayed = replay(
        step_units(plan, costs, loads, numerics=costs.numerics(plan)),
        Standing(
            always=(costs.batch_bytes(plan), float(facts.model.buffer_bytes)),
            state_copies=(copies / 2, copies / 2) if copies else (),
            step_copies=update.list_bytes / parameters,
            buckets=(loads.gradient_bytes / buckets,) * buckets if buckets else (),
        ),
    )
    return (own.peak_bytes - context) * replayed.ratio + context


def step_units(
    plan: Plan, costs: CostModel, loads: Loads, *, numerics: Numerics
) -> list[UnitMemory]:
    """The tensors of every run of equal units on one rank."""
    units = []
    for run, load in zip(costs.runs, loads.runs, strict=True):
        cost, kept = run.unit.cost(numerics), kept_bytes(load, plan.recompute)
        tensors = kept_tensors(cost, loads.samples)
        again = load.activation_bytes - kept if load.is_block else 0.0
        casts = load.parameter_bytes * loads.compute_share * (loads.compute_share != 1)
        sizes = parameter_tensors(run.unit)
        held = scaled(tensors, kept)
        if again > 0:
            held = (kept,) if kept else ()
        units.append(
            UnitMemory(
                parameters=scaled(sizes, load.parameter_bytes),
                gradients=scaled(sizes, load.gradient_bytes),
                kept=scaled(sizes, casts) + held,
                again=scaled(tensors, again) if again > 0 else (),
                forward_bytes=load.forward_transient_bytes + casts + kept * (again > 0),
                backward_bytes=load.backward_transient_bytes,
                count=load.count,
            )
        )
    return units


def _is_whole(plan: Plan, facts: Facts) -> bool:
    """Whether a rank holds the model in one piece, by torch's own allocator."""
    return (
        facts.cluster.device.kind != "cpu"
        and plan.pp * plan.tp * plan.cp * plan.ep == 1
        and plan.data_parallel in _WHOLE
        and plan.recompute is not Recompute.SELECTIVE
        and plan.offload is Offload.NONE
        and plan.updates_in_step
        and facts.stack.states is None
    )
