"""Lower bounds of time without pipeline stages: all ranks are equal, a step is one rank's time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from advisor.cost.communication.replay import slowdown
from advisor.cost.memory.offload import (
    copied_s,
    is_elsewhere,
    of_blocks_bytes,
    shards_in_files_s,
    there_and_back_s,
)
from advisor.search.columns import ZERO1, ZERO2, Columns
from advisor.search.space import Floats


@dataclass(frozen=True, slots=True)
class WholeTime:
    """Lower bounds of a step's seconds."""

    compute_s: Floats
    recompute_s: Floats
    optimizer_s: Floats
    launch_s: Floats
    exposed_s: Floats


def whole_time(columns: Columns) -> WholeTime:
    """Compute time is exact; communication is what compute cannot hide."""
    forwards = columns.space.forwards
    compute = forwards * columns.of(lambda g: g.compute_s)
    recompute = forwards * columns.of(lambda g: g.recompute_s)
    launch = forwards * columns.of(lambda g: g.launch_s)
    busy = compute + recompute + launch
    update = columns.optimizer_s()
    if not columns.space.updates_in_step:
        # Waiting for other ranks and for servers has no lower bound, nor has the servers' update.
        served = bool(columns.space.common.servers)
        return WholeTime(compute, recompute, update * (not served), launch, 0.0 * compute)
    exposed, sent = _exposed_s(columns, busy)
    experts = columns.experts_s()
    exposed, sent = exposed + experts, sent + experts
    overlap = columns.costs.facts.cluster.overlap
    if columns.costs.overlaps or overlap is not None:
        # Slowdown per second of overlap, whichever of the two takes longer, but at most what
        # overlapping saves.
        either = [slowdown(overlap, computing_s=c, sent_s=1.0 - c).middle for c in (0.0, 1.0)]
        exposed = exposed + min(*either, 1.0) * np.maximum(0.0, sent - exposed)
    return WholeTime(compute, recompute, update, launch, exposed)


def _exposed_s(columns: Columns, busy: Floats) -> tuple[Floats, Floats]:
    """Seconds of (exposed communication, all communication)."""
    forwards, overlaps = columns.space.forwards, columns.costs.overlaps
    forward = columns.of(lambda g: g.forward_s + g.exchanged_s[0])
    backward = columns.of(lambda g: g.busy_s - g.forward_s + g.exchanged_s[1])
    inside = columns.of(lambda g: sum(g.exchanged_s))
    gather, root_gather = columns.gather_s()
    reduce, root_reduce = columns.reduce_s()
    between, root_between = columns.replicate_s()
    gathers, reduces = columns.gathers, columns.reduces

    def one_pass(computing: Floats, *, root: Floats, sent: Floats) -> Floats:
        """Pass through all units: the root group's collective, and the longer of two queues."""
        overlapped = np.maximum(computing, sent) if overlaps else computing + sent
        return np.asarray(root + overlapped)

    first = one_pass(forward, root=root_gather, sent=gather)
    again = one_pass(forward, root=gathers * root_gather, sent=gathers * gather)
    both = gathers * gather + reduces * reduce
    middle = one_pass(backward, root=reduces * root_reduce, sent=both)
    last = one_pass(backward, root=root_reduce, sent=gathers * gather + reduce)
    # All-reduces between replicas have a queue of their own; the root group's is exposed. On
    # processors that of DDP has (`CostContext.hides_gradients`).
    hides = overlaps | ~columns.is_sharded
    last = np.where(hides, np.maximum(last, between), last + between) + root_between
    wall = first + last + (forwards - 1) * (again + middle)
    sent = gather + root_gather + gathers * (2 * forwards - 1) * gather
    sent += gathers * (forwards - 1) * root_gather + forwards * inside
    sent += (1 + reduces * (forwards - 1)) * (reduce + root_reduce) + between + root_between
    return np.maximum(0.0, wall - busy), sent


def moved_s(columns: Columns) -> Floats:
    """Seconds of exposed offloading (see `advisor.cost.memory.offload`)."""
    space, cluster = columns.space, columns.costs.facts.cluster
    device, offload = cluster.device, space.offload
    leaves_device = is_elsewhere(device, to_disk=space.is_to_disk)
    seconds = np.zeros(len(space))
    s_per_byte = there_and_back_s(cluster, to_disk=space.is_to_disk)
    if offload.optimizer and leaves_device:
        seconds += s_per_byte * columns.states_bytes()
    if offload.activations:
        blocks = space.forwards * columns.of(lambda g: of_blocks_bytes(g.loads))
        seconds += s_per_byte * blocks if leaves_device else copied_s(blocks, device)
    if offload.states and space.is_to_disk:
        keeps = (space.kind == ZERO1) | (space.kind == ZERO2)
        seconds += shards_in_files_s(
            cluster,
            parameter_bytes=columns.of(lambda g: g.loads.parameter_bytes) / columns.shards,
            gradient_bytes=columns.of(lambda g: g.loads.gradient_bytes) / columns.shards,
            state_bytes=columns.states_bytes(),
            gathers=np.where(keeps, 1.0, 2.0 * space.forwards),
            reductions=np.where(space.kind == ZERO1, 1.0, space.forwards),
        )
    return seconds
