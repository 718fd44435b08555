"""Cluster names and files: what they mean, what they assume, and what their mistakes say."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiles import catalogue
from profiles.cluster import (
    AxisFits,
    ClusterProfile,
    Collective,
    Device,
    HostBridge,
    Link,
    LinkFit,
    Overlap,
)
from profiles.clusters import cluster_from_name, load_cluster, resolve_cluster, to_toml
from profiles.errors import AdvisorError, FileError, InputError, UnknownNameError
from profiles.provenance import Quantity, Source
from profiles.units import GIB


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "nodes", "devices", "name"),
    [
        ("4x8xH100-SXM-80GB", 4, 8, "H100-SXM-80GB"),
        ("8xH100-SXM-80GB", 1, 8, "H100-SXM-80GB"),
        ("H100-SXM-80GB", 1, 1, "H100-SXM-80GB"),
        ("16X4Xh200", 16, 4, "H200-SXM"),
        ("8xmi300x", 1, 8, "MI300X"),
        ("2xdgx-h100", 2, 8, "H100-SXM-80GB"),
        ("dgx-a100-40gb", 1, 8, "A100-SXM-40GB"),
        ("3xmi300x-8", 3, 8, "MI300X"),
        ("2xp5.48xlarge", 2, 8, "H100-SXM-80GB"),
        ("2 x 8 x H100-SXM-80GB", 2, 8, "H100-SXM-80GB"),
    ],
)
def test_a_name_counts_nodes_and_devices(text: str, nodes: int, devices: int, name: str) -> None:
    cluster = cluster_from_name(text)
    assert (cluster.num_nodes, cluster.devices_per_node) == (nodes, devices)
    assert cluster.device == catalogue.accelerator(name)


def test_links_exist_only_where_there_is_something_to_join() -> None:
    assert cluster_from_name("h200").intra is None
    assert cluster_from_name("8xh200").inter is None
    assert cluster_from_name("2x1xh200").intra is None
    assert cluster_from_name("2x1xh200").inter is not None


def test_the_assumed_network_is_one_400_gbit_card_per_h100() -> None:
    for devices in (1, 4, 8):
        inter = cluster_from_name(f"4x{devices}xH100-SXM-80GB").inter
        assert inter is not None
        # 50 GB/s a card, of which 370 to 380 of 400 GB/s are published for eight.
        assert 0.925 <= inter.bandwidth_bytes_per_s.value / (devices * 50e9) <= 0.95
        assert inter.bandwidth_bytes_per_s.source is Source.ASSUMED
        assert "DGX H100" in inter.bandwidth_bytes_per_s.origin


def test_a_card_of_no_usual_node_gets_one_ethernet_card_a_node() -> None:
    inter = cluster_from_name("2x8xL4").inter
    assert inter is not None
    assert inter.name == "Ethernet 100Gb"
    assert inter.bandwidth_bytes_per_s.source is Source.ASSUMED


def test_a_named_system_s_network_is_published_not_assumed() -> None:
    cluster = cluster_from_name("2xp4d-24xlarge")
    assert cluster.inter == catalogue.link("efa-v1")
    assert cluster.host_memory_bytes is not None
    assert cluster.host_memory_bytes.value == 1152 * GIB  # AWS instance types


def test_short_nodes_get_their_share_of_memory_and_cores() -> None:
    cluster = cluster_from_name("4xH100-SXM-80GB")
    assert cluster.host_memory_bytes is not None
    assert cluster.host_memory_bytes.value == 1024 * GIB  # half a DGX H100's 2 TiB
    assert cluster.cores == 56


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "4x8xH100-SMX-80GB",
            """\
unknown accelerator `H100-SMX-80GB`
  cluster `4x8xH100-SMX-80GB`

hint: did you mean `H100-SXM-80GB` or `H800-SXM-80GB`?
hint: write "4x8xH100-SXM-80GB" (nodes x devices x accelerator), "2xdgx-h100" or a file""",
        ),
        (
            "8xH1000",
            """\
unknown accelerator `H1000`
  cluster `8xH1000`

hint: did you mean `H100` or `V100`?
hint: write "4x8xH100-SXM-80GB" (nodes x devices x accelerator), "2xdgx-h100" or a file""",
        ),
        (
            "DGXH100",
            """\
unknown accelerator `DGXH100`

hint: did you mean `dgx-h100` or `dgx-h200`?
hint: write "4x8xH100-SXM-80GB" (nodes x devices x accelerator), "2xdgx-h100" or a file""",
        ),
        (
            "0x8xh200",
            """\
cluster `0x8xh200` has no devices

hint: write "4x8xH100-SXM-80GB" (nodes x devices x accelerator), "2xdgx-h100" or a file""",
        ),
        (
            "2x4xdgx-h100",
            """\
cluster `2x4xdgx-h100` counts devices, but `dgx-h100` already has 8

hint: write `2xdgx-h100` for 2 nodes""",
        ),
        (
            "",
            """\
the cluster has no name

hint: write "4x8xH100-SXM-80GB" (nodes x devices x accelerator), "2xdgx-h100" or a file""",
        ),
    ],
)
def test_a_wrong_name_says_what_to_write(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        cluster_from_name(text)
    assert str(caught.value) == message


def test_a_short_file_is_completed_from_the_catalogue(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """\
nodes = 4
devices_per_node = 8
accelerator = "H100-SXM-80GB"

[inter]
bandwidth = "400 Gbit/s"
""",
    )
    cluster = load_cluster(path)
    assert cluster.world_size == 32
    assert cluster.device == catalogue.accelerator("H100-SXM-80GB")
    assert cluster.intra == catalogue.link("nvlink4")
    assert cluster.inter is not None
    bandwidth = Quantity(value=50e9, source=Source.USER)
    assert cluster.inter.bandwidth_bytes_per_s == bandwidth
    assert cluster.inter.latency_s == catalogue.link("ib-ndr-8x400").latency_s


def test_a_file_replaces_numbers_of_an_accelerator_and_says_where_they_are_from(
    tmp_path: Path,
) -> None:
    path = written(
        tmp_path,
        """\
system = "dgx-h100"
cores = 96

[device]
memory = "70 GiB"
matmul_fraction = { value = 0.7, source = "measured", relative_error = 0.05, origin = "mamf" }
flop_rate = { bfloat16 = "800 TFLOP/s" }

[intra]
link = "pcie5"
""",
    )
    cluster = load_cluster(path)
    assert cluster.device.memory_bytes == Quantity(value=70 * GIB, source=Source.USER)
    assert cluster.device.matmul_fraction == Quantity(
        value=0.7, source=Source.MEASURED, relative_error=0.05, origin="mamf"
    )
    assert cluster.device.flop_per_s["bfloat16"].value == 800e12
    assert cluster.device.flop_per_s["float32"].value == 67e12
    assert cluster.intra == catalogue.link("pcie5")
    assert (cluster.devices_per_node, cluster.cores) == (8, 96)


def test_a_device_of_no_catalogue_needs_only_memory_and_rates(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """\
devices_per_node = 2

[device]
name = "own chip"
memory = "64 GiB"
memory_bandwidth = "1 TB/s"
flop_rate = { float32 = "30 TFLOP/s" }

[intra]
bandwidth = "25 GB/s"
latency = "9 us"
""",
    )
    cluster = load_cluster(path)
    assert (cluster.device.name, cluster.device.kind) == ("own chip", "cuda")
    assert cluster.device.matmul_fraction.source is Source.ASSUMED
    assert cluster.intra is not None
    assert cluster.intra.latency_s.value == pytest.approx(9e-6)


def test_a_file_describes_how_a_node_is_wired(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """\
nodes = 4
devices_per_node = 4
accelerator = "RTX-3090-24GB"
network_cards = 1
oversubscription = 2.0
nodes_per_switch = 2
notes = ["borrowed until May"]

[pair]
link = "nvlink-bridge"

[host_bridge]
peer_to_peer = false
""",
    )
    cluster = load_cluster(path)
    assert cluster.pair == catalogue.link("nvlink-bridge")
    # What is not said: all devices under one bridge, as fast upwards as a device's own slot.
    assert cluster.host_bridge == HostBridge(
        link=catalogue.link("pcie4"), devices=4, peer_to_peer=False
    )
    assert cluster.bottleneck(2).name == "NVLink bridge (RTX 3090/A6000)"
    assert (
        cluster.group_bandwidth(4).value == catalogue.link("pcie4").bandwidth_bytes_per_s.value / 2
    )
    assert cluster.notes == ("borrowed until May",)
    # Rings 0 2 and 1 3 leave their switch with every hop: 10 GB/s down, 2 x 10 / 2 up for 8 rings.
    assert cluster.group_bandwidth(2, 8).value == 1.25e9
    assert load_cluster(written(tmp_path, to_toml(cluster))) == cluster


def test_the_cards_of_a_named_network_are_counted(tmp_path: Path) -> None:
    assert cluster_from_name("2xp5-48xlarge").network_cards == 32
    assert cluster_from_name("2x8xH100-SXM-80GB").network_cards is None
    text = 'nodes = 2\ndevices_per_node = 8\naccelerator = "h200"\n[inter]\nlink = "ib-ndr-1x400"'
    assert load_cluster(written(tmp_path, text)).network_cards == 1


H200 = 'nodes = 2\naccelerator = "h200"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            H200 + '[inter]\nbandwidth = "400"',
            "`400` has no unit\n"
            "  cluster.toml: inter.bandwidth\n\n"
            'hint: write "400 Gbit/s" or "50 GB/s" (network cards are quoted in bits)',
        ),
        (
            H200 + "[inter]\nbandwidth = 400",
            "`400` has no unit\n"
            "  cluster.toml: inter.bandwidth\n\n"
            'hint: write "400 Gbit/s" or "50 GB/s" (network cards are quoted in bits)',
        ),
        (
            H200 + '[inter]\nbandwidt = "4 GB/s"',
            "unknown key `bandwidt`\n  cluster.toml: inter.bandwidt\n\n"
            "hint: did you mean `bandwidth`?",
        ),
        (
            H200 + '[inter]\nbandwidth = { value = "4 GB/s", sources = "you" }',
            "unknown key `sources`\n  cluster.toml: inter.bandwidth.sources\n\n"
            "hint: did you mean `source`?",
        ),
        (
            'accelerator = "H20O-SXM"',
            "unknown accelerator `H20O-SXM`\n  cluster.toml: accelerator\n\n"
            "hint: did you mean `H200-SXM` or `B300-SXM`?",
        ),
        (
            'system = "dgx-h10"',
            "unknown system `dgx-h10`\n  cluster.toml: system\n\n"
            "hint: did you mean `dgx-h100` or `dgx-h200`?",
        ),
        (
            H200 + '[inter]\nlink = "ib-ndr-8x40"',
            "unknown link `ib-ndr-8x40`\n  cluster.toml: inter.link\n\n"
            "hint: did you mean `ib-ndr-8x400` or `ib-ndr-1x400`?",
        ),
        (
            H200 + '[device]\nflop_rate = { bf16 = "1 TFLOP/s" }',
            "unknown dtype `bf16`\n  cluster.toml: device.flop_rate\n\n"
            "hint: did you mean `bfloat16`?",
        ),
        (
            H200 + '[inter.fits.allreduce]\nlatency = "3 us"\nbandwidth = "4 GB/s"',
            "unknown collective `allreduce`\n  cluster.toml: inter.fits\n\n"
            "hint: did you mean `all_reduce`?",
        ),
        (
            H200 + '[inter]\nbandwidth = "0 GB/s"',
            "0 is given where a number above 0 is wanted\n  cluster.toml: inter.bandwidth",
        ),
        (
            H200 + '[device]\nmemory_bandwidth = "0 GB/s"',
            "0 is given where a number above 0 is wanted\n  cluster.toml: device.memory_bandwidth",
        ),
        (
            H200 + '[device]\nflop_rate = { float32 = "0 TFLOP/s" }',
            "0 is given where a number above 0 is wanted\n  cluster.toml: device.flop_rate.float32",
        ),
        (
            H200 + "[device]\nmatmul_fraction = 80",
            "80 is not a share: above 0, and about 1 at most\n"
            "  cluster.toml: device.matmul_fraction\n\n"
            "hint: 80 % is 0.8",
        ),
        (
            H200 + "[device]\nmatmul_fraction = 0",
            "0 is not a share: above 0, and about 1 at most\n"
            "  cluster.toml: device.matmul_fraction",
        ),
        (
            H200 + '[inter]\nbandwidth = { value = "4 GB/s", source = "you", relative_error = 10 }',
            "`relative_error` = 10 is not half a range: a fraction of the value, 1 at most\n"
            "  cluster.toml: inter.bandwidth\n\nhint: 0.1 is +-10 %",
        ),
        (
            H200 + "[[axes]]\ngroup_size = 1\nstride = 1",
            "`axes.0.group_size` = 1: Input should be greater than or equal to 2\n"
            "  cluster.toml: axes.0.group_size",
        ),
        (
            'system = "dgx-h100"\naccelerator = "A100-SXM-80GB"',
            "`dgx-h100` brings its own devices, H100-SXM-80GB\n  cluster.toml: accelerator\n\n"
            "hint: leave `accelerator` out, or `system`",
        ),
        (
            'accelerator = "h200"\nnodes = 0',
            "`nodes` = 0: more than 0 is wanted\n  cluster.toml: nodes",
        ),
        (
            "",
            "`accelerator` is missing\n  cluster.toml\n\n"
            'hint: write `accelerator = "H100-SXM-80GB"`, a `system`, or a `[device]` table',
        ),
        (
            '[device]\nmemory = "3 GiB"\nflop_rate = { float32 = "1 TFLOP/s" }',
            "`device.memory_bandwidth` is missing\n  cluster.toml\n\n"
            "hint: write it, or name an `accelerator` or `system` of the catalogue",
        ),
        (
            '[device]\nkind = "cpu"\nmemory = "3 GiB"',
            "`device.memory_bandwidth` and `device.flop_rate` and `device.launch` and"
            " `device.context` are missing\n  cluster.toml\n\n"
            "hint: write it, or name an `accelerator` or `system` of the catalogue",
        ),
        (
            'devices_per_node = 2\n[device]\nmemory = "3 GiB"\nmemory_bandwidth = "1 GB/s"\n'
            'flop_rate = { float32 = "1 TFLOP/s" }',
            "`intra.bandwidth` and `intra.latency` are missing\n  cluster.toml\n\n"
            'hint: write them in a table `[intra]`, or name a `link` there: "nvlink4", "pcie4",'
            ' "ib-ndr-1x400" ...',
        ),
        (
            "nodes = = 2",
            "not TOML: Invalid value (at line 1, column 9)\n  cluster.toml",
        ),
    ],
)
def test_a_mistake_in_a_file_names_the_key_and_the_change(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AdvisorError) as caught:
        load_cluster("cluster.toml")
    assert str(caught.value) == message
    assert caught.value.exit_code == 2


def test_a_missing_file_is_named() -> None:
    with pytest.raises(FileError, match=r"cannot read `no/such\.toml`: No such file"):
        resolve_cluster("no/such.toml")


def test_names_toml_and_json_files_all_resolve(tmp_path: Path) -> None:
    cluster = cluster_from_name("2x8xh200")
    cluster.save(tmp_path / "cluster.json")
    (tmp_path / "cluster.toml").write_text(to_toml(cluster), encoding="utf-8")
    assert resolve_cluster("2x8xh200") == cluster
    assert resolve_cluster(str(tmp_path / "cluster.json")) == cluster
    assert resolve_cluster(str(tmp_path / "cluster.toml")) == cluster


@pytest.mark.parametrize(
    "text", [*catalogue.systems(), *(f"2x4x{name}" for name in catalogue.accelerators())]
)
def test_every_named_cluster_survives_its_file(text: str, tmp_path: Path) -> None:
    cluster = cluster_from_name(text)
    assert load_cluster(written(tmp_path, to_toml(cluster))) == cluster


def test_a_file_of_one_device_shows_what_more_devices_need(tmp_path: Path) -> None:
    text = to_toml(cluster_from_name("h200"))
    for count, link in (("devices_per_node = 1", "nvlink4"), ("nodes = 1", "ethernet-100")):
        assert f'# link = "{link}"' in text
        text = text.replace(count, count.replace("1", "2"))
    for commented in ("[intra]", "[inter]", 'link = "nvlink4"', 'link = "ethernet-100"'):
        text = text.replace(f"# {commented}", commented)
    cluster = load_cluster(written(tmp_path, text))
    assert cluster.intra == catalogue.link("nvlink4")
    assert cluster.inter == catalogue.link("ethernet-100")


def test_a_bench_reads_as_people_write_it(tmp_path: Path) -> None:
    text = """
accelerator = "h200"
devices_per_node = 4
overlap = { computing = 1.1, communication = { value = 1.3, source = "measured" } }

[device.matmul_efficiency]
512 = 0.2

[[axes]]
group_size = 2
stride = 2
fits.all_gather = { latency = "1 ms", bandwidth = "250 GB/s" }
"""
    cluster = load_cluster(written(tmp_path, text))
    assert cluster.measured(Collective.ALL_GATHER, 2, 2) == LinkFit(
        latency_s=1e-3, busbw_bytes_per_s=250e9
    )
    assert cluster.measured(Collective.ALL_GATHER, 2) is None
    assert cluster.measured(Collective.ALL_REDUCE, 2, 2) is None
    assert cluster.device.matmul_efficiency[512] == Quantity(value=0.2, source=Source.USER)
    assert cluster.overlap is not None
    assert cluster.overlap.computing.source is Source.USER
    assert cluster.overlap.communication.source is Source.MEASURED
    with pytest.raises(UnknownNameError, match="unknown collective `all_gathr`") as caught:
        load_cluster(written(tmp_path, text.replace("all_gather", "all_gathr")))
    assert caught.value.where is not None
    assert caught.value.where.endswith("cluster.toml: axes.0.fits")


def test_the_file_reads_as_people_write_it() -> None:
    text = to_toml(cluster_from_name("2xdgx-h100"))
    assert 'name = "2xdgx-h100"\nnodes = 2\ndevices_per_node = 8\n' in text
    assert 'host_memory = { value = "2048 GiB", source = "datasheet"' in text
    assert 'memory = { value = "79.1 GiB", source = "datasheet", relative_error = 0.02' in text
    assert '\nbfloat16 = { value = "989 TFLOP/s", source = "datasheet"' in text
    assert 'launch = { value = "7 us"' in text
    assert '[inter]\nname = "IB NDR 8x400Gb (DGX H100)"\nbandwidth = { value = "372 GB/s"' in text


rates = st.floats(min_value=1e-3, max_value=1e18, allow_nan=False)
texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)


def amounts(values: st.SearchStrategy[float]) -> st.SearchStrategy[Quantity]:
    return st.builds(
        Quantity,
        value=values,
        source=st.sampled_from(Source),
        relative_error=st.floats(min_value=0, max_value=1),
        origin=texts,
    )


sizes = amounts(st.integers(min_value=1, max_value=2**50).map(float))
times = amounts(st.floats(min_value=0, max_value=1e4))
fits = st.dictionaries(
    st.sampled_from(Collective),
    st.builds(
        LinkFit,
        latency_s=st.floats(min_value=0, max_value=1),
        busbw_bytes_per_s=rates,
        relative_residual=st.floats(min_value=0, max_value=2),
    ),
)
links = st.builds(
    Link,
    name=texts.filter(bool),
    wiring=st.sampled_from(["switch", "mesh"]),
    bandwidth_bytes_per_s=amounts(rates),
    latency_s=times,
    fits=fits,
)
counts = st.integers(min_value=1, max_value=2**16)
factors = amounts(st.floats(min_value=1e-3, max_value=1e3))
clusters = st.builds(
    ClusterProfile,
    schema_version=st.just(1),
    name=texts.filter(bool),
    notes=st.lists(texts, max_size=2).map(tuple),
    network_cards=st.none() | st.integers(min_value=1, max_value=32),
    oversubscription=st.floats(min_value=1, max_value=64),
    nodes_per_switch=st.none() | st.integers(min_value=1, max_value=32),
    pair=st.none() | links,
    host_bridge=st.none()
    | st.builds(
        HostBridge,
        link=links,
        devices=st.integers(min_value=1, max_value=16),
        peer_to_peer=st.booleans(),
    ),
    num_nodes=st.just(2),
    devices_per_node=st.just(2),
    device=st.builds(
        Device,
        name=texts.filter(bool),
        kind=st.sampled_from(["cuda", "cpu"]),
        memory_bytes=sizes,
        memory_bandwidth_bytes_per_s=amounts(rates),
        flop_per_s=st.dictionaries(
            st.sampled_from(["float32", "bfloat16"]), amounts(rates), min_size=1
        ),
        matmul_fraction=amounts(st.floats(min_value=1e-3, max_value=1)),
        launch_s=times,
        context_bytes=sizes,
        matmul_efficiency=st.dictionaries(counts, factors, max_size=3),
    ),
    intra=links,
    inter=links,
    host_memory_bytes=st.none() | sizes,
    cores=st.none() | st.integers(min_value=1, max_value=512),
    axes=st.lists(
        st.builds(AxisFits, group_size=counts.map(lambda n: n + 1), stride=counts, fits=fits),
        max_size=3,
    ).map(tuple),
    overlap=st.none() | st.builds(Overlap, computing=factors, communication=factors),
)


@settings(deadline=None)
@given(cluster=clusters)
def test_any_profile_survives_its_file(
    cluster: ClusterProfile, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(to_toml(cluster), encoding="utf-8")
    assert load_cluster(path) == cluster
