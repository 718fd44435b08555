"""Each example as a user starts it, beside the same script in one process."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from profiles.machine.bench import bench, recall_or_bench
from profiles.machine.launcher import Launcher
from profiles.machine.probe import probe
from tests.examples import (
    fit_and_resume,
    hugging_face_loop,
    lightning_style,
    mp_spawn,
    plain_loop,
)
from tests.launching import Launched
from tests.nightly import nightly
from tests.workers import Pool

FOLDER = Path(__file__).parent
LIMIT_S = 90.0
BENCH_S = 0.5
"""Of the twenty seconds that a user's first job takes to time its links."""

ALONE: dict[str, Callable[[], float]] = {
    "plain_loop": lambda: plain_loop.main()[0],
    "hugging_face_loop": hugging_face_loop.main,
    "fit_and_resume": lambda: fit_and_resume.main(tempfile.mkdtemp()),
    "lightning_style": lightning_style.main,
    "mp_spawn": lambda: mp_spawn.train(0, 1, None),
}
PLANS = ("dp_replicate=2", "dp_shard=2", "tp=2", "pp=2")
WITHOUT_STAGES = PLANS[:-1]
OFTEN = (
    ("plain_loop", "dp_shard=2"),
    ("hugging_face_loop", "tp=2"),
    ("fit_and_resume", "pp=2"),
    ("lightning_style", None),
    ("mp_spawn", "dp_replicate=2"),
)
ALL = (
    *(("plain_loop", plan) for plan in WITHOUT_STAGES),
    *(("hugging_face_loop", plan) for plan in WITHOUT_STAGES),
    *(("fit_and_resume", plan) for plan in PLANS),
    *(("lightning_style", plan) for plan in ("dp_replicate=2", "dp_shard=2")),
    *(("mp_spawn", plan) for plan in ("dp_shard=2", "tp=2")),
)


def _time_links() -> None:
    import torch.distributed as dist

    rank, usual = dist.get_rank(), bench.__kwdefaults__["budget_s"]
    bench.__kwdefaults__["budget_s"] = BENCH_S
    try:
        recall_or_bench(probe(launcher=Launcher("torchrun", rank, 2, rank, 2, 1)))
    finally:
        bench.__kwdefaults__["budget_s"] = usual


def loss_of(name: str, plan: str | None, *, folder: Path) -> float:
    """The loss that an example prints; under torchrun, unless it starts its ranks itself."""
    words = [str(folder / "run")] * (name == "fit_and_resume") + [plan] * (plan is not None)
    log, module = folder / "log", "torch.distributed.run"
    if name == "mp_spawn":
        module = f"tests.examples.{name}"
    else:
        ranks = ("--standalone", "--nproc-per-node", "2")
        words = [*ranks, str(FOLDER / f"{name}.py"), *words]
    with Launched(words, module=module, log=log) as job:
        assert job.wait(LIMIT_S) == 0, job.tail()
    losses = re.findall(r"^loss (\d+\.\d+)", log.read_text(), re.MULTILINE)
    assert len(set(losses)) == 1, job.tail()
    return float(losses[0])


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "plan"), [*OFTEN, *nightly(*(each for each in ALL if each not in OFTEN))]
)
def test_an_example_trains_like_one_process(
    pool: Pool, tmp_path: Path, name: str, plan: str | None
) -> None:
    pool.run(_time_links, world_size=2)
    # Six digits are printed; some steps of Adam enlarge what sums in another order round.
    assert loss_of(name, plan, folder=tmp_path) == pytest.approx(ALONE[name](), rel=1e-3)


def test_every_example_is_run() -> None:
    scripts = {path.stem for path in FOLDER.glob("*.py")} - {"__init__", "test_examples"}
    assert scripts == set(ALONE) == {name for name, _ in OFTEN}
