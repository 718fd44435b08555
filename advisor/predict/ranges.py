"""Prediction ranges: scatter of measured over predicted, by kind of run.

Ends are the 5 % and 95 % quantiles of published over predicted, of the runs of the scorecard
(`python -m tests.scorecard`), a little wider where few were there. A step that waits for its host
is known worst, then mixtures of experts, whose software is young.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from advisor.cost import Estimate
from advisor.predict.setup import Setup

Range = tuple[float, float]
# Steps with at least this share of launch time are host-bound.
HOST_BOUND = 0.2
TIME: Mapping[str, Range] = MappingProxyType(
    {
        "dense": (0.84, 1.5),
        "experts": (0.5, 1.95),
        "images": (0.68, 1.25),
        "host": (0.7, 6.0),
    }
)
MEMORY: Mapping[str, Range] = MappingProxyType(
    {
        "dense": (0.88, 1.45),
        "experts": (0.66, 1.25),
        "images": (0.88, 1.15),
        "host": (0.8, 1.5),
    }
)
# Without known software, either end is twice as far: assumed.
GENERIC = 1.3


def kind_of(setup: Setup, estimate: Estimate) -> str:
    """Kind of run, which selects the range."""
    if estimate.time.launch_s > HOST_BOUND * estimate.step_s and setup.shape is not None:
        return "host"
    if setup.shape is None:
        return "images"
    return "experts" if setup.shape.experts else "dense"


def ranges(setup: Setup, estimate: Estimate) -> tuple[Range, Range]:
    """Return factors of time and memory over the estimate; 90 % of true values lie within."""
    kind = kind_of(setup, estimate)
    wider = GENERIC if setup.software.stack.is_generic else 1.0
    (low, high), (least, most) = TIME[kind], MEMORY[kind]
    return (low / wider, high * wider), (least / wider, most * wider)
