"""Cost: what a plan is predicted to take. `estimate` is a pure function of plan and facts."""

from __future__ import annotations

from advisor.cost.breakdown import Estimate, Memory, Time, Traffic
from advisor.cost.communication import communication_error, exchange
from advisor.cost.compute import (
    Computing,
    block_times,
    compute_error,
    launch_error,
    optimizer_s,
    peak_flop_per_s,
    unit_times,
    with_measured,
)
from advisor.cost.loads import Loads, loads_of
from advisor.cost.memory import peak, shard_degree
from advisor.cost.replay import replay, slowdown
from advisor.facts import Facts
from engines.legality import numerics
from engines.plan import Plan
from profiles.errors import PlanError
from profiles.loading import load_memory
from profiles.model import Numerics
from profiles.optimizers import Upkeep, upkeep

__all__ = ["CostModel", "Estimate", "Memory", "Time", "Traffic", "estimate"]


def estimate(plan: Plan, facts: Facts) -> Estimate:
    """Memory, time and traffic of `plan`. The plan must be legal and name its microbatch size.

    Raises:
        PlanError: the microbatch size is open.
    """
    return CostModel(facts).estimate(plan)


class CostModel:
    """`estimate` for many plans of the same facts: sums that plans share are made once."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._loads: dict[tuple[Numerics, int], Loads] = {}
        self._updates: dict[int, Upkeep] = {}

    def estimate(self, plan: Plan) -> Estimate:
        """See `advisor.cost.estimate`."""
        if plan.microbatch_size is None:
            raise PlanError(
                "the plan leaves microbatch_size open, so it has no cost", where=f"plan: {plan}"
            )
        model, cluster = self.facts.model, self.facts.cluster
        device = cluster.device
        kind = numerics(plan, model)
        loads = self._at(kind, plan.microbatch_size)
        dtype = model.dtype if kind is Numerics.AS_BUILT else "bfloat16"
        local_samples = plan.microbatch_size * plan.forwards

        update = self._update(shard_degree(plan))
        memory = peak(
            plan,
            loads,
            update=update,
            device=device,
            batch_bytes=model.batch_bytes.at(local_samples),
        )
        computing = self._computing(plan, loads, kind, dtype)
        times = computing.times
        exchanged = exchange(plan, loads, model=model, cluster=cluster)
        # gloo's threads share the cores with the computing: on processors nothing is hidden. (What
        # they were measured to inflict on each other, 2 ranks on 2 cores: computing takes 1.8 times
        # as long and sending 2.0 times. A second of overlap then adds 0.9, as good as all of it.)
        overlaps = device.kind != "cpu"
        played = replay(plan, times, exchanged, overlaps=overlaps)
        update_s = optimizer_s(plan, update, device=device, ranks=cluster.devices_per_node)

        rounds = plan.forwards
        compute = rounds * sum(t.forward_s + t.backward_s for t in times)
        recompute = rounds * sum(t.recompute_s for t in times)
        launch = rounds * sum(
            t.forward_launch_s + t.backward_launch_s + t.recompute_launch_s for t in times
        )
        exposed = max(0.0, played.wall_s - compute - recompute - launch)
        overlapped = max(0.0, played.sent_s - exposed) if overlaps else 0.0
        added = slowdown(
            cluster.overlap, computing_s=compute + recompute + launch, sent_s=played.sent_s
        )
        slowed = overlapped * added.middle
        # Both wait in the same queue, so what is exposed is shared out by their lengths.
        to_host = min(1.0, exchanged.host_s / played.sent_s) if played.sent_s else 0.0
        time = Time(
            compute_s=compute,
            recompute_s=recompute,
            optimizer_s=update_s,
            exposed_s=(exposed + slowed) * (1 - to_host),
            host_s=(exposed + slowed) * to_host,
            overlapped_s=overlapped,
            launch_s=launch,
        )
        step_s = time.total
        # The update is a roofline's whatever the rest is.
        busy = compute + recompute + update_s
        compute_doubt = computing.error * (compute + recompute)
        compute_doubt = (compute_doubt + compute_error(device, dtype) * update_s) / busy
        launch_doubt = launch_error(device)
        sent_doubt = min(1.0, communication_error(plan, cluster))
        samples = local_samples * plan.data_degree
        flop = model.flop(local_samples, kind)
        tokens = self.facts.tokens_per_sample
        return Estimate(
            memory=memory.memory,
            phase=memory.phase,
            peak_bytes=memory.memory.total,
            peak_low_bytes=memory.low_bytes,
            peak_high_bytes=memory.high_bytes,
            states_bytes=memory.states_bytes,
            loss_bytes=memory.loss_bytes,
            host_bytes=memory.host_bytes,
            load_bytes=load_memory(model, ranks_per_node=1).per_rank_bytes,
            step_s=step_s,
            step_low_s=busy * (1 - compute_doubt)
            + launch * (1 - launch_doubt)
            + exposed * (1 - sent_doubt)
            + overlapped * added.low,
            step_high_s=busy * (1 + compute_doubt)
            + launch * (1 + launch_doubt)
            + exposed * (1 + sent_doubt)
            + overlapped * added.high,
            time=time,
            compute_error=compute_doubt,
            measured_share=computing.measured_share,
            launch_error=launch_doubt,
            communication_error=sent_doubt,
            mfu=flop / step_s / peak_flop_per_s(device, dtype).value,
            samples_per_s=samples / step_s,
            tokens_per_s=samples * tokens / step_s if tokens else None,
            traffic=exchanged.traffic,
            host_traffic_bytes=exchanged.host_bytes,
        )

    def _at(self, kind: Numerics, samples: int) -> Loads:
        key = (kind, samples)
        if key not in self._loads:
            self._loads[key] = loads_of(self.facts.model, numerics=kind, samples=samples)
        return self._loads[key]

    def _computing(self, plan: Plan, loads: Loads, kind: Numerics, dtype: str) -> Computing:
        """Measured times of this device where the model carries some, else the roofline's."""
        cluster = self.facts.cluster
        device, recompute = cluster.device, plan.recompute
        times = unit_times(loads, recompute=recompute, device=device, dtype=dtype)
        error = compute_error(device, dtype)
        measured = block_times(self.facts.model, cluster, kind, samples=loads.samples)
        if measured is None:
            return Computing(times, error)
        then = self._at(kind, measured.samples)
        at_measured = unit_times(then, recompute=recompute, device=device, dtype=dtype)
        return with_measured(times, loads, measured=measured, at_measured=at_measured, error=error)

    def _update(self, shards: int) -> Upkeep:
        if shards not in self._updates:
            optimizer, units = self.facts.workload.optimizer, self.facts.model.units
            self._updates[shards] = upkeep(optimizer, units, shards=shards)
        return self._updates[shards]
