"""`python -m tests.peers`: what people use today, beside us (root, Linux; `make peers` sets up).

    --show           print the tables of what is saved, and measure nothing
    --minutes N      begin nothing after N minutes (15)
    --only MODEL, --link LINK    these races (each may be given again); else all
    --part races|capacities|planners    this part (may be given again); else all
    --again          measure anew what FILE has
    --out FILE       tests/validation/peers.json unless named

What FILE has is left out, so that a run that was stopped goes on; it is written after each race.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from profiles.machine.cluster import ClusterProfile
from tests.namespaces import why_not
from tests.peers.capacity import SUBJECT
from tests.peers.planners import answers
from tests.peers.race import scripts_of
from tests.peers.results import RESULTS, Capacity, Peers, Race
from tests.peers.run import LINKS, Task, measure, show
from tests.peers.scripts import FRUGAL, OURS_FASTEST
from tests.peers.subjects import SUBJECTS
from tests.peers.table import tables

PARTS = ("races", "capacities", "planners")
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed")


def main(words: list[str]) -> int:
    options = _parser().parse_args(words)
    peers = Peers.load(options.out) if options.out.exists() else Peers()
    if not options.show:
        peers = _measured(peers, options)
    show(tables(peers))
    return 0


def _measured(peers: Peers, options: argparse.Namespace) -> Peers:
    ends_at = time.time() + 60 * options.minutes
    peers = peers.model_copy(update=_facts())
    for link in options.link or LINKS:
        if LINKS[link].nodes > 1 and (reason := why_not()):
            show(f"{link}: left out, {reason}")
            continue
        tasks = todo(peers, link, options)
        if not tasks:
            continue
        show(f"{link}: {len(tasks)} to measure")
        try:
            results = measure(link, tasks, peers.clusters.get(link), ends_at=ends_at, say=show)
            for done in results:
                peers = _with(peers, link, done)
                peers.save(options.out)
        except RuntimeError as error:
            show(f"{link}: {error}")
    if "planners" in (options.part or PARTS) and (options.again or not peers.answers):
        show("planners")
        peers = peers.with_answers(tuple(answers(peers.clusters)))
        peers.save(options.out)
    return peers


def todo(peers: Peers, link: str, options: argparse.Namespace) -> list[Task]:
    """Races of a link that are not known, and capacities with the local ones."""
    parts, tasks = options.part or PARTS, []
    if "races" in parts:
        names = [n for n in options.only or SUBJECTS if options.again or not peers.race(n, link)]
        tasks += [Task(subject=name) for name in names]
    if "capacities" in parts and LINKS[link].nodes == 1:
        known = set() if options.again else {one.script for one in peers.capacities}
        scripts = [name for name in (*scripts_of(1), FRUGAL) if name != OURS_FASTEST]
        tasks += [Task(subject=SUBJECT, script=name) for name in scripts if name not in known]
    return tasks


def _with(peers: Peers, link: str, done: ClusterProfile | Race | Capacity) -> Peers:
    if isinstance(done, ClusterProfile):
        return peers.model_copy(update={"clusters": {**peers.clusters, link: done}})
    return peers.with_race(done) if isinstance(done, Race) else peers.with_capacity(done)


def _facts() -> dict[str, object]:
    versions = {}
    for name in PACKAGES:
        is_there = importlib.util.find_spec(name) is not None
        versions[name] = importlib.metadata.version(name) if is_there else "not installed"
    return {
        "measured_at": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores {platform.machine()}",
        "versions": {"python": platform.python_version(), **versions},
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.peers")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--minutes", type=float, default=15.0, metavar="N")
    parser.add_argument("--only", action="append", choices=list(SUBJECTS), metavar="MODEL")
    parser.add_argument("--link", action="append", choices=list(LINKS), metavar="LINK")
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
