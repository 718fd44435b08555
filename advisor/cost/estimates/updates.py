"""Asynchronous and periodic updates: server traffic, synchronization, waiting for stragglers.

Pure functions of a plan and facts: costs in addition to a rank's step alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from advisor.cost.breakdown import Estimate
from advisor.cost.compute.unit_times import busy_s, optimizer_s
from advisor.cost.context import CostContext
from advisor.cost.estimates.assemble import assemble
from advisor.cost.estimates.stragglers import straggling
from advisor.cost.ledger import Ledger
from advisor.cost.memory.peak import BUCKET_BYTES, Moment, Peak, peak, peak_at
from engines.plan import DataParallel, Plan, Updates
from profiles.machine.cluster import ClusterProfile, Collective
from profiles.workload.optimizers import Upkeep

# Passes over the parameters in a synchronization of DiLoCo
# (engines/optional/async_updates/periodic.py): the difference is two reads and a write, SGD's
# Nesterov step three times that, a copy two more.
OUTER_PASSES = 14
# A server sums gradients pairwise: two reads and a write for each.
SUM_PASSES = 3
# Numbers, then tensors: two messages each way (engines/optional/async_updates/link.py).
MESSAGES = 4
# Between servers, to agree on the workers of a step: arrivals, and the choice.
AGREEING = 2
# On a server: a worker's gradients, and their flat message.
COPIES_OF_A_GRADIENT = 2


def alone(plan: Plan) -> Plan:
    """Plan of one worker or replica between exchanges: one device."""
    update = {
        "data_parallel": DataParallel.NONE,
        "dp_replicate": 1,
        "updates": Updates.SYNCHRONOUS,
        "sync_every": 1,
        "servers": 0,
        "backup_workers": 0,
        "max_staleness": None,
    }
    return plan.model_copy(update=update)


def updated(model: CostContext, plan: Plan) -> Estimate:
    """Estimate a plan with asynchronous or periodic updates."""
    facts, own = model.facts, alone(plan)
    device = facts.cluster.device
    loads, ledger = model.own_loads(own), model.ledger()
    update = model.update(own, 0, len(facts.model.units))
    computing = model.computing(own, loads)
    busy = busy_s(computing, plan.forwards)
    ranks = facts.cluster.devices_per_node
    update_s = optimizer_s(own, update, device=device, ranks=ranks, waiting=busy.waiting)
    if plan.servers:
        served = Served.of(plan, facts.cluster, payload_bytes=loads.gradient_bytes)
        update_s /= plan.servers
        sent_s = served.charge(
            ledger,
            update_s=update_s,
            computing_s=busy.total,
            waiting_s=straggling(plan, facts.workload, computing_s=busy.total),
        )
        states = [
            (_shared(update, 0.0), None),
            (_shared(update, 1 / plan.servers), served.fullest()),
        ]
    else:
        synchronization_s = _synchronization_s(plan, model, loads.gradient_bytes, ledger)
        sent_s = synchronization_s / plan.sync_every
        outer = 2 * loads.gradient_bytes * (plan.updates is Updates.DILOCO)
        with_outer = replace(update, state_bytes=update.state_bytes + outer)
        states = [(with_outer, None), (with_outer, _synchronization(plan, loads.gradient_bytes))]
    batch_bytes = model.batch_bytes(own)

    def fullest(update: Upkeep, moment: Moment | None) -> Peak:
        if moment is None:
            return peak(own, loads, update=update, device=device, batch_bytes=batch_bytes)
        return peak_at(
            moment,
            own,
            parameter_bytes=loads.parameter_bytes,
            gradient_bytes=loads.gradient_bytes,
            update=update,
            device=device,
            batch_bytes=batch_bytes + loads.buffer_bytes,
            ahead=0.0,
        )

    return assemble(
        model,
        plan,
        memory=max((fullest(*each) for each in states), key=lambda peak: peak.high_bytes),
        busy=busy,
        update_s=update_s,
        exposed_s=sent_s,
        overlapped_s=0.0,
        sent_s=sent_s,
        idle_s=0.0,
        computing=computing,
        ledger=ledger,
    )


@dataclass(frozen=True, slots=True)
class Served:
    """Server traffic of a step in which every worker pushes and pulls once.

    Attributes:
        workers: number of workers, including backup workers.
        needed: number of workers whose gradients a step waits for.
        payload_bytes: of all gradients of one worker; parameters are as large.
        in_s: for the busiest server to receive all messages of a step, or to send as much.
        worker_s: the same for one worker.
        latency_s: of all messages of an exchange.
    """

    workers: int
    needed: int
    servers: int
    is_synchronous: bool
    payload_bytes: float
    in_s: float
    worker_s: float
    latency_s: float
    stride: int
    memory_bytes_per_s: float
    reaches_host: bool

    @classmethod
    def of(cls, plan: Plan, cluster: ClusterProfile, *, payload_bytes: float) -> Served:
        """Servers are the first ranks of the job: they share the links of the first nodes."""
        workers = plan.data_degree + plan.backup_workers
        per_node, part = cluster.devices_per_node, payload_bytes / plan.servers
        agree = plan.servers > 1 and plan.backup_workers > 0
        tier = cluster.link(2, per_node) if cluster.num_nodes > 1 else cluster.link(2)
        return cls(
            workers=workers,
            needed=plan.data_degree,
            servers=plan.servers,
            is_synchronous=plan.updates is Updates.SYNCHRONOUS,
            payload_bytes=payload_bytes,
            in_s=max(_into(cluster, plan, node, workers) for node in _nodes(plan, cluster)) * part,
            worker_s=payload_bytes / _rate_of_one(cluster, talking=per_node),
            latency_s=(MESSAGES + AGREEING * agree) * tier.latency_s.value,
            stride=per_node if cluster.num_nodes > 1 else 1,
            memory_bytes_per_s=cluster.device.memory_bandwidth_bytes_per_s.value,
            reaches_host=cluster.device.kind != "cpu",
        )

    @property
    def part_bytes(self) -> float:
        """Bytes of one server's part, received from and sent to each worker."""
        return self.payload_bytes / self.servers

    @property
    def passed_bytes(self) -> float:
        """Bytes that one server receives in a step, and sends."""
        return self.part_bytes * self.workers

    def charge(
        self, ledger: Ledger, *, update_s: float, computing_s: float, waiting_s: float = 0.0
    ) -> float:
        """Charge a worker's traffic; return the exposed seconds.

        Args:
            waiting_s: for the slowest needed worker to compute, while others send.
        """
        for purpose in ("gradients to servers", "parameters from servers"):
            ledger.charge(
                Collective.SEND_RECV, purpose, self.part_bytes, group_size=2,
                stride=self.stride, count=self.servers,
            )  # fmt: skip
        host_s = 0.0
        if self.reaches_host:  # gloo's messages are in main memory
            host_s = ledger.to_host(2 * self.payload_bytes)
        adding_s = SUM_PASSES * self.part_bytes / self.memory_bytes_per_s
        if self.is_synchronous:
            # Gradients of backup workers arrive at the same time; parameters are sent after the
            # update.
            there_s = max(self.in_s * self.needed / self.workers - waiting_s, self.worker_s)
            back_s = max(self.in_s, self.worker_s)
            return there_s + self.needed * adding_s + back_s + self.latency_s + host_s
        one_s = self.in_s / self.workers
        there_s, updating_s, back_s = spent_s(
            (one_s, adding_s + update_s, one_s),
            thinking_s=computing_s + self.latency_s + host_s,
            customers=self.workers,
        )
        sent_s = max(there_s, self.worker_s) + max(back_s, self.worker_s)
        return sent_s + updating_s - update_s + self.latency_s + host_s

    def fullest(self) -> Moment:
        """A server with the gradients of all workers, and its reply."""
        return Moment(
            event="update on a server",
            gradients=COPIES_OF_A_GRADIENT * self.passed_bytes,
            transient=self.passed_bytes,
        )


def spent_s(stations: Sequence[float], *, thinking_s: float, customers: int) -> tuple[float, ...]:
    """Seconds that a customer spends at each station, including waiting, in a closed queueing
    network with think time.

    Workers reach a server's link in random order, so it is sometimes shared and sometimes idle.
    Mean value analysis is exact for that, whatever the sizes, if a link is shared evenly (Reiser
    and Lavenberg 1980, "Mean-Value Analysis of Closed Multichain Queuing Networks"; Baskett et al.
    1975).

    >>> spent_s((1.0, 1.0), thinking_s=0.0, customers=3)
    (2.0, 2.0)

    Args:
        stations: service seconds of one customer.
    """
    queues = spent = (0.0,) * len(stations)
    for number in range(1, customers + 1):
        spent = tuple(
            alone_s * (1 + queue) for alone_s, queue in zip(stations, queues, strict=True)
        )
        rate = number / max(thinking_s + sum(spent), 1e-12)
        queues = tuple(rate * each for each in spent)
    return spent


def _nodes(plan: Plan, cluster: ClusterProfile) -> range:
    """Nodes of the servers."""
    return range(ceil(plan.servers / cluster.devices_per_node))


def _into(cluster: ClusterProfile, plan: Plan, node: int, workers: int) -> float:
    """Seconds until a byte of every worker has reached each server of a node."""
    per_node = cluster.devices_per_node
    here = min(per_node, plan.servers - node * per_node)
    local_workers = per_node - here  # workers of the same node
    local_s = local_workers / cluster.intra.bandwidth_bytes_per_s.value if cluster.intra else 0.0
    remote_s = (workers - local_workers) * here / _rate_of_node(cluster, here)
    return max(local_s, remote_s)


def _rate_of_node(cluster: ClusterProfile, talking: int) -> float:
    """Bytes/s of a node's cards, one each for so many ranks."""
    if cluster.inter is None:
        return inf
    cards = min(cluster.network_cards or cluster.devices_per_node, cluster.devices_per_node)
    return cluster.inter.bandwidth_bytes_per_s.value * min(1.0, talking / cards)


def _rate_of_one(cluster: ClusterProfile, talking: int) -> float:
    """Bytes/s of a rank while `talking` ranks of its node send to others, or inside its own."""
    if cluster.num_nodes > 1:
        return _rate_of_node(cluster, talking) / talking
    return cluster.intra.bandwidth_bytes_per_s.value if cluster.intra else inf


def _synchronization_s(
    plan: Plan, model: CostContext, payload_bytes: float, ledger: Ledger
) -> float:
    """Seconds of one synchronization of all replicas; no compute overlaps."""
    cluster, profile = model.facts.cluster, model.facts.model
    every, group = plan.sync_every, plan.dp_replicate
    count = max(1, ceil(payload_bytes / BUCKET_BYTES))
    seconds = count * ledger.charge(
        Collective.ALL_REDUCE,
        "parameters of replicas" if plan.updates is Updates.LOCAL else "what replicas moved by",
        payload_bytes / count,
        group_size=group,
        count=count / every,
    )
    if profile.batch_norms:
        seconds += ledger.charge(
            Collective.SEND_RECV,
            "buffers (broadcast)",
            profile.buffer_bytes,
            group_size=group,
            count=1 / every,
        )
    if plan.updates is Updates.DILOCO:
        seconds += OUTER_PASSES * payload_bytes / cluster.device.memory_bandwidth_bytes_per_s.value
    return seconds


def _synchronization(plan: Plan, payload_bytes: float) -> Moment:
    """Memory of a replica during synchronization: gradients of the step, and the parameter
    difference."""
    moved = payload_bytes if plan.updates is Updates.DILOCO else 0.0
    flat = min(payload_bytes, BUCKET_BYTES)
    return Moment(event="meeting", gradients=payload_bytes, transient=moved + flat)


def _shared(update: Upkeep, share: float) -> Upkeep:
    """`share` of an optimizer's states and work."""
    return replace(
        update,
        state_bytes=update.state_bytes * share,
        loop_bytes=update.loop_bytes * share,
        list_bytes=update.list_bytes * share,
    )
