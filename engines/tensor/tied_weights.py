"""Weights that several layers share: split in all of their places alike, or in none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from torch import nn

from engines.tensor.layers import slices_of
from engines.tensor.styles import LAYER_KINDS, Kind, Style
from profiles.model.flow import GLUE, LOSS, Flow

Place = tuple[str, str]
"""(module path, name of its parameter)."""


def split_differently(
    model: nn.Module,
    styles: Mapping[str, Sequence[Style]],
    flow: Flow,
    *,
    running: Sequence[str],
) -> list[str]:
    """The layers in `styles` with a parameter that another place has whole or otherwise split.

    Args:
        running: the units that are called. What other modules hold, `flow` says where it is used.
    """
    by_name = dict(model.named_parameters())
    elsewhere = {
        by_name[name]
        for call in flow.calls
        for name in call.parameters
        if call.unit in (GLUE, LOSS) or not _holds(model.get_submodule(call.unit), by_name[name])
    }
    places: dict[nn.Parameter, dict[str, list[Place]]] = {}
    for unit in running:
        for path, module in model.get_submodule(unit).named_modules(prefix=unit):
            for own, parameter in module.named_parameters(recurse=False):
                places.setdefault(parameter, {}).setdefault(unit, []).append((path, own))
    return [
        path
        for parameter, holders in places.items()
        if parameter in elsewhere or not _is_cut_alike(model, styles, holders.values())
        for path, _ in chain.from_iterable(holders.values())
        if path in styles
    ]


def _is_cut_alike(
    model: nn.Module, styles: Mapping[str, Sequence[Style]], holders: Iterable[Sequence[Place]]
) -> bool:
    """True if every unit that holds a parameter splits it, and all in the same way.

    Within a unit the proof has seen to it: there only one of the places need be a layer.
    """
    cuts = set()
    for places in holders:
        here = {
            slices_of(model.get_submodule(path), style).get(own)
            for path, own in places
            for style in styles.get(path, ())
            if style.kind in LAYER_KINDS or (style.kind is Kind.BIAS and own in style.sizes)
        }
        cuts |= here or {None}
    return len(cuts) == 1


def _holds(module: nn.Module, parameter: nn.Parameter) -> bool:
    return any(own is parameter for own in module.parameters())
