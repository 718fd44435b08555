"""Logs in the format of nccl-tests, with times from a formula that the fit has to find again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from profiles.errors import FileError, InputError
from profiles.machine.cluster import Collective
from profiles.machine.cluster_text import to_toml
from profiles.machine.clusters import load_cluster
from profiles.machine.nccl_tests import cluster_of_logs, read_log
from profiles.provenance import Source

H100 = "NVIDIA H100 80GB HBM3"
LATENCY_S, BUSBW = 30e-6, 400e9
# PERFORMANCE.md of nccl-tests, for n ranks.
FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce_perf": lambda n: 2 * (n - 1) / n,
    "all_gather_perf": lambda n: (n - 1) / n,
    "reduce_scatter_perf": lambda n: (n - 1) / n,
    "alltoall_perf": lambda n: (n - 1) / n,
    "sendrecv_perf": lambda n: 1.0,
}
KINDS = {
    "all_reduce_perf": Collective.ALL_REDUCE,
    "all_gather_perf": Collective.ALL_GATHER,
    "reduce_scatter_perf": Collective.REDUCE_SCATTER,
    "alltoall_perf": Collective.ALL_TO_ALL,
    "sendrecv_perf": Collective.SEND_RECV,
}
SIZES = [1024 * 4**power for power in range(11)]  # 1 KiB to 1 GiB


def written_time(seconds: float) -> str:
    """As nccl-tests prints microseconds: fewer decimals as they grow."""
    microseconds = seconds * 1e6
    decimals = 0 if microseconds >= 10000 else 1 if microseconds >= 100 else 2
    return f"{microseconds:7.{decimals}f}"


def log(
    program: str,
    *,
    hosts: tuple[str, ...] = ("node1",) * 8,
    device: str = H100,
    latency_s: float = LATENCY_S,
    busbw: float = BUSBW,
    is_new: bool = True,
    wrong: str = "0",
) -> str:
    """The output of `program -b 1K -e 1G -f 4`; newer versions print their name and groups."""
    ranks = len(hosts)
    lines = [f"# Collective test starting: {program}"] if is_new else []
    lines += [
        "# nThread 1 nGpus 8 minBytes 1024 maxBytes 1073741824 step: 4(factor) warmup iters: 5"
        " iters: 20 agg iters: 1 validation: 1 graph: 0",
        "#",
        "# Using devices",
    ]
    group = " Group  0" if is_new else ""
    lines += [
        f"#  Rank {rank:2}{group} Pid  {4000 + rank:5} on {host:>10} device {rank % 8:2}"
        f" [0x1{rank}] {device}"
        for rank, host in enumerate(hosts)
    ]
    columns = "    time   algbw   busbw #wrong"
    lines += [
        "node1:4000:4000 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>",
        "#",
        "#                                                              out-of-place"
        "                       in-place          ",
        f"#       size         count      type   redop    root {columns} {columns}",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)"
        "            (us)  (GB/s)  (GB/s)       ",
    ]
    factor = FACTORS[program](ranks)
    operation = "sum" if "reduce" in program else "none"
    for size in SIZES:
        row = f"{size:12}{size // 4:14}     float{operation:>8}{-1:8}"
        for slower in (1.0, 1.5):  # in place is another number, which is not read
            seconds = slower * (latency_s + factor * size / busbw)
            algbw = size / seconds
            row += f"  {written_time(seconds)}  {algbw / 1e9:6.2f}  {factor * algbw / 1e9:6.2f}"
            row += f"  {wrong:>5}"
        lines.append(row)
    lines += ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 123.456 ", "#"]
    lines += [f"# Collective test concluded: {program}", "#"] if is_new else [""]
    return "\n".join(lines) + "\n"


def write(folder: Path, program: str, text: str | None = None, **settings: object) -> Path:
    path = folder / f"{program}.log"
    path.write_text(log(program, **settings) if text is None else text)  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("program", list(FACTORS))
def test_the_line_of_every_program_is_recovered(program: str, is_new: bool, tmp_path: Path) -> None:
    log = read_log(write(tmp_path, program, is_new=is_new))
    assert (log.kind, log.ranks, log.num_nodes) == (KINDS[program], 8, 1)
    fit = log.fit()
    # Times are printed with three to five digits.
    assert fit.latency_s == pytest.approx(LATENCY_S, rel=0.01)
    assert fit.busbw_bytes_per_s == pytest.approx(BUSBW, rel=0.005)
    assert fit.relative_residual < 0.005


def test_tags_of_mpirun_are_left_out(tmp_path: Path) -> None:
    plain = write(tmp_path, "all_reduce_perf")
    tagged = "".join(f"[1,0]<stdout>:{line}\n" for line in plain.read_text().splitlines())
    (tmp_path / "tagged").mkdir()
    assert read_log(write(tmp_path / "tagged", "all_reduce_perf", tagged)).fit() == (
        read_log(plain).fit()
    )


def test_logs_of_one_node_and_of_two_make_a_cluster(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    both = ("node1",) * 8 + ("node2",) * 8
    paths = [
        write(one, "all_reduce_perf"),
        write(one, "all_gather_perf", busbw=300e9),
        write(two, "all_reduce_perf", hosts=both, latency_s=60e-6, busbw=200e9),
        write(two, "sendrecv_perf", hosts=both, busbw=40e9),
    ]
    cluster = cluster_of_logs(paths)
    assert (cluster.num_nodes, cluster.devices_per_node) == (2, 8)
    assert cluster.device.name == "H100-SXM-80GB"
    assert cluster.device.memory_bytes.source is Source.DATASHEET
    assert cluster.intra is not None
    assert cluster.inter is not None
    assert cluster.intra.bandwidth_bytes_per_s.source is Source.MEASURED
    assert cluster.intra.bandwidth_bytes_per_s.value == pytest.approx(400e9, rel=0.005)
    assert cluster.intra.bandwidth_bytes_per_s.low == pytest.approx(300e9, rel=0.01)
    assert cluster.inter.bandwidth_bytes_per_s.value == pytest.approx(200e9, rel=0.005)
    whole = cluster.measured(Collective.SEND_RECV, 16)
    assert whole is not None
    assert whole.busbw_bytes_per_s == pytest.approx(40e9, rel=0.005)
    assert cluster.measured(Collective.ALL_TO_ALL, 16) is None
    path = tmp_path / "cluster.toml"
    path.write_text(to_toml(cluster))
    assert load_cluster(path) == cluster


def test_groups_smaller_than_a_node_are_an_axis_and_leave_the_tier_alone(tmp_path: Path) -> None:
    pair = tmp_path / "pair"
    pair.mkdir()
    cluster = cluster_of_logs(
        [
            write(pair, "all_reduce_perf", hosts=("node1",) * 2, busbw=100e9),
            write(tmp_path, "all_reduce_perf"),
        ]
    )
    assert [axis.group_size for axis in cluster.axes] == [2, 8]
    assert cluster.intra is not None
    assert cluster.intra.bandwidth_bytes_per_s.value == pytest.approx(400e9, rel=0.005)


def refused(path: Path) -> str:
    with pytest.raises(FileError) as caught:
        read_log(path)
    return str(caught.value)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    assert "is empty: it has no line `#  size  count  type" in refused(
        write(tmp_path, "all_reduce_perf", "")
    )


def test_another_programs_output_is_refused(tmp_path: Path) -> None:
    text = refused(write(tmp_path, "all_reduce_perf", "PING node2 56 data bytes\n64 bytes from\n"))
    assert "is no output of nccl-tests" in text
    assert "2 lines" in text


@pytest.mark.parametrize("share", [0.75, 0.9])
def test_a_log_cut_in_half_is_refused_and_no_row_is_used(share: float, tmp_path: Path) -> None:
    whole = log("all_reduce_perf")
    cut = whole[: int(len(whole) * share)]
    text = refused(write(tmp_path, "all_reduce_perf", cut))
    assert "the log is cut: it ends without `# Avg bus bandwidth`" in text
    assert f"all_reduce_perf.log, line {len(cut.splitlines())}: " in text


def test_a_broken_row_is_named_by_its_line(tmp_path: Path) -> None:
    lines = log("all_reduce_perf").splitlines()
    broken = next(i for i, line in enumerate(lines) if line.split()[:1] == ["65536"])
    lines[broken] = lines[broken][:70]
    text = refused(write(tmp_path, "all_reduce_perf", "\n".join(lines)))
    assert f"line {broken + 1}" in text
    assert "a row has size, count, type and then 2 times the columns" in text


def test_wrong_elements_are_refused(tmp_path: Path) -> None:
    assert "17 elements were wrong" in refused(write(tmp_path, "all_reduce_perf", wrong="17"))


def test_a_file_named_after_another_program_is_refused(tmp_path: Path) -> None:
    # Older logs do not say which program it was; the bus bandwidth of an all-reduce does.
    old = log("all_reduce_perf", is_new=False)
    text = refused(write(tmp_path, "all_gather_perf", old))
    assert "is not that of all_gather over 8 ranks: 0.875 x " in text


def test_a_log_that_does_not_say_what_it_is_of_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "node1.log"
    path.write_text(log("all_gather_perf", is_new=False))
    assert "it names none" in refused(path)


def test_two_runs_in_a_file_are_refused(tmp_path: Path) -> None:
    twice = log("all_reduce_perf") * 2
    assert "several runs" in refused(write(tmp_path, "all_reduce_perf", twice))


def test_one_size_has_no_line(tmp_path: Path) -> None:
    rows = [line for line in log("all_reduce_perf").splitlines() if "float" in line]
    text = "\n".join(line for line in log("all_reduce_perf").splitlines() if line not in rows[1:])
    assert "1 size was timed" in refused(write(tmp_path, "all_reduce_perf", text))


def test_unequal_nodes_and_split_groups_are_refused(tmp_path: Path) -> None:
    unequal = ("node1",) * 8 + ("node2",) * 4
    assert "nodes of unequal size or devices (node1: 8, node2: 4" in refused(
        write(tmp_path, "all_reduce_perf", hosts=unequal)
    )
    split = log("all_reduce_perf").replace("Rank  7 Group  0", "Rank  7 Group  1")
    assert "split into several groups" in refused(write(tmp_path, "all_reduce_perf", split))


def test_logs_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    first = write(tmp_path, "all_reduce_perf")
    with pytest.raises(InputError, match="different devices"):
        cluster_of_logs([first, write(other, "all_gather_perf", device="NVIDIA H200")])
    with pytest.raises(InputError, match="two logs of all_reduce over 8 ranks"):
        cluster_of_logs([first, write(other, "all_reduce_perf")])
    with pytest.raises(InputError, match="the catalogue has no `Banana 9000`"):
        cluster_of_logs([write(other, "all_reduce_perf", device="Banana 9000")])
