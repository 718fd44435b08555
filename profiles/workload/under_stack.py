"""A model's costs under another software stack: other attention, fused chains, another loss."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from profiles.model.affine import Affine
from profiles.model.layers import LayerCost, Stretch
from profiles.model.profile import ModelProfile, Numerics, UnitCost
from profiles.model.work import (
    AttentionCall,
    AttentionKernel,
    Fusible,
    FusibleKind,
    Product,
    ProductKind,
    attention_cost,
)
from profiles.workload.losses import with_loss
from profiles.workload.stack import Loss, Selective, Stack

AMOUNTS = (
    "forward_flop",
    "backward_flop",
    "forward_moved_bytes",
    "backward_moved_bytes",
    "forward_cycles",
    "backward_cycles",
    "activation_bytes",
    "selective_activation_bytes",
)
CYCLES = ("forward_cycles", "backward_cycles")
_LAID_OUT = Stack(name="maps as they lie", fused=(FusibleKind.LAYOUT,))
_Part = TypeVar("_Part", Stretch, UnitCost)
_OF_TORCH = (Loss.MATERIALISED, Loss.CHUNKED)
_Change = dict[str, float]


def under_stack(model: ModelProfile, stack: Stack) -> ModelProfile:
    """`model` with the kernels of `stack`. Costs of what was not noted by kind stay as they are.

    Idempotent: a profile that was counted for a stack says so and is returned unchanged.
    """
    if stack.name == model.stack or not _changes_kernels(stack):
        return model
    changed = _with_costs(model, lambda cost: _unit_cost(cost, stack))
    units = with_loss(changed.units, stack.loss, chunks=stack.loss_chunks)
    return changed.model_copy(update={"units": units, "stack": stack.name})


def on_device(model: ModelProfile, *, is_processor: bool) -> ModelProfile:
    """`model` without cycles that were counted of the other kind of devices."""
    if (model.on_processor is not False) is is_processor or not _has_cycles(model):
        return model
    return _with_costs(model, _idle)


def in_plain_fp32(model: ModelProfile) -> ModelProfile:
    """`model` with maps left as they lie where it computes in fp32, whose kernels of convolutions
    take any layout; those of matrix units (16 bits, TF32) have them turned around."""
    costs = (unit.costs.get(Numerics.AS_BUILT, UnitCost()) for unit in model.units)
    if model.dtype != "float32" or not any(map(_turns_maps, costs)):
        return model
    return _with_costs(model, _as_they_lie, (Numerics.AS_BUILT,))


def in_channels_last(model: ModelProfile) -> ModelProfile | None:
    """`model` with the channels of a position side by side in all maps, as matrix units take them:
    what its capture in channels last is. None where no maps are laid out anew, or where kernels of
    accelerators were not counted."""
    costs = (cost for unit in model.units for cost in unit.costs.values())
    if model.on_processor is not False or not any(map(_turns_maps, costs)):
        return None
    return _with_costs(model, lambda cost: _normed_by_rows(_as_they_lie(cost)))


def _as_they_lie(cost: UnitCost) -> UnitCost:
    return _unit_cost(cost, _LAID_OUT)


def _normed_by_rows(cost: UnitCost) -> UnitCost:
    """Batch norms as bound by memory: their input is read once more, and back once more with the
    gradient, beside what a product of theirs has as once each."""
    own, *again = _without_norms(cost)
    layers = []
    for layer in cost.layers:
        (inner, *first), (after, *then) = _without_norms(layer.own), _without_norms(layer.after)
        again = [a + b + c for a, b, c in zip(again, first, then, strict=True)]
        layers.append(layer.model_copy(update={"own": inner, "after": after}))
    forward, backward = again
    return own.model_copy(
        update={
            "layers": tuple(layers),
            "forward_moved_bytes": cost.forward_moved_bytes + forward,
            "backward_moved_bytes": cost.backward_moved_bytes + backward,
        }
    )


def _without_norms(part: _Part) -> tuple[_Part, Affine, Affine]:
    """The part, and the bytes that its norms read again, forward and backward."""
    forward, backward, others = Affine(), Affine(), list[Product]()
    for product in part.products:
        if product.kind is ProductKind.ELEMENTWISE:
            forward += (product.forward_bytes or Affine()) * (1 / 2)
            backward += (product.backward_bytes or Affine()) * (2 / 3)
        else:
            others.append(product)
    changed = part.model_copy(
        update={
            "products": tuple(others),
            "forward_moved_bytes": part.forward_moved_bytes + forward,
            "backward_moved_bytes": part.backward_moved_bytes + backward,
        }
    )
    return changed, forward, backward


def _turns_maps(cost: UnitCost) -> bool:
    inside = (f for layer in cost.layers for f in (*layer.own.fusible, *layer.after.fusible))
    return any(f.kind is FusibleKind.LAYOUT for f in (*cost.fusible, *inside))


def _with_costs(
    model: ModelProfile,
    change: Callable[[UnitCost], UnitCost],
    kinds: Collection[Numerics] = tuple(Numerics),
) -> ModelProfile:
    """`model` with every cost of these kinds changed. Equal blocks share their costs, and go on
    sharing them: what is worked out of a block is worked out once for all that are equal."""

    def changed(kind: Numerics, cost: UnitCost) -> UnitCost:
        return change(cost) if kind in kinds else cost

    done: dict[int, dict[Numerics, UnitCost]] = {}
    units = []
    for unit in model.units:
        key = id(unit.costs)
        if key not in done:
            done[key] = {kind: changed(kind, cost) for kind, cost in unit.costs.items()}
        units.append(unit.model_copy(update={"costs": done[key]}))
    glue = {
        kind: {unit: changed(kind, cost) for unit, cost in costs.items()}
        for kind, costs in model.glue.items()
    }
    return model.model_copy(update={"units": tuple(units), "glue": glue})


def _has_cycles(model: ModelProfile) -> bool:
    costs = (cost for unit in model.units for cost in unit.costs.values())
    return any(cost.forward_cycles or cost.backward_cycles for cost in costs)


def _idle(cost: UnitCost) -> UnitCost:
    none = dict.fromkeys(CYCLES, Affine())
    layers = tuple(
        layer.model_copy(
            update={
                "own": layer.own.model_copy(update=none),
                "after": layer.after.model_copy(update=none),
            }
        )
        for layer in cost.layers
    )
    return cost.model_copy(update={**none, "layers": layers})


def calls_processor(model: ModelProfile) -> bool:
    """True if attention was counted as torch's kernel for processors runs it."""
    costs = (cost for unit in model.units for cost in unit.costs.values())
    return any(call.kernel is AttentionKernel.CPU for cost in costs for call in cost.calls())


def _changes_kernels(stack: Stack) -> bool:
    return bool(
        stack.attention
        or stack.fused
        or stack.compiled
        or stack.loss is not Loss.MATERIALISED
        or stack.selective is not Selective.OPERATORS
    )


def _unit_cost(cost: UnitCost, stack: Stack) -> UnitCost:
    total: _Change = {}
    kernels = [0, 0]

    def changed(part: Stretch | UnitCost) -> _Change:
        change: _Change = {}
        for fusible in part.fusible:
            if _is_saved(fusible, stack):
                _add(change, _saved(fusible, stack, part.activation_bytes.per_sample))
                kernels[0] -= fusible.forward_kernels
                kernels[1] -= fusible.backward_kernels
        for call in part.attention:
            wanted = attention_cost(call, stack.attention or call.kernel)
            was = attention_cost(call, call.kernel)
            for field in ("forward_flop", "backward_flop", "forward_moved_bytes",
                          "backward_moved_bytes"):  # fmt: skip
                _add(change, {field: getattr(wanted, field) - getattr(was, field)})
            kernels[0] += wanted.forward_kernels - was.forward_kernels
            kernels[1] += wanted.backward_kernels - was.backward_kernels
            core = wanted.core_bytes - was.core_bytes
            _add(change, {"activation_bytes": core, "selective_activation_bytes": core})
        if stack.selective is Selective.CORE:
            # All is kept but scores; kernels without scores keep their few sums.
            saved = part.activation_bytes.per_sample + change.get("activation_bytes", 0.0)
            core = sum(
                attention_cost(call, stack.attention or call.kernel).core_bytes
                for call in part.attention
            )
            wanted_bytes = saved - core
            if isinstance(part, Stretch):
                wanted_bytes -= part.core_bytes.per_sample
            change["selective_activation_bytes"] = (
                wanted_bytes - part.selective_activation_bytes.per_sample
            )
        return change

    layers = []
    for layer in cost.layers:
        own, after = changed(layer.own), changed(layer.after)
        _add(total, own)
        _add(total, after)
        layers.append(_layer(layer, own, after, stack))
    inside = Stretch(**{name: _rest(cost, name) for name in AMOUNTS}, fusible=cost.fusible,
                     attention=cost.attention)  # fmt: skip
    _add(total, changed(inside))
    spared = _transients_saved(cost, stack)
    update: dict[str, object] = {name: _moved(getattr(cost, name), total.get(name, 0.0))
                                 for name in AMOUNTS}  # fmt: skip
    update |= {
        "forward_kernels": max(0, cost.forward_kernels + kernels[0]),
        "backward_kernels": max(0, cost.backward_kernels + kernels[1]),
        "layers": tuple(layers),
        "attention": tuple(_by(call, stack) for call in cost.attention),
        "fusible": tuple(f for f in cost.fusible if not _is_saved(f, stack)),
        "forward_transient_bytes": _moved(cost.forward_transient_bytes, -spared[0]),
        "backward_transient_bytes": _moved(cost.backward_transient_bytes, -spared[1]),
    }
    return cost.model_copy(update=update)


def _rest(cost: UnitCost, name: str) -> Affine:
    """Of the unit, what no stretch of a layer counts."""
    whole: Affine = getattr(cost, name)
    inside = [getattr(part, name) for layer in cost.layers for part in (layer.own, layer.after)]
    return Affine(
        fixed=whole.fixed - sum(part.fixed for part in inside),
        per_sample=whole.per_sample - sum(part.per_sample for part in inside),
    )


def _is_saved(fusible: Fusible, stack: Stack) -> bool:
    is_loss = fusible.kind is FusibleKind.LOSS and stack.loss not in _OF_TORCH
    return is_loss or stack.fuses(fusible.kind)


def _is_in_place(fusible: Fusible, stack: Stack) -> bool:
    return fusible.kind is FusibleKind.LOSS and stack.loss is Loss.IN_PLACE


def _transients_saved(cost: UnitCost, stack: Stack) -> tuple[float, float]:
    """Forward and backward. In place, the fp32 copy is made and then a gradient in 16 bits."""
    done = [fusible for fusible in cost.fusible if _is_saved(fusible, stack)]
    if any(_is_in_place(fusible, stack) for fusible in done):
        there, back = cost.forward_transient_bytes, cost.backward_transient_bytes
        saved = cost.activation_bytes.per_sample
        return max(0.0, there.per_sample - saved), max(0.0, back.per_sample - saved / 2)
    spared = sum(fusible.transient_bytes for fusible in done)
    return spared, spared


def _saved(fusible: Fusible, stack: Stack, saved_bytes: float) -> _Change:
    """Of a part that keeps `kept` bytes. In place, the fp32 copy of the logits stays, and the
    16-bit ones, half as many bytes, do not where they did."""
    stays = saved_bytes / 2 if _is_in_place(fusible, stack) else 0.0
    return {
        "forward_moved_bytes": -fusible.forward_moved_bytes,
        "backward_moved_bytes": -fusible.backward_moved_bytes,
        "forward_cycles": -fusible.forward_cycles,
        "backward_cycles": -fusible.backward_cycles,
        "activation_bytes": -max(0.0, fusible.activation_bytes - stays),
    }


def _layer(layer: LayerCost, own: _Change, after: _Change, stack: Stack) -> LayerCost:
    if not own and not after:
        return layer
    return layer.model_copy(
        update={
            "own": _stretch(layer.own, own, stack),
            "after": _stretch(layer.after, after, stack),
        }
    )


def _stretch(stretch: Stretch, change: _Change, stack: Stack) -> Stretch:
    update: dict[str, object] = {
        name: _moved(getattr(stretch, name), delta) for name, delta in change.items()
    }
    update["attention"] = tuple(_by(call, stack) for call in stretch.attention)
    update["fusible"] = tuple(f for f in stretch.fusible if not _is_saved(f, stack))
    return stretch.model_copy(update=update)


def _by(call: AttentionCall, stack: Stack) -> AttentionCall:
    return call.model_copy(update={"kernel": stack.attention or call.kernel})


def _moved(amount: Affine, delta: float) -> Affine:
    left = max(0.0, amount.per_sample + delta)
    return Affine(fixed=max(amount.fixed, -left), per_sample=left)  # of one sample not below zero


def _add(total: _Change, more: Mapping[str, float]) -> None:
    for name, value in more.items():
        total[name] = total.get(name, 0.0) + value
