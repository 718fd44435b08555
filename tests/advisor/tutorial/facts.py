"""Results of the notebook's cells, in plain values; it runs in the notebook's own kernel."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from advisor.tutorial.notebooks.ranks import on_ranks
from profiles.errors import RankError


def facts(cells: Mapping[str, Any]) -> dict[str, Any]:
    """`cells` are the global names of the notebook."""
    synchronous, asynchronous = cells["synchronous"], cells["asynchronous"]
    return {
        "python": sys.executable,
        "ranks of the machine": cells["machine"].world_size,
        "ways": {
            name: {
                "losses": [rank.loss for rank in ranks],
                "resident": [rank.parameter_bytes for rank in ranks],
                "sent": ranks[0].sent_bytes,
                "steps": ranks[0].measured.repeats,
                "range": [ranks[0].low_s, ranks[0].predicted_s, ranks[0].high_s],
            }
            for name, ranks in cells["ways"].items()
        },
        "ring": [[moment.values for moment in rank] for rank in cells["moments"]],
        "carried": {name: list(line.values()) for name, line in cells["carried"].items()},
        "seconds": cells["seconds"],
        "block": [cells["block"].forward_s, cells["block"].input_s, cells["block"].weight_s],
        "bubbles": {name: drawn.bubble for name, drawn in cells["played"].items()},
        "walls": {name: drawn.wall_s for name, drawn in cells["played"].items()},
        "split sizes": [
            [point.value, point.plan.microbatches, point.measured.median_s]
            for point in cells["sweep"].points
        ],
        "curves": list(cells["curves"].values()),
        "limits": [tried for _, tried in cells["limits"].values()],
        "ages": [
            [run.report.updates, run.report.most_staleness]
            for run in (synchronous[0], asynchronous[0])
        ],
        "worker's seconds": synchronous[1].seconds[-1],
        "worker's losses": [synchronous[1].losses[-1], asynchronous[1].losses[-1]],
        "local": {
            every: [runs[0].report.sent_bytes, runs[0].losses[-1]]
            for every, runs in cells["local"].items()
        },
        "critical batch": cells["measured"][-1],
        "steps": {size: len(losses) - 1 for size, losses in cells["falls"].items()},
        "devices": [cells["here"].plan.world_size, cells["there"].plan.world_size],
        "left": [process.pid for process in multiprocessing.active_children()],
    }


def failures() -> list[str]:
    """Errors of ranks that raise, die, and sleep."""
    return [_failure(_raises), _failure(_dies), _failure(_sleeps, timeout_s=3.0)]


def _failure(function: Callable[[], None], timeout_s: float = 20.0) -> str:
    try:
        on_ranks(function, ranks=2, timeout_s=timeout_s)
    except RankError as error:
        return str(error)
    return "nothing failed"


def _raises() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("this rank has had enough")


def _dies() -> None:
    if os.environ["RANK"] == "0":
        os.write(2, b"a last word")
        os._exit(3)


def _sleeps() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(60)
