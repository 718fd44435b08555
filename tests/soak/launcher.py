"""torchrun's agent, with ranks forked from a process that imported everything before.

    python -m tests.soak.launcher FOLDER --plan "dp_shard=4" --steps 300 --save-every 10

torchrun starts an interpreter for each rank, and an attempt on four ranks takes two cores fifteen
seconds to import torch. The agent, its store and its restarts are the same here.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import uuid
from pathlib import Path

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from engines.plan import Plan
from tests.soak.training import train
from tests.workers import IMPORTED


def main() -> None:
    """Start the ranks of a plan, and start them again when one is lost."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plan", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    given = parser.parse_args()
    multiprocessing.set_forkserver_preload([*IMPORTED, "tests.soak.training"])
    os.environ["TMPDIR"] = str(given.folder)  # the agent leaves logs there
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=Plan.parse(given.plan).world_size,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=1000,
        start_method="forkserver",
    )
    elastic_launch(config, train)(given.folder, given.plan, given.steps, given.save_every)


if __name__ == "__main__":
    main()
