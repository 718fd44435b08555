"""The line through timings, against known lines and published curves; a real two-rank bench."""

from __future__ import annotations

import csv
import logging
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from profiles.capture.capture import capture
from profiles.errors import InputError, RankError
from profiles.machine.bench import (
    bench,
    collectives,
    copy_rate,
    matmul_rate,
    measure,
    recall_or_bench,
)
from profiles.machine.bench import device as device_bench
from profiles.machine.bench.axes import MOST_GROUPS, BenchAxis, mesh_axes
from profiles.machine.bench.cache import keep, recall
from profiles.machine.bench.job import joined
from profiles.machine.bench.small_step import KERNELS, SmallModel, small_input, small_step
from profiles.machine.cluster import ClusterProfile, Collective
from profiles.machine.launcher import Launcher
from profiles.machine.link_fit import fit
from profiles.machine.probe import probe
from profiles.model.profile import Numerics
from profiles.provenance import Source, Timing
from profiles.units import KIB, MIB
from tests.workers import Pool, RankFailure

SIZES = [KIB * 4**power for power in range(9)]  # 1 KiB to 64 MiB


@pytest.mark.parametrize(("latency_s", "bandwidth"), [(20e-6, 40e9), (3e-3, 1e8), (0.0, 5e9)])
def test_an_exact_line_is_fitted(latency_s: float, bandwidth: float) -> None:
    fitted = fit([(float(size), latency_s + size / bandwidth) for size in SIZES])
    assert fitted.latency_s == pytest.approx(latency_s, abs=1e-12, rel=1e-6)
    assert fitted.busbw_bytes_per_s == pytest.approx(bandwidth, rel=1e-6)
    assert fitted.relative_residual == pytest.approx(0, abs=1e-6)


def test_noise_and_two_disturbed_sizes_move_the_line_little() -> None:
    noise = random.Random(7)
    points = [
        (float(size), (300e-6 + size / 1e9) * noise.uniform(0.95, 1.05))
        for size in (KIB * 2**power for power in range(17))
    ]
    for spoiled in (3, 9):  # another process took the cores
        size, seconds = points[spoiled]
        points[spoiled] = (size, 6 * seconds)
    fitted = fit(points)
    assert fitted.latency_s == pytest.approx(300e-6, rel=0.1)
    assert fitted.busbw_bytes_per_s == pytest.approx(1e9, rel=0.1)
    assert fitted.relative_residual < 0.1  # 15 of 17 sizes are within 5 % of the true line


def test_times_that_fall_with_size_still_give_a_bandwidth() -> None:
    fitted = fit([(1024.0, 2e-3), (4096.0, 1.5e-3), (16384.0, 1e-3)])
    assert fitted.busbw_bytes_per_s == pytest.approx(16384 / 1e-3)  # the largest message's


def test_times_that_fall_with_size_are_the_latency() -> None:
    """Ranks that share cores come milliseconds apart, whatever they send."""
    assert fit([(1024.0, 2e-3), (4096.0, 2e-3), (16384.0, 2e-3)]).latency_s == pytest.approx(2e-3)
    assert 1e-3 < fit([(1024.0, 2e-3), (4096.0, 1.5e-3), (16384.0, 1e-3)]).latency_s < 2e-3


@pytest.mark.parametrize(
    "points", [[], [(1.0, 1.0)], [(1.0, 1.0), (1.0, 2.0)], [(1.0, 0.0), (2.0, 1.0)]]
)
def test_one_size_or_no_time_has_no_line(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="two sizes"):
        fit(points)


def test_published_curves_are_fitted_to_their_plateaus(shared: Path) -> None:
    curves: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    with (shared / "data/hardware/interconnect_measured.csv").open(newline="") as stream:
        for row in csv.DictReader(stream):
            if row["collective"] in list(Collective) and row["payload_bytes"]:
                key = (row["system"], row["collective"], row["algo"], row["n_gpus"])
                point = (float(row["payload_bytes"]), float(row["busbw_GBps"]) * 1e9)
                curves.setdefault(key, []).append(point)
    checked = 0
    for (system, kind, _, ranks), curve in curves.items():
        factor = Collective(kind).bus_factor(int(ranks)) if ranks else 0.0
        timings = [(size * factor, size * factor / busbw) for size, busbw in curve]
        if len(curve) < 8:
            continue
        fitted = fit(timings)
        largest, plateau = max(curve)
        # All that the cost model asks of a fit: the time of a large message.
        predicted = fitted.latency_s + largest * factor / fitted.busbw_bytes_per_s
        assert predicted == pytest.approx(largest * factor / plateau, rel=0.15), (system, kind)
        if fitted.latency_s < 0.02 * predicted:  # the curve has levelled off
            assert fitted.busbw_bytes_per_s == pytest.approx(plateau, rel=0.1), (system, kind)
            checked += 1
    assert checked >= 10  # all NVSwitch nodes, most of the network and MI200 curves


def test_axes_are_those_of_every_mesh_of_two() -> None:
    # By hand for 12 ranks: every divisor as the inner axis, what is left as the outer one.
    inner = {(2, 1), (3, 1), (4, 1), (6, 1), (12, 1)}
    outer = {(6, 2), (4, 3), (3, 4), (2, 6)}
    axes = mesh_axes(num_nodes=3, devices_per_node=4)
    assert {(axis.size, axis.stride) for axis in axes} == inner | outer
    assert axes[:3] == [
        BenchAxis(4, 1),
        BenchAxis(3, 4),
        BenchAxis(12, 1),
    ]  # the tiers and the world first
    for axis in axes:
        ranks = sorted(rank for group in axis.groups(12) for rank in group)
        assert ranks == list(range(12))


def test_a_large_job_times_what_its_groups_allow_but_always_the_tiers() -> None:
    axes = mesh_axes(num_nodes=512, devices_per_node=8)
    assert {BenchAxis(8, 1), BenchAxis(512, 8), BenchAxis(4096, 1)} <= set(axes)
    others = set(axes) - {BenchAxis(8, 1), BenchAxis(512, 8), BenchAxis(4096, 1)}
    assert sum(4096 // axis.size for axis in others) <= MOST_GROUPS


def test_products_are_timed_on_values_as_different_as_those_of_a_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU at its power limit multiplies ones faster. The caller's random numbers stay."""
    factors: list[torch.Tensor] = []
    monkeypatch.setattr(device_bench, "large_edge", lambda _: 16)
    monkeypatch.setattr(device_bench, "SAMPLE_S", 1e-6)
    monkeypatch.setattr(torch, "mm", lambda left, right, out: factors.extend((left, right)))
    before = torch.get_rng_state()
    matmul_rate(torch.device("cpu"), torch.bfloat16, seconds=0.0)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(len(factor.unique()) > 100 for factor in factors)
    assert all(abs(factor.float().std().item() - 1) < 0.2 for factor in factors)


@pytest.mark.timed
def test_rates_are_those_of_an_independent_count() -> None:
    """A product of n x n is n^2 sums of n multiply-adds; a copy reads and writes each byte."""
    size = 768
    left, result = torch.ones(size, size), torch.empty(size, size)
    times = []
    for _ in range(9):
        begin = time.perf_counter()
        torch.mm(left, left, out=result)
        times.append(time.perf_counter() - begin)
    by_hand = size * size * (2 * size) / min(times)
    assert 0.2 * by_hand < matmul_rate(torch.device("cpu"), torch.float32) < 1.5 * by_hand
    source = torch.zeros(64 * MIB, dtype=torch.uint8)
    target = torch.zeros_like(source)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - begin)
    by_hand = 2 * 64 * MIB / min(times)
    assert 0.2 * by_hand < copy_rate(torch.device("cpu")) < 1.5 * by_hand


def test_a_range_holds_the_medians_of_rounds_and_not_what_is_within_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Samples of ranks that share cores differ by half; a step takes many of them."""
    launches = iter((1.0, 1.2, 1.1))

    def timing(*_: object, seconds: float, fewest: int = 3) -> Timing:
        return Timing(median_s=1.0, low_s=0.5, high_s=1.5, repeats=9)

    def launching(*_: object, seconds: float) -> Timing:
        median_s = next(launches) * KERNELS
        return Timing(median_s=median_s, low_s=0.5 * KERNELS, high_s=9.0 * KERNELS, repeats=9)

    for name in ("matmul_timing", "copy_timing"):
        monkeypatch.setattr(device_bench, name, timing)
    monkeypatch.setattr(device_bench, "launch_timing", launching)
    with joined(patience_s=5.0) as job:
        timed = device_bench.timed_device(job, probe().device, budget_s=1.0)
    assert timed.launch_s.value == pytest.approx(1.1)
    assert timed.launch_s.low == pytest.approx(1.0)
    assert timed.launch_s.high == pytest.approx(1.2)
    assert timed.memory_bandwidth_bytes_per_s.relative_error == 0
    assert timed.flop_per_s["float32"].relative_error == 0


def test_a_launch_is_timed_over_the_kernels_that_a_profile_counts() -> None:
    """Seconds of a step over a count, and later that count times the seconds, is the step."""
    profile = capture(SmallModel(), small_input(), every_block=True)
    costs = [unit.cost(Numerics.AS_BUILT) for unit in profile.units]
    assert sum(cost.forward_kernels + cost.backward_kernels for cost in costs) == KERNELS


def test_timing_a_launch_leaves_the_draws_of_a_training_as_they_are() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with torch.no_grad():  # whatever the caller does
        small_step(torch.device("cpu"))()
    assert torch.equal(torch.rand(2), expected)


def test_without_a_process_group_the_bench_says_how_to_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)  # whatever ran in this process
    with pytest.raises(InputError) as caught:
        bench(probe(launcher=Launcher("plain"), ranks=2))
    assert "the bench needs a process group" in str(caught.value)
    assert "torchrun --nproc-per-node" in str(caught.value)


def time_and_recall(folder: Path) -> list[bool]:
    """On a rank: a bench left in `folder`, and what is right about keeping it."""
    rank = dist.get_rank()
    cluster = probe()
    # The four ranks of this machine as two nodes of two: both tiers, and groups across them.
    cluster = cluster.model_copy(
        update={"num_nodes": 2, "devices_per_node": 2, "inter": cluster.intra}
    )
    lines: list[str] = []
    (folder / f"before{rank}.json").write_text(cluster.to_json())
    # What is computed between messages takes most of a bench.
    with mock.patch.object(collectives, "COMPUTED_EDGE", 64):
        timed = bench(cluster, budget_s=2, max_bytes=4 * MIB, tell=lines.append)
    (folder / f"{rank}.json").write_text(timed.to_json())
    (folder / f"lines{rank}.txt").write_text("\n".join(lines))
    try:
        bench(cluster.model_copy(update={"num_nodes": 3}))
    except InputError as error:
        (folder / f"refused{rank}.txt").write_text(str(error))

    # Only rank 0 has the folder in which benches are kept; all have to take the same way.
    mine = folder / "kept" if rank == 0 else folder / "nowhere"

    def recalled(cluster: ClusterProfile) -> ClusterProfile | None:
        saved = recall(cluster, folder=mine)
        return saved.cluster if saved else None

    right = [recalled(cluster) is None]
    keep(timed, folder=mine)
    right.append(recalled(cluster) == timed)
    notes: list[str] = []
    again = recall_or_bench(cluster, folder=mine, note=notes.append)
    right += [again == timed, len(notes) == 1 and notes[0].startswith("speeds as timed on 20")]
    less = cluster.device.model_copy(update={"memory_bytes": timed.device.launch_s})
    smaller = recalled(cluster.model_copy(update={"device": less}))
    right.append(smaller is not None and smaller.device.memory_bytes == timed.device.launch_s)
    log = logging.getLogger("profiles.cache")
    with mock.patch.object(log, "handlers", [logging.FileHandler(folder / f"log{rank}.txt")]):
        if rank == 0:
            (path,) = mine.iterdir()
            path.write_text(path.read_text()[:1000])  # cut in half
        right.append(recalled(cluster) is None)
    keep(timed, folder=mine)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 2)  # another job
    right.append(recalled(cluster) is None)
    torch.set_num_threads(threads)
    return right


@dataclass(frozen=True)
class Ran:
    """A bench of four ranks: the folder that they wrote to, and what each found right."""

    folder: Path
    right: list[list[bool]]


@pytest.fixture(scope="module")
def benched(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("bench")
    return Ran(folder, pool.run(time_and_recall, folder, world_size=4, timeout_s=180))


@pytest.fixture
def ran(benched: Ran) -> Path:
    return benched.folder


def loaded(folder: Path, name: str) -> ClusterProfile:
    return ClusterProfile.load(folder / f"{name}.json")


def test_every_rank_returns_the_same_profile(ran: Path) -> None:
    assert len({(ran / f"{rank}.json").read_bytes() for rank in range(4)}) == 1


def test_every_axis_of_a_mesh_of_two_is_measured_in_every_collective(ran: Path) -> None:
    cluster = loaded(ran, "0")
    # Meshes of four ranks: 4; 2 x 2, whose inner axis has neighbours and whose outer one has not.
    assert [(axis.group_size, axis.stride) for axis in cluster.axes] == [(2, 1), (2, 2), (4, 1)]
    for axis in cluster.axes:
        assert set(axis.fits) == set(Collective)
        for fit_ in axis.fits.values():
            # Shared memory of one machine: between a bad network and the memory's own bandwidth.
            assert 1e6 < fit_.busbw_bytes_per_s < 200e9
            assert fit_.latency_s < 0.5


def test_the_tiers_are_those_of_their_axes(ran: Path) -> None:
    cluster = loaded(ran, "0")
    assert cluster.intra is not None
    assert cluster.inter is not None
    rings = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    # A node's cards were shared by the two groups that went through them; no fit is above what
    # the stream of messages reached.
    for link, stride, groups in ((cluster.intra, 1, 1), (cluster.inter, 2, 2)):
        for kind, result in link.fits.items():
            measured = cluster.measured(kind, 2, stride)
            assert measured is not None
            own = groups * measured.busbw_bytes_per_s
            highest = max(fit_.busbw_bytes_per_s for fit_ in link.fits.values())
            assert result.busbw_bytes_per_s == pytest.approx(min(own, highest), rel=1e-3)
        rates = [link.fits[kind].busbw_bytes_per_s for kind in rings]
        bandwidth = link.bandwidth_bytes_per_s
        assert bandwidth.source is Source.MEASURED
        assert bandwidth.value == pytest.approx(max(rates), rel=1e-3)
        assert 0 < bandwidth.low <= max(min(rates), 0.05 * max(rates)) * 1.001


def test_the_bench_times_devices_and_keeps_other_fields(ran: Path) -> None:
    before, after = loaded(ran, "before0"), loaded(ran, "0")
    device = after.device
    assert device.matmul_fraction.value == 1.0
    for quantity in (
        device.flop_per_s["float32"],
        device.flop_per_s["bfloat16"],
        device.memory_bandwidth_bytes_per_s,
        device.launch_s,
    ):
        assert quantity.source is Source.MEASURED
        assert 0 < quantity.low <= quantity.value
    assert list(device.matmul_efficiency) == [64, 128, 256, 512, 768]
    assert all(0 < share.value <= 1 for share in device.matmul_efficiency.values())
    assert device.memory_bytes == before.device.memory_bytes
    assert (after.name, after.cores) == (before.name, before.cores)


def test_mutual_slowdown_of_computing_and_communication_is_reported_as_factors(ran: Path) -> None:
    overlap = loaded(ran, "0").overlap
    assert overlap is not None
    assert 1 <= overlap.computing.value < 50
    assert 1 <= overlap.communication.value < 50
    assert overlap.computing.source is overlap.communication.source is Source.MEASURED


@pytest.mark.timed
@pytest.mark.skipif((os.cpu_count() or 1) != 2, reason="four ranks do not take turns on two cores")
def test_a_rank_is_twice_as_fast_while_those_that_share_its_core_wait(ran: Path) -> None:
    shared = loaded(ran, "0").shared_cores
    assert shared is not None
    assert 1.6 < shared.alone.value < 2.4
    assert shared.across_nodes


@pytest.mark.timed
@pytest.mark.skipif((os.cpu_count() or 1) > 4, reason="four ranks have a core each")
def test_computing_and_communication_slow_each_other_on_shared_cores(ran: Path) -> None:
    overlap = loaded(ran, "0").overlap
    assert overlap is not None
    assert overlap.computing.value + overlap.communication.value > 2.2


def test_progress_names_what_is_timed(ran: Path) -> None:
    lines = (ran / "lines0.txt").read_text()
    assert lines.startswith("matrix products and memory\nranks that compute alone\n")
    assert "groups of 2 ranks, 2 apart, 4 KiB" in lines
    assert "groups of 4 ranks, round 3" in lines


def test_a_cluster_of_another_size_is_refused(ran: Path) -> None:
    text = (ran / "refused1.txt").read_text()
    assert text.startswith("the cluster has 6 devices, this job 4 ranks")


def test_a_cached_bench_is_recalled_by_all_ranks_or_by_none(benched: Ran) -> None:
    assert benched.right == [[True] * 7] * 4
    output = "".join(path.read_text() for path in benched.folder.glob("log*.txt"))
    assert output.count("will be written anew: not JSON") == 1


def test_a_folder_that_cannot_be_written_costs_the_cache_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    alone = probe(launcher=Launcher("plain"), ranks=1)
    keep(alone, folder=tmp_path / "file")
    assert "nothing is kept for the next run: " in caplog.text
    assert recall(alone, folder=tmp_path / "file") is None


def test_one_rank_without_a_process_group_times_its_device() -> None:
    alone = bench(probe(launcher=Launcher("plain"), ranks=1), budget_s=1)
    assert alone.device.flop_per_s["float32"].source is Source.MEASURED
    assert (alone.axes, alone.overlap, alone.intra) == ((), None, None)


def bench_beside_a_dead_rank(folder: Path) -> None:
    rank = dist.get_rank()
    if rank == 2:
        measure.contention = lambda *_, **__: os._exit(3)  # type: ignore[assignment]
    try:
        bench(probe(), budget_s=0.5, max_bytes=2**18)
    except RankError as error:
        (folder / f"{rank}.txt").write_text(str(error))
        time.sleep(1)  # the other has had time to look
        raise


@pytest.mark.dist
def test_a_rank_that_dies_is_named_on_the_others_and_nobody_hangs(
    pool: Pool, tmp_path: Path
) -> None:
    with pytest.raises(RankFailure, match="rank 2: the process died"):
        pool.run(bench_beside_a_dead_rank, tmp_path, world_size=3)
    for survivor in range(2):
        first, where, *_ = (tmp_path / f"{survivor}.txt").read_text().splitlines()
        assert first.startswith("the bench broke off after ")
        assert first.endswith(" s: rank 2 went silent")
        assert where.startswith(f"  rank {survivor} of 3: ")
