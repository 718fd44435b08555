"""Links between GPUs, from what NVIDIA's driver answers on machines that are named beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from profiles.machine import catalogue
from profiles.machine.cluster import ClusterProfile, HostBridge
from profiles.machine.gpus import gpu_links, links_between
from profiles.machine.launcher import Launcher
from profiles.machine.nvml import Ancestor, NvLink, opened
from profiles.machine.probe import probe
from profiles.provenance import Source
from tests.factories import gpus

GB = 1e9


@dataclass
class Answers:
    """A driver's answers, as recorded or as the machine's manual draws it."""

    count: int
    pcie_slot: tuple[int, int] = (4, 16)
    links: Mapping[int, Sequence[NvLink]] = field(default_factory=dict)
    ancestors: Callable[[int, int], Ancestor] = lambda one, other: Ancestor.NUMA_NODE
    open_pairs: Callable[[int, int], bool] = lambda one, other: True
    slots: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    near: Callable[[int], int | None] = lambda gpu: 0

    def uuids(self) -> Sequence[str]:
        return [f"uuid-{gpu}" for gpu in range(self.count)]

    def nvlinks(self, gpu: int) -> Sequence[NvLink]:
        return self.links.get(gpu, ())

    def pcie(self, gpu: int) -> tuple[int, int]:
        return self.slots.get(gpu, self.pcie_slot)

    def numa_node(self, gpu: int) -> int | None:
        return self.near(gpu)

    def ancestor(self, one: int, other: int) -> Ancestor:
        return self.ancestors(one, other)

    def peer_to_peer(self, one: int, other: int) -> bool:
        return self.open_pairs(one, other)


def sockets(per_socket: int) -> Callable[[int, int], Ancestor]:
    def ancestor(one: int, other: int) -> Ancestor:
        same = one // per_socket == other // per_socket
        return Ancestor.NUMA_NODE if same else Ancestor.SYSTEM

    return ancestor


# DGX H100: 18 links of NVLink 4 from each of 8 GPUs to the NVSwitches.
DGX_H100 = Answers(8, (5, 16), {gpu: [NvLink(4, None, 26.562 * GB)] * 18 for gpu in range(8)})
# Workstation with four RTX 3090, `nvidia-smi nvlink -s`: 4 links of 14.062 GB/s over each of two
# bridges; GeForce drivers do not allow peer-to-peer over PCIe, only over the bridge.
RTX_3090 = Answers(
    4,
    (4, 16),
    {gpu: [NvLink(3, gpu ^ 1, 14.062 * GB)] * 4 for gpu in range(4)},
    ancestors=lambda one, other: Ancestor.HOST_BRIDGE,
    open_pairs=lambda one, other: one ^ 1 == other,
)
# Server with eight RTX 4090 on two processors: no NVLink, no peer-to-peer.
RTX_4090 = Answers(
    8,
    ancestors=sockets(4),
    open_pairs=lambda one, other: False,
    near=lambda gpu: gpu // 4,
)
# Server with eight L40S, four behind each PCIe switch, peer-to-peer allowed.
L40S = Answers(
    8,
    ancestors=lambda one, other: (
        Ancestor.SWITCH if one // 4 == other // 4 else Ancestor.HOST_BRIDGE
    ),
)
# DGX Station A100: four GPUs, 4 links of NVLink 3 from each to each other.
DGX_STATION = Answers(
    4,
    (4, 16),
    {
        gpu: [NvLink(3, peer, 25 * GB) for peer in range(4) if peer != gpu for _ in range(4)]
        for gpu in range(4)
    },
)
# DGX-1: a cube of eight V100, each with 6 links to 4 of the others, as `nvidia-smi topo -m` shows.
CUBE = {
    0: (1, 2, 3, 3, 4, 4),
    1: (0, 2, 2, 3, 5, 5),
    2: (0, 1, 1, 3, 3, 6),
    3: (0, 0, 1, 2, 2, 7),
}
DGX_1 = Answers(
    8,
    (3, 16),
    {
        gpu: [NvLink(2, peer if gpu < 4 else (peer + 4) % 8, 25 * GB) for peer in CUBE[gpu % 4]]
        for gpu in range(8)
    },
    ancestors=sockets(4),
)


def with_links(answers: Answers, count: int | None = None) -> ClusterProfile:
    count = count or answers.count
    links = links_between(range(count), answers)
    return gpus(1, count).model_copy(
        update={"intra": links.intra, "pair": links.pair, "host_bridge": links.host_bridge}
    )


def test_nvlink_to_a_switch_is_the_catalogue_s() -> None:
    links = links_between(range(8), DGX_H100)
    assert (links.intra, links.pair, links.host_bridge) == (catalogue.link("nvlink4"), None, None)
    assert links.notes == ()


def test_links_that_are_down_count_in_proportion() -> None:
    broken = Answers(8, (5, 16), dict(DGX_H100.links) | {3: [NvLink(4, None)] * 16})
    rate = links_between(range(8), broken).intra.bandwidth_bytes_per_s
    full = catalogue.link("nvlink4").bandwidth_bytes_per_s
    assert rate.value == pytest.approx(full.value * 16 / 18)
    assert rate.source is Source.DERIVED
    assert "16 of 18 links" in rate.origin


def test_a_workstation_has_bridged_pairs_and_goes_through_the_host_else() -> None:
    links = links_between(range(4), RTX_3090)
    assert links.pair is not None
    assert links.pair.name == "NVLink3 bridge of 4 links"
    # 4 x 14.062 GB/s, of which a bridge reaches 0.6.
    assert links.pair.bandwidth_bytes_per_s.value == pytest.approx(0.6 * 4 * 14.062 * GB)
    assert links.intra == catalogue.link("pcie4")
    assert links.host_bridge is not None
    assert not links.host_bridge.peer_to_peer
    assert "peer-to-peer is off" in links.notes[0]
    machine = with_links(RTX_3090)
    assert machine.bottleneck(2).name == "NVLink3 bridge of 4 links"
    assert machine.bottleneck(4).name != "NVLink3 bridge of 4 links"


def test_bridges_between_gpus_that_are_no_neighbours_are_named_not_used() -> None:
    crossed = Answers(
        4,
        (4, 16),
        {gpu: [NvLink(3, (gpu + 2) % 4, 14.062 * GB)] * 4 for gpu in range(4)},
        open_pairs=lambda one, other: (one + 2) % 4 == other,
    )
    links = links_between(range(4), crossed)
    assert links.pair is None
    assert "NVLink bridges join GPUs 0 and 2, 1 and 3: not neighbours" in links.notes[-1]
    # In the order 0 2 1 3, as CUDA_VISIBLE_DEVICES can give it, they are.
    assert links_between([0, 2, 1, 3], crossed).pair is not None


def test_two_bridged_gpus_are_joined_by_the_bridge_alone() -> None:
    links = links_between([2, 3], RTX_3090)
    assert links.intra.name == "NVLink3 bridge of 4 links"
    assert (links.pair, links.host_bridge) == (None, None)


def test_without_peer_to_peer_traffic_goes_through_the_host_with_a_note_on_sockets() -> None:
    links = links_between(range(8), RTX_4090)
    assert links.intra == catalogue.link("pcie4")
    upwards = links.intra.model_copy(update={"name": "PCIe4 x16 to the host"})
    assert links.host_bridge == HostBridge(link=upwards, devices=1, peer_to_peer=False)
    assert links.notes[0].startswith("GPUs hang under different processors (NUMA nodes 0, 1);")
    assert links.notes[1].startswith("peer-to-peer is off")


def test_gpus_behind_a_pcie_switch_share_its_way_up() -> None:
    machine = with_links(L40S)
    assert machine.host_bridge is not None
    assert (machine.host_bridge.devices, machine.host_bridge.peer_to_peer) == (4, True)
    slot = catalogue.link("pcie4").bandwidth_bytes_per_s.value
    # A ring over all crosses between the switches once each way; strided pairs four at once.
    assert machine.group_bandwidth(8).value == slot
    assert machine.group_bandwidth(2, 4).value == pytest.approx(slot / 4)


def test_nvlink_from_each_to_each_is_a_mesh() -> None:
    machine = with_links(DGX_STATION)
    assert machine.intra is not None
    assert machine.intra.wiring == "mesh"
    full = catalogue.link("nvlink3").bandwidth_bytes_per_s.value
    assert machine.group_bandwidth(4).value == full  # 3 x 4 = 12 links
    assert machine.group_bandwidth(2).value == pytest.approx(full / 3)


def test_a_cube_mesh_is_planned_as_published_with_a_note() -> None:
    links = links_between(range(8), DGX_1)
    assert links.intra == catalogue.link("nvlink2")
    assert "not all: planned with the published rate" in links.notes[0]


def test_the_narrowest_slot_counts() -> None:
    mixed = Answers(2, (4, 16), slots={1: (3, 8)})
    links = links_between(range(2), mixed)
    assert links.intra.name == "PCIe3 x8"
    half = catalogue.link("pcie3").bandwidth_bytes_per_s.value / 2
    assert links.intra.bandwidth_bytes_per_s.value == pytest.approx(half)
    assert links.notes[0].endswith("0: 4 x16, 1: 3 x8")


@pytest.fixture
def four_3090(monkeypatch: pytest.MonkeyPatch) -> None:
    def properties(index: int) -> SimpleNamespace:
        return SimpleNamespace(
            name="NVIDIA GeForce RTX 3090", total_memory=25_294_995_456, uuid=f"uuid-{index}"
        )

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr("profiles.machine.gpus.launch_time", lambda _: 5e-5)


@pytest.mark.usefixtures("four_3090")
def test_the_probe_puts_the_links_into_the_profile() -> None:
    cluster = probe(launcher=Launcher("plain"), nvml=RTX_3090)
    assert cluster.device.name == "RTX-3090-24GB"
    assert cluster.pair is not None
    assert cluster.host_bridge is not None
    assert any("peer-to-peer is off" in note for note in cluster.notes)


@pytest.mark.usefixtures("four_3090")
def test_without_the_driver_usual_links_are_assumed_with_a_note() -> None:
    device = catalogue.accelerator("RTX-3090-24GB")
    links = gpu_links(device, "nvidia-ml-py is not installed", count=4)
    assert links.intra == catalogue.link("pcie4")
    assert links.notes == (
        "nvidia-ml-py is not installed: NVLink, PCIe and peer-to-peer are not known here,"
        " PCIe4 x16 is assumed",
    )
    unknown = gpu_links(device.model_copy(update={"name": "NVIDIA Z999"}), "why", count=4)
    assert unknown.intra.bandwidth_bytes_per_s.source is Source.ASSUMED
    slices = gpu_links(device, Answers(2), count=4)
    assert "NVML does not know the devices that torch shows" in slices.notes[0]


@pytest.mark.usefixtures("four_3090")
def test_links_of_amd_gpus_are_reported_as_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4", raising=False)
    links = gpu_links(catalogue.accelerator("MI300X"), RTX_3090, count=4)
    assert links.intra == catalogue.link("xgmi-mi300x")
    assert "AMD devices are not looked at" in links.notes[0]


def library(**functions: object) -> ModuleType:
    """A pynvml with two GPUs under one PCIe switch, joined by two NVLinks of the third version."""

    class NVMLError(Exception):
        pass

    def only_two(handle: str, link: int) -> int:
        if link >= 2:
            raise NVMLError("Invalid Argument")
        return 1

    def refuse(*_: object) -> int:
        raise NVMLError("Not Supported")

    bus = {"a": b"00000000:01:00.0", "b": b"00000000:02:00.0"}
    other = {"a": "b", "b": "a"}
    rate = SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=25000))
    module = ModuleType("pynvml")
    defaults: dict[str, object] = {
        "NVMLError": NVMLError,
        "NVML_NVLINK_MAX_LINKS": 18,
        "NVML_FEATURE_ENABLED": 1,
        "NVML_SUCCESS": 0,
        "NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON": 90,
        "NVML_P2P_CAPS_INDEX_READ": 0,
        "NVML_P2P_STATUS_OK": 0,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: "ab"[index],
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetNvLinkState": only_two,
        "nvmlDeviceGetNvLinkVersion": lambda handle, link: 4,  # NVML_NVLINK_VERSION_3_0
        "nvmlDeviceGetNvLinkRemotePciInfo": lambda handle, link: SimpleNamespace(
            busId=bus[other[handle]]
        ),
        "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(busId=bus[handle]),
        "nvmlDeviceGetFieldValues": lambda handle, fields: [rate],
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda handle: 4,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda handle: 16,
        "nvmlDeviceGetNumaNodeId": refuse,
        "nvmlDeviceGetTopologyCommonAncestor": lambda one, other: 10,
        "nvmlDeviceGetP2PStatus": lambda one, other, index: 0,
    }
    for name, value in (defaults | functions).items():
        setattr(module, name, value)
    return module


def test_the_driver_is_asked_by_nvidia_s_library() -> None:
    with opened(library()) as nvml:
        assert not isinstance(nvml, str)
        assert nvml.uuids() == ["a", "b"]
        assert nvml.nvlinks(0) == [NvLink(3, 1, 25 * GB)] * 2
        assert nvml.pcie(0) == (4, 16)
        assert nvml.numa_node(0) is None  # this driver does not say
        assert nvml.ancestor(0, 1) is Ancestor.SWITCH
        assert nvml.peer_to_peer(0, 1)


def test_a_driver_that_does_not_answer_says_why() -> None:
    fake = library()

    def fail() -> None:
        raise fake.NVMLError("Driver Not Loaded")

    fake.nvmlInit = fail  # type: ignore[attr-defined]
    with opened(fake) as nvml:
        assert nvml == "NVML does not answer: Driver Not Loaded"


def test_every_name_that_is_asked_for_exists_in_nvidia_s_library() -> None:
    real = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    for name in vars(library()):
        if name.upper().startswith("NVML"):
            assert hasattr(real, name), name
    levels = {level: getattr(real, name) for level, name in NVML_LEVELS.items()}
    assert {level: int(level) for level in Ancestor} == levels


NVML_LEVELS = {
    Ancestor.SAME_BOARD: "NVML_TOPOLOGY_INTERNAL",
    Ancestor.SWITCH: "NVML_TOPOLOGY_SINGLE",
    Ancestor.SWITCHES: "NVML_TOPOLOGY_MULTIPLE",
    Ancestor.HOST_BRIDGE: "NVML_TOPOLOGY_HOSTBRIDGE",
    Ancestor.NUMA_NODE: "NVML_TOPOLOGY_NODE",
    Ancestor.SYSTEM: "NVML_TOPOLOGY_SYSTEM",
}


def cards(tmp_path: Path, *rates: str) -> Path:
    for index, rate in enumerate(rates):
        port = tmp_path / f"sys/class/infiniband/mlx5_{index}/ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text("4: ACTIVE\n")
        (port / "link_layer").write_text("InfiniBand\n")
        (port / "rate").write_text(f"{rate}\n")
    return tmp_path


IN_A_JOB = Launcher("torchrun", 0, 8, 0, 4, 2)


@pytest.mark.usefixtures("four_3090")
def test_the_rated_speed_of_the_fastest_cards_makes_the_network(tmp_path: Path) -> None:
    root = cards(tmp_path, *["200 Gb/sec (4X HDR)"] * 2, "100 Gb/sec (4X EDR)")
    cluster = probe(launcher=IN_A_JOB, nvml=RTX_3090, root=root)
    assert cluster.inter is not None
    assert cluster.inter.name == "InfiniBand 2x200Gb"
    rate = cluster.inter.bandwidth_bytes_per_s
    assert rate.value == pytest.approx(0.96 * 2 * 25 * GB)  # 24 of 25 GB/s a card are published
    assert rate.source is Source.DERIVED
    assert cluster.network_cards == 2
    assert "network cards that are not counted: mlx5_2" in cluster.notes


@pytest.mark.usefixtures("four_3090")
def test_an_unknown_network_is_assumed_with_a_note(tmp_path: Path) -> None:
    cluster = probe(launcher=IN_A_JOB, nvml=RTX_3090, root=tmp_path)
    assert cluster.inter is not None
    assert cluster.inter.bandwidth_bytes_per_s.source is Source.ASSUMED
    assert cluster.notes[-1] == (
        "no network card is visible here, only virtual interfaces or none;"
        " Ethernet 100Gb is assumed"
    )
