"""Pipelines whose ranks take turns on cores: a rank is faster while others wait.

Rates of a benched device are of ranks that all compute at once. Those of a pipeline do not: with
four ranks on two cores and one microbatch, each has a core of its own at any time, and the step is
twice as fast as those rates say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from advisor.cost.stages.pipeline import ActionSpan, Played, StageTimes, play, timeline
from engines.plan import Plan, Schedule
from profiles.machine.cluster import ClusterProfile


def speedup_alone(cluster: ClusterProfile) -> float:
    """Speed of a rank alone over its speed while all compute; 1 if cores are not shared."""
    return 1.0 if cluster.shared_cores is None else max(1.0, cluster.shared_cores.alone.value)


def play_on_cores(
    schedule: Schedule,
    times: StageTimes,
    plan: Plan,
    cluster: ClusterProfile,
    *,
    microbatches: int,
    waits: bool,
) -> Played:
    """Simulate one round as `play` does, with the cores of waiting ranks left to the others.

    At every moment of the round as it would be with a core for each rank, actions are slowed down
    by the ranks that compute then: all of them, on the same cores, by as much as the bench saw.
    """
    alone = speedup_alone(cluster)
    if alone == 1:
        return play(schedule, times, ranks=plan.pp, microbatches=microbatches, waits=waits)
    fast = replace(
        times,
        forward_s=tuple(s / alone for s in times.forward_s),
        backward_s=tuple(s / alone for s in times.backward_s),
        weight_s=tuple(s / alone for s in times.weight_s),
    )
    spans = timeline(schedule, fast, ranks=plan.pp, microbatches=microbatches, waits=waits)
    return slowed(spans, _neighbours(plan, cluster), ranks=plan.pp, alone=alone)


def slowed(
    spans: Sequence[ActionSpan], neighbours: Sequence[int], *, ranks: int, alone: float
) -> Played:
    """Stretch a round by the actions that run at the same moment.

    Args:
        spans: the round, at the speed of a rank alone.
        neighbours: of each rank, the number of its cores' pool.
        alone: slowdown if all ranks of a pool compute.
    """
    sizes = [neighbours.count(pool) for pool in neighbours]
    changes = sorted(
        [(span.start_s, 1, span.rank) for span in spans]
        + [(span.end_s, -1, span.rank) for span in spans]
    )
    running = [0] * ranks
    busy, end = [0.0] * ranks, [0.0] * ranks
    clock = 0.0
    for (begin_s, change, rank), (until_s, _, _) in pairwise(changes):
        running[rank] += change
        if until_s == begin_s:
            continue
        at_work = [neighbours[r] for r in range(ranks) if running[r]]
        slowdown = max(
            (alone * at_work.count(neighbours[r]) / sizes[r] for r in range(ranks) if running[r]),
            default=1.0,
        )
        passed_s = (until_s - begin_s) * max(1.0, slowdown)
        clock += passed_s
        for r in range(ranks):
            if running[r]:
                busy[r] += passed_s
                end[r] = clock
    return Played(clock, tuple(end), tuple(busy))


def slowest_s(seconds: Sequence[float], plan: Plan, cluster: ClusterProfile) -> float:
    """Seconds until all ranks of the pp axis are done, of what each takes while all compute.

    Those that are done early leave their cores to the others.
    """
    alone, neighbours = speedup_alone(cluster), _neighbours(plan, cluster)
    work = [0.0] * (max(neighbours) + 1)
    for pool, each in zip(neighbours, seconds, strict=True):
        work[pool] += each / neighbours.count(pool)
    return max(max(seconds) / alone, *work)


def _neighbours(plan: Plan, cluster: ClusterProfile) -> list[int]:
    """Pool of cores of each rank of the pp axis: its node, or all nodes together."""
    shared = cluster.shared_cores
    if shared is not None and shared.across_nodes:
        return [0] * plan.pp
    ranks_per_stage = plan.world_size // plan.pp
    return [rank * ranks_per_stage // cluster.devices_per_node for rank in range(plan.pp)]
