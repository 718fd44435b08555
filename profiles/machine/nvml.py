"""Links between GPUs as NVIDIA's driver reports them, through nvidia-ml-py if it is installed.

`Nvml` is the narrow door: `profiles.machine.gpus` reads nothing else, and tests answer in its
place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from importlib import import_module
from types import ModuleType
from typing import Protocol


class Ancestor(IntEnum):
    """The nearest thing that two GPUs hang under, numbered as NVML does (`nvidia-smi topo -m`)."""

    SAME_BOARD = 0
    SWITCH = 10  # one PCIe switch (PIX)
    SWITCHES = 20  # several PCIe switches, no host bridge (PXB)
    HOST_BRIDGE = 30  # a PCIe host bridge of a processor (PHB)
    NUMA_NODE = 40  # host bridges of one processor (NODE)
    SYSTEM = 50  # the link between processors (SYS)


@dataclass(frozen=True, slots=True)
class NvLink:
    """One active NVLink. `peer`: the GPU at its other end; None where that is a switch."""

    generation: int
    peer: int | None
    bytes_per_s: float | None = None  # one direction, as the driver gives it


class Nvml(Protocol):
    """GPUs are counted as the driver does, whatever CUDA_VISIBLE_DEVICES hides."""

    def uuids(self) -> Sequence[str]:
        """Without "GPU-" in front."""

    def nvlinks(self, gpu: int) -> Sequence[NvLink]: ...

    def pcie(self, gpu: int) -> tuple[int, int]:
        """Generation and lanes that the slot and the GPU can do together."""

    def numa_node(self, gpu: int) -> int | None: ...

    def ancestor(self, one: int, other: int) -> Ancestor: ...

    def peer_to_peer(self, one: int, other: int) -> bool:
        """True if one GPU can read the other's memory without the host."""


# How NVML numbers versions of NVLink (2.2 and 3.1 are steps between).
_GENERATIONS = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 5, 8: 6}


@contextmanager
def opened(library: ModuleType | None = None) -> Iterator[Nvml | str]:
    """The driver's answers, or in words why there are none."""
    if library is None:
        try:
            library = import_module("pynvml")
        except ImportError:
            yield "nvidia-ml-py is not installed (`pip install nvidia-ml-py`)"
            return
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        yield f"NVML does not answer: {error}"
        return
    try:
        yield _Library(library)
    finally:
        library.nvmlShutdown()


class _Library:
    """`Nvml` by nvidia-ml-py."""

    def __init__(self, library: ModuleType) -> None:
        self._nvml = library
        count = library.nvmlDeviceGetCount()
        self._gpus = [library.nvmlDeviceGetHandleByIndex(index) for index in range(count)]

    def uuids(self) -> Sequence[str]:
        return [_text(self._nvml.nvmlDeviceGetUUID(gpu)).removeprefix("GPU-") for gpu in self._gpus]

    def nvlinks(self, gpu: int) -> Sequence[NvLink]:
        nvml, handle, links = self._nvml, self._gpus[gpu], []
        buses = {self._bus(index): index for index in range(len(self._gpus))}
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            try:
                if nvml.nvmlDeviceGetNvLinkState(handle, link) != nvml.NVML_FEATURE_ENABLED:
                    continue
                version = nvml.nvmlDeviceGetNvLinkVersion(handle, link)
                remote = _text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)
            except nvml.NVMLError:
                continue  # this GPU has fewer links
            generation = _GENERATIONS.get(version, version)
            links.append(NvLink(generation, buses.get(remote.upper()), self._link_rate(handle)))
        return links

    def pcie(self, gpu: int) -> tuple[int, int]:
        handle = self._gpus[gpu]
        return (
            int(self._nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
            int(self._nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
        )

    def numa_node(self, gpu: int) -> int | None:
        try:
            node = int(self._nvml.nvmlDeviceGetNumaNodeId(self._gpus[gpu]))
        except self._nvml.NVMLError:
            return None
        return node if node >= 0 else None

    def ancestor(self, one: int, other: int) -> Ancestor:
        level = self._nvml.nvmlDeviceGetTopologyCommonAncestor(self._gpus[one], self._gpus[other])
        return Ancestor(int(level))

    def peer_to_peer(self, one: int, other: int) -> bool:
        nvml = self._nvml
        status = nvml.nvmlDeviceGetP2PStatus(
            self._gpus[one], self._gpus[other], nvml.NVML_P2P_CAPS_INDEX_READ
        )
        return bool(status == nvml.NVML_P2P_STATUS_OK)

    def _bus(self, gpu: int) -> str:
        return _text(self._nvml.nvmlDeviceGetPciInfo(self._gpus[gpu]).busId).upper()

    def _link_rate(self, handle: object) -> float | None:
        """MB/s of one link in one direction; not every driver answers."""
        nvml = self._nvml
        try:
            (value,) = nvml.nvmlDeviceGetFieldValues(
                handle, [nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON]
            )
        except nvml.NVMLError:
            return None
        rate = int(value.value.uiVal) if value.nvmlReturn == nvml.NVML_SUCCESS else 0
        return rate * 1e6 or None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
