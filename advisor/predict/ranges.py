"""Ranges: how far predictions of a kind of situation were from published runs.

A range holds nine of ten runs of sources that the constants were not fitted on: the 5 % and 95 %
quantiles of measured over predicted, each source left out of the fit in turn
(`python -m tests.scorecard.ranges` prints this table). A device family or kind of model with no
published run of its own gets the widest.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from advisor.predict.setup import Range, Setup

# Measured over predicted, 5 % and 95 %.
TIME: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "dense": (0.8, 1.25),
        "experts": (0.6, 1.6),
        "small": (0.5, 2.0),
        "convolutions": (0.7, 1.5),
    }
)
MEMORY_OF_CONVOLUTIONS = (0.75, 1.3)


def situation_of(setup: Setup) -> str:
    """The kind of run that decides how wide a range is."""
    if setup.network is not None:
        return "convolutions"
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
