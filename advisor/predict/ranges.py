"""Ranges: how far predictions of a kind of situation were from published runs.

A range holds nine of ten runs of sources that the constants were not fitted on: the 5 % and 95 %
quantiles of measured over predicted, each source left out of the fit in turn
(`python -m tests.scorecard.fit` prints them). What decides is how the step is spent: a step that
waits for its host is known worst, then mixtures of experts, whose software is young.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from advisor.predict.convnet_step import layered
from advisor.predict.setup import Range, Setup

# From this share on, a step is one that waits for its host.
HOST_BOUND = 0.3
# Devices whose transformers were timed, by the start of their names.
_SEEN = ("V100", "T4", "A100", "A800", "H100", "H200", "H800", "B200", "B300", "GB")
# Measured over predicted, 5 % and 95 %.
TIME: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "dense": (0.89, 1.17),
        "experts": (0.63, 1.56),
        "host": (0.84, 5.77),
        # Devices without a transformer's run among the published ones. Assumed: twice as wide.
        "other devices": (0.6, 1.4),
        # Of 379 setups on one device or as replicas, and 17 of pipelines, each source left out
        # (`python -m tests.scorecard.fit_convnets`).
        "layers": (0.85, 1.45),
        "stages": (0.7, 1.6),
    }
)
# Nine of ten of 103 cards that one benchmark filled on purpose lay within 0.97 to 1.07, U-Nets of
# pipelines within 0.92 to 1.05. Wider, as both rest on one source each.
MEMORY_OF_CONVOLUTIONS = (0.9, 1.12)


def situation_of(setup: Setup, *, host_share: float = 0.0) -> str:
    """The kind of run that decides how wide a range is.

    Args:
        host_share: of the step, waiting for the host.
    """
    if layered(setup) is not None:
        return "stages" if setup.layout.pp > 1 or setup.software.recompute == "full" else "layers"
    shape = setup.shape
    if host_share > HOST_BOUND:
        return "host"
    if not setup.cluster.device.name.startswith(_SEEN):
        return "other devices"
    if shape is not None and shape.experts:
        return "experts"
    return "dense"


def time_range(setup: Setup, seconds: float, *, host_share: float = 0.0) -> Range:
    """A step time with the range of its situation."""
    low, high = TIME[situation_of(setup, host_share=host_share)]
    return Range(value=seconds, low=seconds * low, high=seconds * high)


def memory_range(allocated: float, *, least: float) -> Range:
    """Memory of a network of convolutions with its range, which begins with that of `least`."""
    low, high = MEMORY_OF_CONVOLUTIONS
    return Range(value=allocated, low=least * low, high=allocated * high)
