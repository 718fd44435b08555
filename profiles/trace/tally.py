"""Sums the costs of scopes by unit; fits two runs to costs that grow with the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter

from profiles.model.profile import GLUE, LOSS, Affine, UnitCost
from profiles.model.work import FusibleKind
from profiles.trace.chains import add_savings, layouts, savings
from profiles.trace.layer_tally import (
    LayerSum,
    attention_calls,
    fusibles,
    layer_cost,
    noted_products,
)
from profiles.trace.scopes import (
    Attended,
    LayerSegment,
    Noted,
    Saving,
    Savings,
    Scope,
    trained_products,
)
from profiles.trace.timeline import Timeline


@dataclass(slots=True)
class Cost:
    """Of one unit at one batch size; the fields of `UnitCost`."""

    forward_flop: int = 0
    backward_flop: int = 0
    forward_moved_bytes: int = 0
    backward_moved_bytes: int = 0
    forward_cycles: int = 0
    backward_cycles: int = 0
    forward_kernels: int = 0
    backward_kernels: int = 0
    activation_bytes: int = 0
    selective_activation_bytes: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    forward_transient_bytes: int = 0
    backward_transient_bytes: int = 0
    layers: dict[str, LayerSum] = field(default_factory=dict)
    products: tuple[Noted, ...] = ()
    attention: tuple[Attended, ...] = ()
    fusible: Savings = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SavedBytes:
    """Bytes kept for backward, by the place that keeps them and of those by the part of it that
    made them; `selective`: under selective recompute."""

    by_scope: Mapping[Scope, int]
    selective_by_scope: Mapping[Scope, int]
    by_part: Mapping[LayerSegment, int]
    selective_by_part: Mapping[LayerSegment, int]


def tally(
    scopes: Sequence[Scope],
    saved_bytes: SavedBytes,
    timeline: Timeline,
    *,
    ignored: frozenset[int],
    key: Callable[[Scope], str] = attrgetter("name"),
) -> dict[str, Cost]:
    """All calls of a unit together, in the order of first calls; of transients the highest.

    Args:
        timeline: has the windows (scope, is_backward); `ignored` allocations count nowhere.
        key: of the costs of a scope.
    """
    peaks = timeline.peaks(ignored=ignored)
    costs: dict[str, Cost] = {}
    for called in scopes:
        cost = costs.setdefault(key(called), Cost())
        scope = called.stands_for or called
        cost.forward_flop += scope.forward.flop
        cost.backward_flop += scope.backward.flop
        cost.forward_moved_bytes += scope.forward.moved_bytes
        cost.backward_moved_bytes += scope.backward.moved_bytes
        cost.forward_cycles += scope.forward.cycles
        cost.backward_cycles += scope.backward.cycles
        launches = scope.launches
        cost.forward_kernels += launches[0]
        cost.backward_kernels += launches[1]
        cost.activation_bytes += saved_bytes.by_scope.get(scope, 0)
        cost.selective_activation_bytes += saved_bytes.selective_by_scope.get(scope, 0)
        cost.input_bytes += scope.input_bytes
        cost.output_bytes += scope.output_bytes
        forward, backward = peaks.get((scope, False), 0), peaks.get((scope, True), 0)
        cost.forward_transient_bytes = max(cost.forward_transient_bytes, forward)
        cost.backward_transient_bytes = max(cost.backward_transient_bytes, backward)
        cost.products += trained_products(scope.forward, scope.backward)
        cost.attention += scope.attention.trained()
        saved = savings(scope.chains, is_loss=called.name == LOSS)
        add_savings(cost.fusible, saved.get(None, {}))
        parts = [part for layer in scope.layers.values() for part in (layer.own, layer.after)]
        add_savings(cost.fusible, layouts(scope, parts))
        for path, layer in scope.layers.items():
            total = cost.layers.setdefault(path, LayerSum(layer))
            total.add(
                layer,
                saved_bytes.by_part,
                saved_bytes.selective_by_part,
                saved.get(layer.after, {}),
            )
    losses = [scope for scope in scopes if scope.name == LOSS]
    unmade = {m for scope in losses for chain in scope.chains for m in chain.unmade}
    if unmade and costs[LOSS].fusible:
        fused = timeline.peaks(ignored=ignored | unmade)
        windows = [(scope, is_backward) for scope in losses for is_backward in (False, True)]
        spared = max(peaks.get(window, 0) - fused.get(window, 0) for window in windows)
        add_savings(costs[LOSS].fusible, {FusibleKind.LOSS: Saving(transient_bytes=spared)})
    return costs


def glue_costs(
    scopes: Sequence[Scope], saved_bytes: SavedBytes, timeline: Timeline, *, ignored: frozenset[int]
) -> dict[str, Cost]:
    """Costs of code between calls by the unit that is called next: see `ModelProfile.glue`."""
    between = [scope for scope in scopes if scope.name == GLUE]
    costs = tally(
        between, saved_bytes, timeline, ignored=ignored, key=lambda scope: scope.before or GLUE
    )
    costs = {unit: cost for unit, cost in costs.items() if cost != Cost()}
    return costs if costs.keys() - {GLUE} else {}


def fitted(
    once: Mapping[str, Cost], twice: Mapping[str, Cost] | None, samples: int
) -> dict[str, UnitCost]:
    """Costs by unit from a run over `samples`, and one over twice as many if there is one."""
    costs: dict[str, UnitCost] = {}
    last: tuple[Cost, Cost | None] | None = None
    unit_cost = UnitCost()
    for name, cost in once.items():
        pair = cost, None if twice is None else twice.get(name, Cost())
        if pair != last:  # of repeated blocks all but the ends cost the same
            last, unit_cost = pair, _unit_cost(*pair, samples)
        costs[name] = unit_cost
    return costs


def _unit_cost(one: Cost, two: Cost | None, samples: int) -> UnitCost:
    def line(once: int, twice: int | None) -> Affine:
        return affine(once, twice, samples)

    values: dict[str, object] = {}
    for name in (f.name for f in fields(Cost)):
        value = getattr(one, name)
        if name.endswith("_kernels"):
            values[name] = value
        elif name not in ("layers", "products", "attention", "fusible"):
            values[name] = line(value, None if two is None else getattr(two, name))
    values["layers"] = [
        layer_cost(layer, two.layers.get(path) if two is not None else None, line, samples)
        for path, layer in one.layers.items()
    ]
    values["products"] = noted_products(
        one.products, None if two is None else two.products, samples
    )
    values["attention"] = attention_calls(
        one.attention, None if two is None else two.attention, samples
    )
    values["fusible"] = fusibles(one.fusible, None if two is None else two.fusible, line)
    return UnitCost.model_validate(values)


def affine(one: int, two: int | None, samples: int) -> Affine:
    """The line through `one` at `samples` and `two` at twice as many; never below zero.

    Without a second point, and where the line would be negative at one sample, it is proportional
    (to the larger batch, which is the larger figure per sample then). What shrinks counts as fixed.

    >>> affine(30, 50, samples=2)
    Affine(fixed=10.0, per_sample=10.0)
    """
    if two is None:
        return Affine(per_sample=one / samples)
    if two < one:
        return Affine(fixed=one)
    per_sample = (two - one) / samples
    fixed = 2 * one - two
    if fixed + per_sample < 0:
        return Affine(per_sample=two / (2 * samples))
    return Affine(fixed=fixed, per_sample=per_sample)
