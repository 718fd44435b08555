"""`python -m tests.peers.ranks REQUEST`: one rank of a job of `run`."""

from __future__ import annotations

import faulthandler
import gc
import logging
import sys
import time
from pathlib import Path

from engines.runtime.world import World, join_world, leave_world
from profiles.machine.bench import bench
from profiles.machine.cluster import ClusterProfile
from profiles.machine.probe import probe
from profiles.record import write_text
from tests.peers.capacity import capacity
from tests.peers.race import from_all, race
from tests.peers.run import BENCH_S, LINKS, RANK_TIMEOUT_S, SCRIPT_TIMEOUT_S, Request
from tests.peers.scripts import Job


def main(path: str) -> None:
    """Do the tasks in order; rank 0 writes a file after each."""
    logging.disable(logging.WARNING)
    request = Request.load(path)
    world, folder, link = join_world(timeout_s=RANK_TIMEOUT_S), Path(request.folder), request.link
    job = Job(
        rank=world.rank,
        size=world.size,
        nodes=LINKS[link].nodes,
        folder=folder,
        cluster=_cluster(request, world),
    )

    def say(script: str) -> None:
        faulthandler.dump_traceback_later(SCRIPT_TIMEOUT_S, exit=True)
        if world.rank == 0:
            (folder / "now.txt").write_text(script)

    for number, task in enumerate(request.tasks):
        if from_all(time.time() > request.ends_at)[0]:
            break
        began = time.monotonic()
        if task.script:
            say(task.script)
            done = capacity(task.script, job)
            say("")
        else:
            rounds, steps = LINKS[link].rounds, LINKS[link].steps
            done = race(
                task.subject, link, job, rounds=rounds, steps=steps, without=task.without, say=say
            )
        faulthandler.cancel_dump_traceback_later()
        gc.collect()
        if world.rank == 0:
            write_text(folder / f"done-{number:03}.json", done.model_dump_json())
            name = task.script or task.subject
            sys.stderr.write(f"{link}: {name} ({time.monotonic() - began:.0f} s)\n")
    leave_world()


def _cluster(request: Request, world: World) -> ClusterProfile:
    if request.cluster is not None:
        return request.cluster
    cluster = bench(probe(), budget_s=BENCH_S)
    if world.rank == 0:
        cluster.save(Path(request.folder) / "cluster.json")
    return cluster


if __name__ == "__main__":
    main(sys.argv[1])
