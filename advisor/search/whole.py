"""Lower bounds for models in one piece, whose ranks are all alike: a step is the time of one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from advisor.cost.offload import (
    copied_s,
    is_elsewhere,
    of_blocks_bytes,
    shards_in_files_s,
    there_and_back_s,
)
from advisor.cost.replay import slowdown
from advisor.search.columns import ZERO1, ZERO2, Columns
from advisor.search.space import Floats


@dataclass(frozen=True, slots=True)
class WholeTime:
    """Seconds of a step, none above the estimate's."""

    compute_s: Floats
    recompute_s: Floats
    optimizer_s: Floats
    launch_s: Floats
    exposed_s: Floats


def whole_time(columns: Columns) -> WholeTime:
    """What a rank computes is exact; of what it sends, that which no computing can hide."""
    forwards = columns.space.forwards
    compute = forwards * columns.of(lambda g: g.compute_s)
    recompute = forwards * columns.of(lambda g: g.recompute_s)
    launch = forwards * columns.of(lambda g: g.launch_s)
    busy = compute + recompute + launch
    update = columns.optimizer_s()
    if not columns.space.updates_in_step:
        # What such ranks wait for is not bounded from below, nor what they leave to servers.
        served = bool(columns.space.carried.servers)
        return WholeTime(compute, recompute, update * (not served), launch, 0.0 * compute)
    exposed, sent = _exposed_s(columns, busy)
    experts = columns.experts_s()
    exposed, sent = exposed + experts, sent + experts
    if columns.costs.overlaps:
        overlap = columns.costs.facts.cluster.overlap
        # What a second of overlap adds, whichever of the two takes longer; never more than hiding
        # it saves.
        either = [slowdown(overlap, computing_s=c, sent_s=1.0 - c).middle for c in (0.0, 1.0)]
        exposed = exposed + min(*either, 1.0) * np.maximum(0.0, sent - exposed)
    return WholeTime(compute, recompute, update, launch, exposed)


def _exposed_s(columns: Columns, busy: Floats) -> tuple[Floats, Floats]:
    """(what nothing hides, all that is sent)."""
    forwards, overlaps = columns.space.forwards, columns.costs.overlaps
    there = columns.of(lambda g: g.forward_s + g.exchanged_s[0])
    back = columns.of(lambda g: g.busy_s - g.forward_s + g.exchanged_s[1])
    inside = columns.of(lambda g: sum(g.exchanged_s))
    gather, root_gather = columns.gather_s()
    reduce, root_reduce = columns.reduce_s()
    between, root_between = columns.replicate_s()
    gathers, reduces = columns.gathers, columns.reduces

    def one_way(computing: Floats, *, around: Floats, sent: Floats) -> Floats:
        """Through all units: what comes before or after them, and the longer of two queues."""
        beside = np.maximum(computing, sent) if overlaps else computing + sent
        return np.asarray(around + beside)

    first = one_way(there, around=root_gather, sent=gather)
    again = one_way(there, around=gathers * root_gather, sent=gathers * gather)
    middle = one_way(back, around=reduces * root_reduce, sent=gathers * gather + reduces * reduce)
    last = one_way(back, around=root_reduce, sent=gathers * gather + reduce)
    # Between replicas there is a queue of its own; the root's comes after everything.
    last = (np.maximum(last, between) if overlaps else last + between) + root_between
    wall = first + last + (forwards - 1) * (again + middle)
    sent = gather + root_gather + gathers * (2 * forwards - 1) * gather
    sent += gathers * (forwards - 1) * root_gather + forwards * inside
    sent += (1 + reduces * (forwards - 1)) * (reduce + root_reduce) + between + root_between
    return np.maximum(0.0, wall - busy), sent


def moved_s(columns: Columns) -> Floats:
    """What is moved out of the device and back while nothing else goes on (`cost.offload`)."""
    space, cluster = columns.space, columns.costs.facts.cluster
    device, what = cluster.device, space.offload
    elsewhere = is_elsewhere(device, to_disk=space.is_to_disk)
    seconds = np.zeros(len(space))
    a_byte_s = there_and_back_s(cluster, to_disk=space.is_to_disk)
    if what.optimizer and elsewhere:
        seconds += a_byte_s * columns.states_bytes()
    if what.activations:
        blocks = space.forwards * columns.of(lambda g: of_blocks_bytes(g.loads))
        seconds += a_byte_s * blocks if elsewhere else copied_s(blocks, device)
    if what.states and space.is_to_disk:
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
