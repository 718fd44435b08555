"""Assemble an estimate: memory, terms of time, ranges and rates."""

from __future__ import annotations

from advisor.cost import anchored
from advisor.cost.breakdown import Estimate, Time
from advisor.cost.communication.replay import Slowdown, slowdown
from advisor.cost.compute.rates import peak_flop_per_s
from advisor.cost.compute.unit_times import Busy, Computing
from advisor.cost.context import CostContext
from advisor.cost.estimates.stragglers import straggling
from advisor.cost.ledger import Ledger
from advisor.cost.memory.peak import Peak
from engines.plan import Plan


def assemble(
    model: CostContext,
    plan: Plan,
    *,
    memory: Peak,
    busy: Busy,
    update_s: float,
    exposed_s: float,
    overlapped_s: float,
    sent_s: float,
    idle_s: float,
    computing: Computing,
    ledger: Ledger,
) -> Estimate:
    """Memory and time, with their ranges and rates. Idle time has the relative error of compute,
    since it waits for other stages' compute."""
    facts, device = model.facts, model.facts.cluster.device
    dtype, host_s = model.dtype(plan), model.facts.workload.host_overhead_s
    added: Slowdown = slowdown(facts.cluster.overlap, computing_s=busy.total, sent_s=sent_s)
    slowed = overlapped_s * added.middle
    straggling_s = straggling(plan, facts.workload, computing_s=busy.total)
    straggling_s += anchored.waiting_s(plan, facts.cluster, computing_s=busy.total)
    # Both use the same queue, so exposed time is split in proportion to their lengths.
    to_host = min(1.0, ledger.host_s / sent_s) if sent_s else 0.0
    time = Time(
        compute_s=busy.compute_s,
        recompute_s=busy.recompute_s,
        optimizer_s=update_s,
        exposed_s=(exposed_s + slowed) * (1 - to_host),
        host_s=(exposed_s + slowed) * to_host,
        overlapped_s=overlapped_s,
        launch_s=busy.launch_s,
        idle_s=idle_s,
        straggling_s=straggling_s,
        host_overhead_s=host_s,
    )
    step_s = time.total
    launch_doubt = anchored.launch_error(facts.cluster)
    update_doubt = anchored.update_error(facts.cluster, dtype)  # never of measured blocks
    computed = busy.compute_s + busy.recompute_s
    working = computed + update_s
    compute_doubt = (computing.error * computed + update_doubt * update_s) / working
    sent_doubt = min(1.0, anchored.communication_error(plan, facts.cluster))
    waiting = working + idle_s + straggling_s
    assert plan.microbatch_size is not None
    local, tokens = plan.microbatch_size * plan.forwards, facts.tokens_per_sample
    samples = local * plan.data_degree
    flop = model.flop(plan, local) / (plan.pp * plan.tp * plan.cp)
    return Estimate(
        memory=memory.memory,
        phase=memory.phase,
        peak_bytes=memory.memory.total,
        peak_low_bytes=memory.low_bytes,
        peak_high_bytes=memory.high_bytes,
        reserved_bytes=memory.reserved_bytes,
        states_bytes=memory.states_bytes,
        loss_bytes=memory.loss_bytes,
        host_bytes=memory.host_bytes,
        disk_bytes=memory.disk_bytes,
        load_bytes=model.load_bytes,
        step_s=step_s,
        step_low_s=waiting * (1 - compute_doubt)
        + busy.launch_s * (1 - launch_doubt)
        + exposed_s * (1 - sent_doubt)
        + overlapped_s * added.low
        + host_s,
        step_high_s=waiting * (1 + compute_doubt)
        + busy.launch_s * (1 + launch_doubt)
        + exposed_s * (1 + sent_doubt)
        + overlapped_s * added.high
        + host_s,
        time=time,
        compute_error=compute_doubt,
        measured_share=computing.measured_share,
        launch_error=launch_doubt,
        communication_error=sent_doubt,
        mfu=flop / step_s / peak_flop_per_s(device, model.peak_dtype(plan)).value,
        samples_per_s=samples / step_s,
        tokens_per_s=samples * tokens / step_s if tokens else None,
        traffic=ledger.traffic(),
        host_traffic_bytes=ledger.host_bytes,
    )
