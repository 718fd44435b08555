"""The estimate of a plan without stages: every rank has all units of the model."""

from __future__ import annotations

from advisor.cost.breakdown import Estimate
from advisor.cost.communication.by_hand import crossed_s
from advisor.cost.communication.compression import sent
from advisor.cost.communication.exchange import (
    exchange,
    waiting_bytes,
)
from advisor.cost.communication.exposed import split_exposed
from advisor.cost.communication.replay import replay
from advisor.cost.communication.small_collectives import small_collectives_s
from advisor.cost.compute.unit_times import (
    busy_s,
    optimizer_s,
)
from advisor.cost.context import CostContext
from advisor.cost.estimates.assemble import assemble
from advisor.cost.memory.offload import filed_s, moved_s
from advisor.cost.memory.peak import peak, shard_degree
from engines.plan import Plan


def one_stage(context: CostContext, plan: Plan) -> Estimate:
    """The estimate of a plan whose ranks have all units of the model."""
    model, cluster = context.facts.model, context.facts.cluster
    device = cluster.device
    loads, ledger = context.own_loads(plan), context.ledger()
    update = context.update(plan, 0, len(model.units))
    replicas = sent(plan, model.units, gradient_bytes=loads.common_gradient_bytes, device=device)
    memory = peak(
        plan,
        loads,
        update=update,
        device=device,
        batch_bytes=context.batch_bytes(plan),
        exchange_bytes=replicas.residual_bytes + waiting_bytes(plan, cluster, replicas),
        stack=context.stack,
        calibration=context.calibration,
    )
    computing = context.computing(plan, loads)
    exchanged = exchange(
        plan,
        loads,
        ledger,
        has_host=device.kind != "cpu",
        sent=replicas,
        reduced_share=context.reduced_share,
        stack=context.stack,
    )
    exchanged, waited_s = split_exposed(context.stack, plan, exchanged, computing)
    forward_s = sum(t.count * (t.forward_s + t.forward_launch_s) for t in computing.times)
    unhidden_s = waited_s + small_collectives_s(
        plan,
        model,
        ledger,
        forward_s=forward_s,
        backward_s=busy_s(computing, 1).total - forward_s,
    )
    unhidden_s += context.experts_s(plan, loads.runs, ledger)
    unhidden_s += context.partial_s(plan, loads.runs, ledger)
    unhidden_s += context.whole_s(plan, loads.runs, ledger)
    unhidden_s += moved_s(plan, loads, update, ledger, cluster=cluster)
    shards = {"degree": shard_degree(plan), "rounds": plan.forwards}
    unhidden_s += filed_s(plan, [loads], update, ledger, **shards, cluster=cluster)
    unhidden_s += crossed_s(plan, model, context.numerics(plan), ledger)
    overlaps = context.hides_gradients(plan)
    played = replay(plan, computing.times, exchanged, overlaps=overlaps)
    busy = busy_s(computing, plan.forwards)
    added = (plan.forwards - 1) * computing.added.total
    exposed = max(0.0, played.wall_s + added - busy.total) + unhidden_s
    sending_s = played.sent_s + unhidden_s
    return assemble(
        context,
        plan,
        memory=memory,
        busy=busy,
        update_s=optimizer_s(
            plan,
            update,
            device=device,
            ranks=cluster.devices_per_node,
            waiting=busy.waiting,
        ),
        exposed_s=exposed,
        overlapped_s=max(0.0, sending_s - exposed) if overlaps else 0.0,
        sent_s=sending_s,
        idle_s=0.0,
        computing=computing,
        ledger=ledger,
    )
