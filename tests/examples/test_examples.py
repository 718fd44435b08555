"""Each example on two ranks, beside the same script in one process."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

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
OFTEN = (
    ("plain_loop", "dp_shard=2"),
    ("hugging_face_loop", "tp=2"),
    ("fit_and_resume", "pp=2"),
    ("lightning_style", None),
    ("mp_spawn", "dp_replicate=2"),
)
SELDOM = (
    *(("plain_loop", plan) for plan in ("dp_replicate=2", "tp=2")),
    *(("hugging_face_loop", plan) for plan in ("dp_replicate=2", "dp_shard=2")),
    *(("fit_and_resume", plan) for plan in ("dp_replicate=2", "dp_shard=2", "tp=2")),
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


def _words(name: str, plan: str | None, folder: Path) -> list[str]:
    words = [str(folder / "run")] * (name == "fit_and_resume") + [plan] * (plan is not None)
    return [str(FOLDER / f"{name}.py"), *words]


def loss_started(name: str, plan: str | None, folder: Path) -> float:
    """The loss that an example prints where a user starts it: under torchrun, unless it starts its
    ranks itself."""
    words, module = _words(name, plan, folder), "torch.distributed.run"
    if name == "mp_spawn":
        words, module = words[1:], f"tests.examples.{name}"
    else:
        words = ["--standalone", "--nproc-per-node", "2", *words]
    with Launched(words, module=module, log=folder / "log") as job:
        assert job.wait(LIMIT_S) == 0, job.tail()
        return _loss((folder / "log").read_text())


def _printed(words: list[str]) -> str:
    with mock.patch.object(sys, "argv", words), contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(words[0], run_name="__main__")
    return out.getvalue()


def _loss(text: str) -> float:
    losses = re.findall(r"^loss (\d+\.\d+)", text, re.MULTILINE)
    assert len(set(losses)) == 1, text
    return float(losses[0])


def _is_that_of_one_process(name: str, loss: float) -> bool:
    """Six digits are printed; some steps of Adam enlarge what sums in another order round."""
    return loss == pytest.approx(ALONE[name](), rel=1e-3)


@pytest.mark.dist
@pytest.mark.parametrize(("name", "plan"), [each for each in OFTEN if each[0] != "mp_spawn"])
def test_an_example_trains_like_one_process(
    pool: Pool, tmp_path: Path, name: str, plan: str | None
) -> None:
    pool.run(_time_links, world_size=2)
    printed = pool.run(_printed, _words(name, plan, tmp_path), world_size=2)
    assert _is_that_of_one_process(name, _loss("".join(printed)))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "plan"), [("mp_spawn", "dp_replicate=2"), *nightly(*SELDOM, *OFTEN[:-1])]
)
def test_an_example_trains_alike_where_a_user_starts_it(
    pool: Pool, tmp_path: Path, name: str, plan: str | None
) -> None:
    pool.run(_time_links, world_size=2)
    assert _is_that_of_one_process(name, loss_started(name, plan, tmp_path))


def test_every_example_is_run() -> None:
    scripts = {path.stem for path in FOLDER.glob("*.py")} - {"__init__", "test_examples"}
    assert scripts == set(ALONE) == {name for name, _ in OFTEN}
