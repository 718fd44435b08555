"""The catalogue against the tables it was distilled from, and looking names up."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

from profiles.errors import InputError, UnknownNameError
from profiles.machine import catalogue
from profiles.machine.catalogue import accelerator, accelerator_from_runtime, find_name, link
from profiles.machine.clusters import cluster_from_name
from profiles.provenance import Quantity, Source
from profiles.units import GIB, parse_bandwidth, parse_bytes


def table(shared: Path, name: str) -> list[dict[str, str]]:
    with (shared / "data" / "hardware" / name).open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def quantities(of: object) -> list[Quantity]:
    results = []
    for value in vars(of).values():
        values = value.values() if isinstance(value, dict) else [value]
        results += [item for item in values if isinstance(item, Quantity)]
    return results


def test_every_published_accelerator_is_there_with_its_printed_numbers(shared: Path) -> None:
    columns = {
        "float32": "fp32_tflops",
        "tfloat32": "tf32_dense_tflops",
        "float16": "fp16_dense_tflops",
        "bfloat16": "bf16_dense_tflops",
        "float8_e4m3fn": "fp8_dense_tflops",
    }
    for row in table(shared, "gpu_specs.csv"):
        name = row["gpu_type"]
        entry, device = catalogue.accelerators()[name], accelerator(name)
        dies = 2 if name == "MI250X" else 1  # printed for the module, which holds two devices
        assert parse_bytes(entry.printed_memory) == float(row["mem_gb"]) * 1e9 / dies, name
        bandwidth = parse_bandwidth(entry.memory_bandwidth)
        assert bandwidth == pytest.approx(float(row["mem_bw_GBps"]) * 1e9 / dies), name
        printed = {key: float(row[col]) * 1e12 / dies for key, col in columns.items() if row[col]}
        rates = {dtype: rate.value for dtype, rate in device.flop_per_s.items()}
        assert rates == pytest.approx(printed), name


def test_every_published_link_is_there_with_its_nominal_rate(shared: Path) -> None:
    by_title = {entry.title: entry for entry in catalogue.links().values()}
    for row in table(shared, "interconnect_nominal.csv"):
        entry = by_title[row["link"]]
        assert entry.scope == row["scope"], row["link"]
        nominal = float(row["nominal_GBps_per_direction"]) * 1e9
        assert parse_bandwidth(entry.nominal) == pytest.approx(nominal), row["link"]


# NVLink of these joins pairs of cards by a bridge (or was sold so); a node of them talks over PCIe.
BRIDGED = {
    "TITAN-RTX-24GB",
    "RTX-2080Ti-11GB",
    "RTX-3090-24GB",
    "RTX-A6000-48GB",
    "A30-24GB",
    "A40-48GB",
    "Quadro-RTX-8000-48GB",
    "Quadro-RTX-6000-24GB",
    "RTX-A5500-24GB",
    "RTX-A5000-24GB",
    "RTX-A4500-20GB",
    "A100-PCIe-40GB",
    "A100-PCIe-80GB",
    "H100-PCIe-80GB",
    "H100-NVL-94GB",
}


def test_every_accelerator_has_the_link_that_its_data_sheet_prints(shared: Path) -> None:
    bridged = set()
    for row in table(shared, "gpu_specs.csv"):
        name, both_ways = row["gpu_type"], float(row["nvlink_or_xgmi_bidir_GBps"])
        entry = catalogue.accelerators()[name]
        if entry.intra.startswith("pcie"):
            assert entry.intra == f"pcie{row['pcie_gen']}", name
            if both_ways:
                bridged.add(name)
        else:
            nominal = parse_bandwidth(catalogue.links()[entry.intra].nominal)
            assert nominal == pytest.approx(both_ways / 2 * 1e9), name
    assert bridged == BRIDGED


def test_a_mesh_gives_a_pair_what_was_measured_on_two_devices(shared: Path) -> None:
    measured = {
        row["n_gpus"]: float(row["busbw_GBps"]) * 1e9
        for row in table(shared, "interconnect_measured.csv")
        if row["system"] == "8xMI300X node"
    }
    node = cluster_from_name("mi300x-8")
    for ranks in ("2", "8"):
        bandwidth = node.group_bandwidth(int(ranks))
        assert bandwidth.low <= measured[ranks] <= bandwidth.high, ranks
    assert node.group_bandwidth(2).value == pytest.approx(measured["2"], rel=0.1)


def test_the_cards_of_a_network_add_up_to_its_rate() -> None:
    for name, entry in catalogue.links().items():
        if entry.scope == "inter" and not name.startswith("gloo"):
            assert entry.cards is not None, name
            gbit = parse_bandwidth(entry.nominal) * 8 / 1e9 / entry.cards
            assert gbit in (10, 25, 50, 100, 200, 400, 800), name
            printed = re.search(r"(\d+)x(\d+)Gb", entry.title)
            if printed is not None:
                assert (entry.cards, gbit) == (int(printed[1]), int(printed[2])), name


def test_a_machine_without_accelerators_can_be_named() -> None:
    cluster = cluster_from_name("4xm7i-48xlarge")
    assert (cluster.world_size, cluster.device.kind, cluster.cores) == (8, "cpu", 96)
    # 48 cores x 64 float32 operations a cycle x 3.2 GHz; 8 channels x 8 bytes x 4.8 GHz, of 0.9.
    assert cluster.device.flop_per_s["float32"].value == pytest.approx(48 * 64 * 3.2e9, rel=0.01)
    bandwidth = cluster.device.memory_bandwidth_bytes_per_s.value
    assert bandwidth == pytest.approx(0.9 * 8 * 8 * 4.8e9)
    assert cluster.intra == link("gloo-local")
    assert cluster.inter == link("gloo-tcp")


def test_matmul_shares_are_those_found_by_search(shared: Path) -> None:
    names = {
        "NVIDIA A100 SXM": "A100-SXM-80GB",
        "NVIDIA A100 PCIe": "A100-PCIe-80GB",
        "NVIDIA GH200 SXM": "GH200-96GB",
        "NVIDIA H100 SXM": "H100-SXM-80GB",
        "NVIDIA B200 SXM": "B200-SXM-180GB",
        "NVIDIA B300 SXM": "B300-SXM",
        "NVIDIA GB200 SXM": "GB200",
        "AMD MI300X": "MI300X",
        "AMD MI325X": "MI325X",
        "AMD MI355X": "MI355X",
    }
    seen = 0
    for row in table(shared, "matmul_achievable.csv"):
        if row["accelerator"] not in names:
            continue
        device = accelerator(names[row["accelerator"]])
        dtype = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}[row["dtype"]]
        reached = float(row["mamf_tflops"]) * 1e12 / device.flop_per_s[dtype].value
        share = device.matmul_fraction
        assert share.low <= reached <= share.high, row
        assert share.source is Source.DATASHEET
        if row["dtype"] == "bf16":
            assert share.value == pytest.approx(reached, abs=0.001), row
            seen += 1
    assert seen == len(names)


# The published systems whose collectives use the link alone, ring or NVLS, at full size.
MEASURED_LINKS = {
    ("NVLink3 NVSwitch", "8"): "nvlink3",
    ("NVLink4 NVSwitch", "8"): "nvlink4",
    ("NVLink5 NVSwitch", "8"): "nvlink5",
    ("NVLink2", "8"): "nvlink2",
    ("PCIe4", "8"): "pcie4",
    ("PCIe5", "8"): "pcie5",
    ("PCIe6", "8"): "pcie6",
    ("PCIe5 x16 dual Xeon", "8"): "pcie5",
    ("PCIe5 x16 dual Xeon", "4"): "pcie5",
    ("NVLink4 400GB/s NVSwitch", "8"): "nvlink4-h800",
    ("xGMI 64GB/s per peer", "8"): "xgmi-mi300x",
    ("Ethernet 100Gb TCP", "32"): "ethernet-100",
    ("InfiniBand EDR 1x100Gb", "2"): "ib-edr-1x100",
    ("IB/RoCE 200Gb", "32"): "ib-hdr-1x200",
    ("InfiniBand NDR 1x400Gb", ""): "ib-ndr-1x400",
    ("NVLink3 + IB HDR 8x200Gb", "32"): "ib-hdr-8x200",
    ("NVLink4 + IB NDR 8x400Gb", "32"): "ib-ndr-8x400",
    ("GPUDirect-TCPX 4x200Gb", "16"): "gcp-tcpx",
    ("GPUDirect-TCPXO 8x200Gb", "16"): "gcp-tcpxo",
}


def test_the_range_of_a_link_holds_the_plateaus_published_for_it(shared: Path) -> None:
    plateaus: dict[tuple[str, ...], float] = {}
    for row in table(shared, "interconnect_measured.csv"):
        if row["collective"] in ("all_reduce", "all_gather", "reduce_scatter"):
            run = tuple(row[key] for key in ("link", "n_gpus", "system", "collective", "algo"))
            plateaus[run] = max(plateaus.get(run, 0.0), float(row["busbw_GBps"]) * 1e9)
    checked = set()
    for (label, ranks, *_), plateau in plateaus.items():
        key = (label, ranks)
        if key in MEASURED_LINKS:
            bandwidth = link(MEASURED_LINKS[key]).bandwidth_bytes_per_s
            assert bandwidth.source is Source.DATASHEET
            assert bandwidth.low <= plateau <= bandwidth.high, (key, plateau / 1e9, bandwidth)
            checked.add(key)
    assert checked == set(MEASURED_LINKS)


def test_every_number_has_a_source_and_no_range_reaches_zero() -> None:
    for name in catalogue.accelerators():
        for quantity in quantities(accelerator(name)):
            assert quantity.origin, name
            assert quantity.value > 0, name
            assert quantity.low > 0, name
    for name in catalogue.links():
        for quantity in quantities(link(name)):
            assert quantity.origin, name
            assert quantity.low > 0, name


def test_entries_name_links_and_systems_that_exist() -> None:
    for name, entry in catalogue.accelerators().items():
        assert catalogue.links()[entry.intra].scope == "intra", name
        assert entry.system is None or entry.system in catalogue.systems(), name
    for name, system in catalogue.systems().items():
        assert system.accelerator in catalogue.accelerators(), name
        assert catalogue.links()[system.intra].scope == "intra", name
        assert catalogue.links()[system.inter].scope == "inter", name


def test_memory_is_what_the_runtime_reports_not_what_is_printed() -> None:
    # "GPU 0 has a total capacity of 79.10 GiB": torch on an 80 GB H100. An H200 shows 139.8.
    assert accelerator("H100-SXM-80GB").memory_bytes.value == pytest.approx(79.1 * GIB, rel=1e-6)
    h200 = accelerator("h200").memory_bytes
    assert h200.low < 139.8 * GIB < h200.high
    for name, entry in catalogue.accelerators().items():  # torch never reports more than printed
        printed_as_gib = parse_bytes(entry.printed_memory.replace("GB", "GiB"))
        assert accelerator(name).memory_bytes.value < printed_as_gib, name


@pytest.mark.parametrize(
    ("short", "full"),
    [
        ("h100-sxm-80gb", "H100-SXM-80GB"),
        ("h200", "H200-SXM"),
        ("b200", "B200-SXM-180GB"),
        ("3090", "RTX-3090-24GB"),
        ("rtx3090", "RTX-3090-24GB"),
        ("A100 PCIe 80GB", "A100-PCIe-80GB"),
        ("mi300x", "MI300X"),
    ],
)
def test_a_short_name_that_fits_one_is_enough(short: str, full: str) -> None:
    assert accelerator(short).name == full


def test_an_ambiguous_name_lists_its_matches() -> None:
    with pytest.raises(InputError) as caught:
        accelerator("h100", where="cluster.toml: accelerator")
    assert str(caught.value) == (
        "`h100` can mean 4 accelerators\n"
        "  cluster.toml: accelerator\n"
        "\n"
        "hint: write one of `H100-SXM-80GB`, `H100-SXM-96GB-HBM2e-500W`, `H100-PCIe-80GB`,"
        " `H100-NVL-94GB`"
    )


@pytest.mark.parametrize("name", ["H100-SMX-80GB", "h10", "", "-"])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(UnknownNameError):
        accelerator(name)


def test_a_typo_names_the_near_miss() -> None:
    with pytest.raises(UnknownNameError, match="did you mean `H100-SXM-80GB`"):
        accelerator("H100-SMX-80GB")


def test_a_link_is_found_by_its_title_too() -> None:
    assert link("IB NDR 8x400Gb (DGX H100)") == link("ib-ndr-8x400")


def test_words_of_titles_count_where_there_are_titles() -> None:
    assert find_name("link", "slingshot", {"a-1": "HPE Slingshot", "b-1": "Ethernet"}) == "a-1"


def test_the_runtime_s_name_finds_the_part_of_that_memory() -> None:
    assert accelerator_from_runtime("NVIDIA H100 80GB HBM3", 84_929_347_584) == "H100-SXM-80GB"
    assert accelerator_from_runtime("Tesla T4", int(14.75 * GIB)) == "T4-16GB"
    assert accelerator_from_runtime("NVIDIA GeForce RTX 3080", 10 * GIB) == "RTX-3080-10GB"
    # The same name is sold with 12 GB.
    assert accelerator_from_runtime("NVIDIA GeForce RTX 3080", 12 * GIB) is None
    assert accelerator_from_runtime("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 20 * GIB) is None


@pytest.mark.parametrize(
    ("name", "node_w"),
    [("A100-SXM-80GB", 6500.0), ("H100-SXM-80GB", 10_200.0), ("B200-SXM-180GB", 14_300.0)],
)
def test_eight_boards_draw_most_of_what_their_node_is_printed_with(
    name: str, node_w: float
) -> None:
    """DGX A100, H100 and B200 data sheets: the most that the whole node draws."""
    power = accelerator(name).board_power_w
    assert power is not None
    assert 0.45 * node_w < 8 * power.value < node_w


def test_a_power_that_was_not_looked_up_is_unknown() -> None:
    assert accelerator("GTX-1080Ti-11GB").board_power_w is None


def test_the_catalogue_needs_no_torch() -> None:
    code = (
        "import sys; from profiles.machine.catalogue import accelerator; accelerator('h200');"
        "import profiles.machine.clusters; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_products_are_rounded_to_tf32_where_that_is_faster() -> None:
    assert accelerator("H100-SXM-80GB").has_tf32
    before = accelerator("V100-SXM2-32GB")
    assert "tfloat32" not in before.flop_per_s
    assert not before.has_tf32
    as_fast = {**before.flop_per_s, "tfloat32": before.flop_per_s["float32"]}
    assert not before.model_copy(update={"flop_per_s": as_fast}).has_tf32
