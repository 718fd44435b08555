"""A restarted job meets anew: what an earlier attempt left in the launcher's store is ignored."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from engines.runtime.rendezvous import agreed_name
from profiles.errors import RankError
from tests.launching import Launched
from tests.nightly import nightly


def names(store: dist.Store, size: int, *, seed: int) -> list[str]:
    """The names that `size` ranks agree on, which come in a random order."""
    agreed: dict[int, str] = {}
    delays = random.Random(seed)

    def join(rank: int, delay_s: float) -> None:
        time.sleep(delay_s)
        agreed[rank] = agreed_name(store, rank, size, timeout_s=20.0)

    threads = [
        threading.Thread(target=join, args=(rank, delays.uniform(0, 0.05))) for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return [agreed[rank] for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_ranks_of_one_attempt_agree_and_those_of_the_next_have_another_name(size: int) -> None:
    store = dist.HashStore()
    attempts = [names(store, size, seed=seed) for seed in range(4)]
    assert all(len(set(attempt)) == 1 for attempt in attempts)
    assert len({attempt[0] for attempt in attempts}) == 4


def test_a_rank_that_died_while_it_joined_leaves_nothing_that_the_next_attempt_takes() -> None:
    """Every rank but the first had said its name; one had the answer too, one not yet."""
    store = dist.HashStore()
    for rank, name in ((1, "dead1"), (2, "dead2")):
        store.set(f"advisor/join/{rank}", name)
    store.set("advisor/attempt/dead1", "dead0")
    store.set("advisor/joined/dead0/1", "")
    first, *others = names(store, 3, seed=1)
    assert others == [first, first]
    assert "dead" not in first


def test_the_first_rank_names_those_that_did_not_come() -> None:
    store = dist.HashStore()
    store.set("advisor/join/1", "dead")
    with pytest.raises(RankError, match=r"of 3 ranks these did not come within 0 s: 1, 2"):
        agreed_name(store, 0, 3, timeout_s=0.05)


def test_another_rank_names_the_first_where_that_did_not_come() -> None:
    with pytest.raises(RankError, match="rank 0 did not come within 0 s"):
        agreed_name(dist.HashStore(), 2, 3, timeout_s=0.05)


# A rank is killed in each attempt but the last; what it published must not reach the next one.
PROGRAM = """
import os, random, signal, sys
import torch
import torch.distributed as dist
from engines.runtime.failures import first_failure, publish_failure
from engines.runtime.world import join_world, leave_world, require_same

attempt, restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(sys.argv[1])
world = join_world(timeout_s=60)
assert first_failure() == "", first_failure()
require_same("attempt", f"{attempt} of the test", world)
half = dist.new_group([0, 1]) if world.size > 2 else None
draw = random.Random(attempt)
victim, when = draw.randrange(world.size), draw.randrange(10)
values = torch.ones(8)
for step in range(10):
    if attempt < restarts and (world.rank, step) == (victim, when):
        publish_failure(f"rank {victim} failed in attempt {attempt}")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(values)
    values /= world.size
    if half is not None and world.rank < 2:
        dist.all_reduce(values, group=half)
        values /= 2
with open(f"{sys.argv[2]}.{world.rank}", "w") as file:
    file.write(f"{attempt} {values.sum().item()}")
leave_world()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "restarts"), [(2, 1), *nightly((2, 2), (4, 1))])
def test_a_job_whose_ranks_are_killed_comes_back_under_plain_torchrun(
    tmp_path: Path, ranks: int, restarts: int
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    words = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    words += [str(program), str(restarts), str(tmp_path / "done")]
    with Launched(words, log=tmp_path / "log") as launched:
        assert launched.wait(timeout_s=200) == 0, launched.tail()
    for rank in range(ranks):
        assert (tmp_path / f"done.{rank}").read_text() == f"{restarts} 8.0"


# Its listening sockets, as (address, port) in the kernel's hexadecimal; 0100007F is 127.0.0.1.
LISTENING = """
import os
import sys
from pathlib import Path

import torch.distributed as dist

from engines.runtime.world import join_world, leave_world

world = join_world(timeout_s=60)
dist.barrier()  # the other rank may still connect
own = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
for table in ("tcp", "tcp6"):
    for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in own:
            with open(f"{sys.argv[1]}.{world.rank}", "a") as file:
                file.write(words[1].partition(":")[0] + "\\n")
leave_world()
"""


def test_ranks_of_one_node_listen_on_its_loopback_address_alone(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(LISTENING)
    words = ["run", "--nproc-per-node", "2", str(program), str(tmp_path / "sockets")]
    with Launched(words, module="advisor", log=tmp_path / "log") as launched:
        assert launched.wait(timeout_s=120) == 0, launched.tail()
    for rank in range(2):
        sockets = (tmp_path / f"sockets.{rank}").read_text().split()
        assert set(sockets) == {"0100007F"}
    assert len((tmp_path / "sockets.0").read_text().split()) >= 2  # the store, and gloo
