"""The notebook: saved without outputs, and run from top to bottom with known results."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import struct
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.polynomial import Polynomial

from advisor.tutorial.notebooks import noise, pipelining, splitting, summing, updating
from engines.runtime.steps import WARM_UP_STEPS
from tests.advisor.tutorial.facts import facts, failures
from tests.workers import Pool

nbformat = pytest.importorskip("nbformat", reason="pip install 'parallel-advisor[test]'")
pytest.importorskip("ipykernel", reason="pip install 'parallel-advisor[test]'")
pytest.importorskip("matplotlib", reason="pip install 'parallel-advisor[plots]'")

ROOT = Path(__file__).resolve().parents[3]
NOTEBOOK = ROOT / "advisor" / "tutorial" / "notebooks" / "parallel_training.ipynb"
CELL_S, WHOLE_S = 150.0, 300.0  # it takes 50 s; a machine that is busy may take longer
LEAVING_S = 10.0
LONGEST_CELL = 20  # lines; more belongs into a lesson's module
Results = dict[str, Any]


def test_the_notebook_is_saved_without_outputs_and_with_tidy_metadata() -> None:
    """Outputs are one reader's numbers, and a difference in every commit."""
    notebook = nbformat.read(NOTEBOOK, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert notebook.metadata == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        assert cell.metadata == {}
        assert len(cell.source.splitlines()) <= LONGEST_CELL, cell.id
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.dist
def test_the_cells_of_the_notebook_have_known_results(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after another in this process, their ranks in kept pools; what is timed, and compared
    with nothing, is timed less often."""
    more = Pool(8)

    def on_kept_ranks(function: Callable[..., Any], *args: Any, ranks: int) -> list[Any]:
        job = pool if ranks <= pool.size else more
        return job.run(in_short, function, *args, world_size=ranks, timeout_s=CELL_S)

    shown: list[Any] = []
    monkeypatch.setattr("advisor.tutorial.notebooks.ranks.on_ranks", on_kept_ranks)
    names: dict[str, Any] = {"display": shown.append, "__name__": "__main__"}
    with shortened(), contextlib.closing(more):
        for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
            if cell.cell_type == "code":
                source = cell.source.replace("[1, 2, 4, 8, 16]", "[1, 4, 16]")
                exec(compile(source, cell.id, "exec"), names)  # noqa: S102, it is our notebook
        known_results_come_out(json.loads(json.dumps(facts(names))))
    all_pictures_are_there([picture._repr_png_() for picture in shown])


def in_short(function: Callable[..., Any], *args: Any) -> Any:
    """On a rank."""
    with shortened():
        return function(*args)


@contextlib.contextmanager
def shortened() -> Iterator[None]:
    """Fewer steps, sums and seconds of a bench."""
    with (
        mock.patch.multiple(splitting, BENCH_S=0.5, STEPS=3),
        mock.patch.multiple(pipelining, STEPS=3, REPEATS=5),
        mock.patch.multiple(summing, SIZES=summing.SIZES[:3], REPEATS=1, SMALL_REPEATS=1),
        mock.patch("profiles.machine.bench.collectives.COMPUTED_EDGE", 64),
    ):
        yield


@pytest.mark.slow
@pytest.mark.nightly
def test_the_notebook_runs_with_known_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = uuid.uuid4().hex
    results, pictures, streams = _run(tmp_path, monkeypatch, marker)
    assert results["python"] == sys.executable
    known_results_come_out(results)
    a_rank_that_fails_is_named(*results["failures"])
    all_pictures_are_there(pictures)
    # The first picture of an environment may have matplotlib say that it looks at fonts.
    assert not [text for name, text in streams if name == "stderr" and "font cache" not in text]
    assert results["left"] == []
    assert _left_after_a_moment(marker) == []


def test_a_rank_of_the_notebook_that_fails_is_named() -> None:
    a_rank_that_fails_is_named(*failures())


def all_pictures_are_there(pictures: list[bytes]) -> None:
    assert len(pictures) == 9
    assert all(width >= 1000 and height >= 250 for width, height in map(_size, pictures))


def known_results_come_out(results: Results) -> None:
    assert results["ranks of the machine"] == 2
    the_way_of_splitting_does_not_change_the_training(results["ways"])
    memory_and_traffic_of_a_rank_are_its_share(results["ways"])
    every_rank_ends_with_the_whole_sum(results["ring"])
    the_busiest_link_carries_the_bytes_of_the_formulas(results["carried"])
    bubbles_are_those_of_the_papers(results)
    split_sizes_cut_the_batch_into_as_many_pieces(results["split sizes"])
    stale_descent_ends_where_the_roots_leave_the_circle(results["limits"], results["curves"])
    waiting_keeps_gradients_fresh(results)
    rarer_synchronization_sends_proportionally_less(results["local"])
    the_noise_scale_is_the_true_one_and_predicts_the_steps(results)
    assert results["devices"] == [2, 16]


def the_way_of_splitting_does_not_change_the_training(ways: Results) -> None:
    """Compare with a plain training loop in torch."""
    torch.manual_seed(0)
    model, (tokens, targets), loss_fn = splitting.small_gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(WARM_UP_STEPS + splitting.STEPS):
        optimizer.zero_grad()
        loss = loss_fn(model(tokens), targets)
        loss.backward()
        optimizer.step()
    for name, way in ways.items():
        assert way["losses"] == pytest.approx([loss.item()] * 2, abs=1e-4), name
        assert way["steps"] == splitting.STEPS
        assert all(one <= other for one, other in pairwise([0.0, *way["range"]]))


def memory_and_traffic_of_a_rank_are_its_share(ways: Results) -> None:
    """The tied head is on the first and on the last stage."""
    shape = splitting.SHAPE
    whole, tied = 4 * shape.parameters, 4 * shape.vocab_size * shape.width
    assert ways["data"]["resident"] == [whole, whole]
    assert ways["data"]["sent"] == pytest.approx(2 * (2 - 1) / 2 * whole, rel=1e-3)
    for name in ("pipeline, one at a time", "pipeline, 1F1B"):
        assert sum(ways[name]["resident"]) == whole + tied
    assert sum(ways["tensor"]["resident"]) < 1.1 * whole


def every_rank_ends_with_the_whole_sum(ring: list[list[list[int]]]) -> None:
    """A round adds one rank's number or copies the sum; 2 (n - 1) of them."""
    for rank, moments in enumerate(ring):
        assert len(moments) == 1 + 2 * (4 - 1)
        assert moments[0] == [10**rank] * 4
        assert moments[-1] == [1111] * 4
        for number, (before, after) in enumerate(pairwise(moments), start=1):
            (changed,) = [part for part in range(4) if before[part] != after[part]]
            assert str(after[changed]).count("1") == min(1 + number, 4)


def the_busiest_link_carries_the_bytes_of_the_formulas(carried: dict[str, list[float]]) -> None:
    assert carried["ring"] == [2 * (n - 1) / n for n in range(2, 9)]
    assert carried["parameter device"] == [2 * (n - 1) for n in range(2, 9)]


def bubbles_are_those_of_the_papers(results: Results) -> None:
    """Whatever a block takes: 1 - 1/p, and (p - 1) / (m + p - 1). Zero-bubble's round is that of
    ZB-H1 (arXiv:2401.10241, table 1) where the half for weights is the shorter one."""
    bubbles, (forward_s, input_s, weight_s) = results["bubbles"], results["block"]
    assert bubbles["naive"] == pytest.approx(1 - 1 / 4)
    assert bubbles["gpipe"] == pytest.approx(3 / (8 + 3))
    assert bubbles["1f1b"] == pytest.approx(3 / (8 + 3))
    assert 0 < bubbles["zero_bubble"] <= bubbles["1f1b"] * (1 + 1e-9)
    if 0 < weight_s <= min(forward_s, input_s):
        idle_s = 3 * (forward_s + input_s - weight_s)
        busy_s = 8 * (forward_s + input_s + weight_s)
        assert results["walls"]["zero_bubble"] == pytest.approx(busy_s + idle_s)


def split_sizes_cut_the_batch_into_as_many_pieces(points: list[list[float]]) -> None:
    assert all(size * pieces == splitting.BATCH for size, pieces, _ in points)
    assert all(seconds > 0 for *_, seconds in points)


def stale_descent_ends_where_the_roots_leave_the_circle(
    limits: list[float], curves: list[list[float]]
) -> None:
    """x' = x - a x(-d): the roots of z^(d+1) - z^d + a are inside the unit circle below the rate
    that was found and outside above it."""

    def radius(rate: float, age: int) -> float:
        coefficients = [rate, *[0.0] * age, 1.0]
        coefficients[age] -= 1.0
        return float(abs(Polynomial(coefficients).roots()).max())

    for age, limit in enumerate(limits):
        assert radius(limit - 0.015, age) < 1 < radius(limit + 0.015, age)
    fresh, _, stale = curves
    assert fresh == pytest.approx([0.5 * 0.7 ** (2 * n) for n in range(61)])
    assert max(stale[-20:]) > 10 * max(stale[:20]) / 2


def waiting_keeps_gradients_fresh(results: Results) -> None:
    """Three workers of 48 steps each; a step that all wait for is as long as the pause at least."""
    (updates, oldest), (others, stale) = results["ages"]
    assert updates == others == 3 * updating.STEPS
    assert oldest == 0 < stale
    assert results["worker's seconds"] >= updating.STEPS * 0.02
    assert max(results["worker's losses"]) < updating.above_optimum(torch.zeros(16)) / 10


def rarer_synchronization_sends_proportionally_less(local: dict[str, list[float]]) -> None:
    """16 weights in fp32 are sent at every synchronization; the loss falls in any case."""
    for every, (sent, loss) in local.items():
        assert sent == updating.STEPS // int(every) * 16 * 4
        assert loss < updating.above_optimum(torch.zeros(16)) / 10


def the_noise_scale_is_the_true_one_and_predicts_the_steps(results: Results) -> None:
    """Compare steps to the target with the exact recursion for mean and variance: x' = (1 - a l)
    x and v' = (1 - a l)^2 v + a^2 s / B. The fewest are those of an endless batch; at the critical
    batch they are twice that (McCandlish et al. 2018, section 2.2)."""
    measured = results["critical batch"]
    assert measured == pytest.approx(noise.TRUE_CRITICAL_BATCH, rel=0.1)

    def steps(batch: float) -> int:
        rate = 1 / (1 + measured / batch)
        curvature = np.logspace(0, 1, noise.DIMENSIONS, base=noise.FLATTEST)
        mean, variance = 1 / curvature, np.zeros(noise.DIMENSIONS)
        start = float((curvature * mean**2).sum())
        for taken in range(1, noise.MOST_STEPS):
            keep = 1 - rate * curvature
            mean, variance = keep * mean, keep**2 * variance
            variance += rate**2 * noise.TRUE_CRITICAL_BATCH / batch
            if (curvature * (mean**2 + variance)).sum() <= noise.TARGET * start:
                return taken
        raise AssertionError("it does not get there")

    for size, taken in results["steps"].items():
        assert taken == pytest.approx(steps(float(size)), rel=0.2)
    assert results["steps"]["32"] == pytest.approx(2 * steps(1e9), rel=0.2)


def a_rank_that_fails_is_named(raised: str, died: str, slept: str) -> None:
    assert raised.startswith("rank 1 failed")
    assert "ValueError: this rank has had enough" in raised
    assert died.startswith("rank 0 failed")
    assert "rank 0: a last word" in died
    # The other one waits for it, and may give up first.
    waited, *_ = slept.splitlines()
    assert waited in (
        "rank 0 failed, rank 1 did not end within 3 s",
        "ranks 0, 1 did not end within 3 s",
    )


def _run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, marker: str
) -> tuple[Results, list[bytes], list[tuple[str, str]]]:
    """Run the notebook and return its facts, pictures and prints. The kernel is the Python of this
    environment; kernels that are installed elsewhere are ignored."""
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder))
    book = nbformat.read(NOTEBOOK, as_version=4)
    book.cells.append(
        nbformat.v4.new_code_cell(
            "import json\n"
            "from tests.advisor.tutorial.facts import facts, failures\n"
            "print(json.dumps(facts(globals()) | {'failures': failures()}))"
        )
    )
    manager = AsyncKernelManager(
        kernel_name="python3",
        kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
        transport="ipc",
        ip=str(folder / "kernel"),
    )
    client = NotebookClient(
        book, km=manager, timeout=CELL_S, resources={"metadata": {"path": str(folder)}}
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "IPYTHONDIR": str(folder),
        "NOTEBOOK_TEST": marker,
    }

    async def run() -> None:
        await asyncio.wait_for(client.async_execute(cleanup_kc=True, env=environment), WHOLE_S)

    asyncio.run(run())
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    streams = [(o.name, o.text) for o in outputs if o.output_type == "stream"]
    pictures = [
        base64.b64decode(o.data["image/png"])
        for o in outputs
        if o.output_type == "display_data" and "image/png" in o.data
    ]
    return json.loads(streams[-1][1]), pictures, streams


def _size(png: bytes) -> tuple[int, int]:
    """Return width and height, from the header."""
    assert png.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def _left_after_a_moment(marker: str) -> list[str]:
    """List processes left after a moment, in which those of the ended kernel may end."""
    deadline = time.monotonic() + LEAVING_S
    while (pids := _left(marker)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return pids


def _left(marker: str) -> list[str]:
    """List processes with the marker in their environment, which the kernel started and left."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue
        if marker.encode() in environment:
            pids.append(folder.name)
    return pids
