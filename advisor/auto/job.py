"""This process's job: its ranks and their machines."""

from __future__ import annotations

import math
import socket

from torch import nn

from engines.optional.data_parallel import require_devices
from engines.plan import AXES, DataParallel, PartialPlan
from engines.runtime.world import World, texts_of_ranks
from profiles.capture.module.manual_placement import accelerators_of
from profiles.errors import PlanError
from profiles.machine.bench import recall_or_bench
from profiles.machine.cluster import ClusterProfile
from profiles.machine.launcher import Launcher, launcher
from profiles.machine.probe import probe

_ALONE = Launcher("plain")


def machines_of(model: nn.Module, partial: PartialPlan, world: World) -> ClusterProfile:
    """The machines of this job, timed or recalled: a device for each rank.

    Alone: the devices that this process drives. That is one, but for the parts of a module that was
    split by hand, and for the replicas that `partial` gives to threads.

    Raises:
        InputError: this node cannot be described; see `probe`.
    """
    parts = len(accelerators_of(model))
    if world.size > 1:
        cluster = recall_or_bench(probe(launcher=_launcher_of(world)))
        if parts > 1:
            cluster = cluster.model_copy(update={"parts": probe(launcher=_ALONE, ranks=parts)})
        return cluster
    if launcher().world_size > 1:  # ranks without a job: a plan for them is rejected later
        return probe(measure=True)
    drives = (partial.dp_replicate or 0) if is_by_threads(partial) else max(1, parts)
    return probe(launcher=_ALONE, ranks=drives or None, measure=True)


def _launcher_of(world: World) -> Launcher | None:
    """The ranks by node, where a script made the process group itself; None under a launcher."""
    if launcher().world_size > 1:
        return None
    hosts = texts_of_ranks("ranks' hosts", socket.gethostname(), world)
    here = [rank for rank, host in enumerate(hosts) if host == hosts[world.rank]]
    return Launcher(
        "torchrun", world.rank, world.size, here.index(world.rank), len(here), len(set(hosts))
    )


def is_by_threads(partial: PartialPlan) -> bool:
    """Return True if one process drives all replicas."""
    return partial.data_parallel is DataParallel.THREADS


def require_ranks(partial: PartialPlan, world: World) -> None:
    """Check before any measurement that the fixed degrees can multiply to the number of ranks.

    Raises:
        PlanError: they cannot, or threads miss devices.
    """
    if is_by_threads(partial):
        require_devices((partial.dp_replicate or 2), world, where="data_parallel=threads")
        return
    degrees = partial.only(*AXES).fixed
    needed = math.prod(degrees.values())
    is_whole = len(degrees) == len(AXES)
    spare_ranks = partial.extra_ranks
    left = world.size - spare_ranks
    if spare_ranks and (left < 1 or left % needed or (is_whole and needed != left)):
        raise PlanError(
            f"beside {spare_ranks} servers and backup workers {left} of this job's {world.size}"
            f" ranks are left, the degrees need {'' if is_whole else 'a multiple of '}{needed}",
            hints=[f"start {needed + spare_ranks} ranks, or leave the degrees open"],
        )
    if not spare_ranks and (world.size % needed or (is_whole and needed != world.size)):
        words = " ".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1)
        raise PlanError(
            f"{words or 'a plan of one device'} needs {'' if is_whole else 'a multiple of '}"
            f"{needed} rank{'s' if needed > 1 else ''}, this job has {world.size}",
            hints=[f"start {needed} ranks, or leave the degrees open"],
        )
