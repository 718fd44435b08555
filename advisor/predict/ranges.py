"""Ranges: how far predictions of a kind of situation were from published runs.

A range holds nine of ten runs of sources that the constants were not fitted on: the 5 % and 95 %
quantiles of measured over predicted, each source left out of the fit in turn
(`python -m tests.scorecard.ranges` prints this table). A device family or kind of model with no
published run of its own gets the widest.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from advisor.predict.convnet_step import layered
from advisor.predict.setup import Range, Setup

# Measured over predicted, 5 % and 95 %.
TIME: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "dense": (0.8, 1.25),
        "experts": (0.6, 1.6),
        "small": (0.5, 2.0),
        # Of 379 setups on one device or as replicas, and 17 of pipelines, each source left out
        # (`python -m tests.scorecard.fit_convnets`): 0.85 to 1.37 and 0.93 to 1.55; 0.71 to 1.60.
        "layers": (0.85, 1.45),
        "stages": (0.7, 1.6),
    }
)
# 103 cards that one benchmark filled on purpose were met within 0.97 to 1.07; U-Nets of pipelines,
# whose batches had to be guessed, within 0.92 to 1.05. Wider, as both rest on one source each.
MEMORY_OF_CONVOLUTIONS = (0.85, 1.2)


def situation_of(setup: Setup) -> str:
    """The kind of run that decides how wide a range is."""
    if layered(setup) is not None:
        return "stages" if setup.layout.pp > 1 or setup.software.recompute == "full" else "layers"
    shape = setup.shape
    if shape is not None and shape.experts:
        return "experts"
    return "dense"


def time_range(setup: Setup, seconds: float) -> Range:
    """A step time with the range of its situation."""
    low, high = TIME[situation_of(setup)]
    return Range(value=seconds, low=seconds * low, high=seconds * high)


def memory_range(setup: Setup, allocated: float) -> Range:
    """Memory of a network of convolutions with its range."""
    low, high = MEMORY_OF_CONVOLUTIONS
    return Range(value=allocated, low=allocated * low, high=allocated * high)
