"""Generations of devices: what their matrix units and hosts have in common."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from profiles.cluster import Device

# By the start of a device's name; what is not listed is taken as "ampere".
_STARTS = (
    ("V100", "volta"),
    ("P100", "volta"),
    ("P40", "volta"),
    ("GTX", "volta"),
    ("T4", "turing"),
    ("Quadro", "turing"),
    ("TITAN", "turing"),
    ("RTX-20", "turing"),
    ("H100", "hopper"),
    ("H200", "hopper"),
    ("H800", "hopper"),
    ("H20", "hopper"),
    ("GH200", "hopper"),
    ("B200", "blackwell"),
    ("B300", "blackwell"),
    ("GB", "blackwell"),
)
# How much longer one thread takes than on the host of an H100 (Xeon 8480C, Golden Cove, to 3.8
# GHz): what vendors say of instructions a clock (Sunny Cove 18 % over Skylake, Golden Cove 19 %
# over that; Zen 2 and Broadwell within 7 % of Skylake) times the clocks of the usual hosts: 3.6 GHz
# beside a V100 (Xeon E5-2698 v4), 3.5 beside a T4 (8259CL), 3.4 beside an A100 (EPYC 7742).
_HOSTS: Mapping[str, float] = MappingProxyType(
    {"volta": 1.5, "turing": 1.5, "ampere": 1.45, "hopper": 1.0, "blackwell": 1.0}
)
# Grace: as many instructions a clock as Golden Cove, at 3.1 GHz.
SUPERCHIPS, _GRACE = ("GB", "GH"), 1.22
# Chips of this generation differ in how much power their boards admit, and products in a step are
# bound by it: their rate is in proportion to it. Watts per TFLOP/s of 16-bit peak of a GB200.
_POWER: Mapping[str, float] = MappingProxyType({"blackwell": 1200 / 2500})
# Best rate of fp8 products over twice that of bfloat16 ones (ml-engineering, maximum achievable
# matmul: H100 1403 over 2 x 795 TFLOP/s, B200 3433 over 2 x 1745).
_NARROW: Mapping[str, float] = MappingProxyType({"blackwell": 0.98})
_NARROW_ELSEWHERE = 0.88

# Attention that keeps no scores, as a share of products' rate, against an A100's: FlashAttention-2
# reaches 50 % and more of an A100's peak and 35 % of an H100's (0.7); kernels written for Hopper's
# instructions are 1.5 to 2 times as fast as those (arXiv 2307.08691, 2407.08608).
_OLDER_ATTENTION, _OWN_ATTENTION = 0.7, 1.2


def generation_of(device: str) -> str:
    """ "volta", "turing", "ampere", "hopper" or "blackwell"."""
    return next((kind for start, kind in _STARTS if device.startswith(start)), "ampere")


def host_slowness(device: str) -> float:
    """Time of a host thread beside this device over that beside an H100."""
    return _GRACE if device.startswith(SUPERCHIPS) else _HOSTS[generation_of(device)]


def narrow_share(device: str) -> float:
    """Of what fp8's larger peak promises, what products reach."""
    return _NARROW.get(generation_of(device), _NARROW_ELSEWHERE)


def attention_share(device: str, *, own_kernels: bool) -> float:
    """Rate of attention over products', against that on an A100.

    Args:
        own_kernels: whether they were written for the device, if it is later than an A100.
    """
    if generation_of(device) not in ("hopper", "blackwell"):
        return 1.0
    return _OWN_ATTENTION if own_kernels else _OLDER_ATTENTION


def power_share(device: Device) -> float:
    """What more or less power lets a board sustain, against its generation's."""
    reference = _POWER.get(generation_of(device.name))
    if reference is None or device.board_power_w is None:
        return 1.0
    peak = device.flop_per_s["bfloat16"].value / 1e12
    return device.board_power_w.value / peak / reference
