"""The line through timings, against known lines and published curves; a real two-rank bench."""

from __future__ import annotations

import csv
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from profiles.bench import bench, copy_rate, matmul_rate
from profiles.cluster import ClusterProfile, Collective
from profiles.errors import InputError
from profiles.fit import fit
from profiles.probe import Launcher, probe
from profiles.provenance import Source
from profiles.units import KIB, MIB

SIZES = [KIB * 4**power for power in range(9)]  # 1 KiB to 64 MiB


@pytest.mark.parametrize(("latency_s", "bandwidth"), [(20e-6, 40e9), (3e-3, 1e8), (0.0, 5e9)])
def test_an_exact_line_is_found(latency_s: float, bandwidth: float) -> None:
    found = fit([(float(size), latency_s + size / bandwidth) for size in SIZES])
    assert found.latency_s == pytest.approx(latency_s, abs=1e-12, rel=1e-6)
    assert found.busbw_bytes_per_s == pytest.approx(bandwidth, rel=1e-6)
    assert found.relative_residual == pytest.approx(0, abs=1e-6)


def test_noise_and_two_disturbed_sizes_move_the_line_little() -> None:
    noise = random.Random(7)
    points = [
        (float(size), (300e-6 + size / 1e9) * noise.uniform(0.95, 1.05))
        for size in (KIB * 2**power for power in range(17))
    ]
    for spoiled in (3, 9):  # another process took the cores
        size, seconds = points[spoiled]
        points[spoiled] = (size, 6 * seconds)
    found = fit(points)
    assert found.latency_s == pytest.approx(300e-6, rel=0.1)
    assert found.busbw_bytes_per_s == pytest.approx(1e9, rel=0.1)
    assert found.relative_residual < 0.1  # 15 of 17 sizes are within 5 % of the true line


def test_times_that_fall_with_size_still_give_a_bandwidth() -> None:
    found = fit([(1024.0, 2e-3), (4096.0, 1.5e-3), (16384.0, 1e-3)])
    assert found.latency_s == 0
    assert found.busbw_bytes_per_s == pytest.approx(16384 / 1e-3)


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
        found = fit(timings)
        largest, plateau = max(curve)
        # All that the cost model asks of a fit: the time of a large message.
        predicted = found.latency_s + largest * factor / found.busbw_bytes_per_s
        assert predicted == pytest.approx(largest * factor / plateau, rel=0.15), (system, kind)
        if found.latency_s < 0.02 * predicted:  # the curve has levelled off
            assert found.busbw_bytes_per_s == pytest.approx(plateau, rel=0.1), (system, kind)
            checked += 1
    assert checked >= 10  # all NVSwitch nodes, most of the network and MI200 curves


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


def test_without_a_process_group_the_bench_says_how_to_start() -> None:
    with pytest.raises(InputError) as caught:
        bench(probe(launcher=Launcher("plain"), ranks=2))
    assert "the bench needs a process group" in str(caught.value)
    assert "torchrun --nproc-per-node" in str(caught.value)


RANK_PROGRAM = """
import sys, warnings
from datetime import timedelta
from pathlib import Path
warnings.simplefilter("error")
import torch, torch.distributed as dist
from profiles.bench import bench
from profiles.errors import InputError
from profiles.probe import probe

dist.init_process_group("gloo", timeout=timedelta(seconds=40))
torch.manual_seed(0)
rank, folder = dist.get_rank(), Path(sys.argv[1])
cluster = probe()
(folder / f"before{rank}.json").write_text(cluster.to_json())
(folder / f"{rank}.json").write_text(bench(cluster, budget_s=3, max_bytes=16 * 2**20).to_json())
try:
    bench(cluster.model_copy(update={"num_nodes": 3}))
except InputError as error:
    (folder / f"refused{rank}.txt").write_text(str(error))
# The same two ranks as two nodes of one: the tier between nodes.
nodes = cluster.model_copy(
    update={"num_nodes": 2, "devices_per_node": 1, "intra": None, "inter": cluster.intra}
)
(folder / f"nodes{rank}.json").write_text(bench(nodes, budget_s=1, max_bytes=2**20).to_json())
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One launch of two gloo ranks that bench and leave their profiles in a folder."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "program.py").write_text(RANK_PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(folder / "program.py"), str(folder)]
    root = Path(__file__).parents[2]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    process = subprocess.Popen(
        command,
        env=env,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=90)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, output
    return folder


def loaded(folder: Path, name: str) -> ClusterProfile:
    return ClusterProfile.load(folder / f"{name}.json")


def test_every_rank_returns_the_same_profile(ran: Path) -> None:
    assert (ran / "0.json").read_bytes() == (ran / "1.json").read_bytes()
    assert (ran / "nodes0.json").read_bytes() == (ran / "nodes1.json").read_bytes()


def test_every_collective_is_measured_with_a_plausible_line(ran: Path) -> None:
    intra = loaded(ran, "0").intra
    assert intra is not None
    assert set(intra.fits) == {
        Collective.ALL_REDUCE,
        Collective.ALL_GATHER,
        Collective.REDUCE_SCATTER,
        Collective.SEND_RECV,
    }
    for fit_ in intra.fits.values():
        # Shared memory of one machine: between a bad network and the memory's own bandwidth.
        assert 10e6 < fit_.busbw_bytes_per_s < 200e9
        assert fit_.latency_s < 0.1
    rates = [f.busbw_bytes_per_s for k, f in intra.fits.items() if k is not Collective.SEND_RECV]
    bandwidth = intra.bandwidth_bytes_per_s
    assert bandwidth.source is Source.MEASURED
    assert 0 < bandwidth.low <= min(rates) * 1.000001
    assert bandwidth.high >= max(rates) * 0.999999


def test_the_devices_are_timed_and_the_rest_is_kept(ran: Path) -> None:
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
    assert device.memory_bytes == before.device.memory_bytes
    assert (after.name, after.cores, after.inter) == (before.name, before.cores, None)


def test_the_links_between_nodes_are_measured_too(ran: Path) -> None:
    cluster = loaded(ran, "nodes0")
    assert cluster.intra is None
    assert cluster.inter is not None
    assert cluster.inter.bandwidth_bytes_per_s.source is Source.MEASURED
    assert len(cluster.inter.fits) == 4


def test_a_cluster_of_another_size_is_refused(ran: Path) -> None:
    text = (ran / "refused1.txt").read_text()
    assert text.startswith("the cluster has 6 devices, this job 2 ranks")


DYING_PROGRAM = """
import os, sys
from datetime import timedelta
import torch.distributed as dist
from profiles import bench as module
from profiles.errors import RankError
from profiles.probe import probe

dist.init_process_group("gloo", timeout=timedelta(seconds=40))
if dist.get_rank() == 1:
    module.copy_timing = lambda *_, **__: os._exit(3)
try:
    module.bench(probe(), budget_s=0.5, max_bytes=2**18)
except RankError as error:
    print(error)
    sys.stdout.flush()
    os._exit(error.exit_code)
"""


def test_a_rank_that_dies_is_an_error_on_the_others_not_a_hang(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(DYING_PROGRAM)
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        port = probe_socket.getsockname()[1]
    env = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "program.py")],
            env=env | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [2, 3]
    assert outputs[0].startswith("the bench broke off after ")
    assert "\n  rank 0 of 2\n" in outputs[0]
