"""LoRA: a frozen base in bf16 or 4 bits, and low-rank adapters that learn (arXiv:2106.09685).

A frozen layer has no gradient of its weight and no states; its adapters keep the input that it
would have kept, so that activations stay, and add a narrow one of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

from profiles.model.affine import Affine
from profiles.model.layers import LayerCost, LayerKind, Stretch
from profiles.model.profile import ModelProfile, Numerics, ParameterShape, UnitProfile
from profiles.workload.pure_bf16 import half_numerics, halved_flow
from profiles.workload.under_stack import AMOUNTS

BF16_BYTES = 2
# Adapters learn in fp32 beside a base in 16 bits (peft, `autocast_adapter_dtype`).
ADAPTER_BYTES = 4
# NF4 with double quantisation: 4 bits and 0.127 of scales (arXiv:2305.14314, section 3).
NF4_BYTES = 4.127 / 8
# Beside the layer: two products and the sum of both outputs, and twice as many back.
_KERNELS = 3
_MULTIPLIED = (LayerKind.LINEAR, LayerKind.TRANSPOSED)


def takes_lora(model: ModelProfile) -> bool:
    """True if `with_lora` applies: layers of blocks in 16 bits, and no experts, whose adapters are
    no layers."""
    blocks = list(model.blocks())
    return (
        half_numerics(model) is not None
        and bool(blocks)
        and not any(unit.experts for unit in model.units)
        and all(any(_adapted(unit, half_numerics(model))) for unit in blocks)
    )


def with_lora(model: ModelProfile, *, rank: int = 16, is_quantised: bool = False) -> ModelProfile:
    """`model` with adapters of `rank` on every linear layer of its blocks; all else is frozen in
    bf16, or in 4 bits in those layers.

    The result is a model built in bf16.
    """
    kind = half_numerics(model)
    assert kind is not None
    done: dict[int, UnitProfile] = {}
    units = []
    for unit in model.units:
        # Equal blocks share their costs: change them once.
        key = id(unit.costs)
        if key not in done:
            done[key] = _unit(unit, kind, model.dtype, rank=rank, is_quantised=is_quantised)
        units.append(done[key].model_copy(update={"name": unit.name}))
    return model.model_copy(
        update={
            "units": tuple(units),
            "dtype": "bfloat16",
            "glue": {Numerics.AS_BUILT: model.glue[kind]} if kind in model.glue else {},
            "flow": halved_flow(model.flow) if model.dtype == "float32" else model.flow,
            "times": (),
            "config": None,
            "unused": (),
            "crossings": {},
        }
    )


def _adapted(unit: UnitProfile, kind: Numerics | None) -> Iterator[LayerCost]:
    """Layers that get adapters: those that have a weight of their own."""
    if kind is not None and unit.is_block:
        for layer in unit.cost(kind).layers:
            if layer.kind in _MULTIPLIED and layer.weight_bytes:
                yield layer


def _unit(
    unit: UnitProfile, kind: Numerics, dtype: str, *, rank: int, is_quantised: bool
) -> UnitProfile:
    cost = unit.cost(kind)
    adapted = {layer.path for layer in _adapted(unit, kind)}
    scale = BF16_BYTES / (4 if dtype == "float32" else 2)
    layers, shapes, added = [], [], dict.fromkeys(AMOUNTS, Affine())
    parameter_bytes, learning, quantised = scale * unit.parameter_bytes, 0, 0.0
    for layer in cost.layers:
        frozen = _frozen(layer, scale)
        if layer.path in adapted:
            elements = rank * (layer.inputs + layer.outputs)
            learning += elements
            shapes += [(rank, layer.inputs), (layer.outputs, rank)]
            if is_quantised:
                weights = layer.inputs * layer.outputs
                parameter_bytes += weights * NF4_BYTES - scale * layer.weight_bytes
                quantised = max(quantised, float(BF16_BYTES * weights))
            frozen = _with_adapter(frozen, rank, is_quantised=is_quantised)
        layers.append(frozen)
        for name in AMOUNTS:
            for part in ("own", "after"):
                now = getattr(getattr(frozen, part), name)
                before = getattr(getattr(layer, part), name)
                added[name] = added[name] + now + before * -1.0
    adapter_kernels = _KERNELS * len(adapted)
    unpacked = len(adapted) * is_quantised
    # What is unpacked lives as long as its product.
    peak = Affine(fixed=quantised)
    changed = cost.model_copy(
        update={
            **{name: getattr(cost, name) + added[name] for name in AMOUNTS},
            "layers": tuple(layers),
            "forward_kernels": cost.forward_kernels + adapter_kernels + unpacked,
            "backward_kernels": cost.backward_kernels + 2 * adapter_kernels + unpacked,
            "forward_transient_bytes": cost.forward_transient_bytes + peak,
            "backward_transient_bytes": cost.backward_transient_bytes + peak,
        }
    )
    return unit.model_copy(
        update={
            "parameters": unit.parameters + learning,
            "trainable_parameters": learning,
            "parameter_bytes": round(parameter_bytes) + ADAPTER_BYTES * learning,
            "gradient_bytes": ADAPTER_BYTES * learning,
            "dtypes": ("bfloat16", "float32") if learning else ("bfloat16",) * bool(unit.dtypes),
            "shapes": tuple(
                ParameterShape(sizes=sizes, element_bytes=ADAPTER_BYTES) for sizes in shapes
            ),
            "costs": {Numerics.AS_BUILT: changed},
        }
    )


def _frozen(layer: LayerCost, scale: float) -> LayerCost:
    """Without the gradient of its weight: one product back, none of an embedding."""
    own = layer.own
    if layer.kind is LayerKind.EMBEDDING:
        back, moved = Affine(), Affine()
    else:
        is_trained = bool(layer.weight_gradient_bytes) or not layer.weight_bytes
        share = 0.5 if is_trained and layer.needs_input_gradient else 1.0
        if is_trained and not layer.needs_input_gradient:
            share = 0.0
        back = own.backward_flop * (share)
        moved = own.backward_moved_bytes * (share)
    return layer.model_copy(
        update={
            "weight_bytes": round(scale * layer.weight_bytes),
            "bias_bytes": round(scale * layer.bias_bytes),
            "weight_gradient_bytes": 0,
            "bias_gradient_bytes": 0,
            "own": _unlearned(own, backward_flop=back, backward_moved_bytes=moved),
            "after": _unlearned(layer.after),
        }
    )


def _unlearned(part: Stretch, **changes: Affine) -> Stretch:
    return part.model_copy(update={"parameter_gradient_bytes": (), **changes})


def _with_adapter(layer: LayerCost, rank: int, *, is_quantised: bool) -> LayerCost:
    """The layer beside x A B: both products forward, twice as many back."""
    own, weights = layer.own, layer.inputs * layer.outputs
    elements = rank * (layer.inputs + layer.outputs)
    narrow = layer.output_bytes * (rank / layer.outputs)
    flop = own.forward_flop * (elements / weights)
    # The input is read again, two outputs are written, and both are read for their sum.
    moved = layer.input_bytes + layer.output_bytes * (4.0)
    unpacking = Affine(fixed=is_quantised * weights * (NF4_BYTES + 2.0 * BF16_BYTES))
    weight_bytes = weights * NF4_BYTES if is_quantised else layer.weight_bytes
    return layer.model_copy(
        update={
            "weight_bytes": round(weight_bytes) + ADAPTER_BYTES * elements,
            "weight_gradient_bytes": ADAPTER_BYTES * elements,
            "own": own.model_copy(
                update={
                    "forward_flop": own.forward_flop + flop,
                    "backward_flop": own.backward_flop + flop * (2.0),
                    "forward_moved_bytes": own.forward_moved_bytes + moved + unpacking,
                    "backward_moved_bytes": own.backward_moved_bytes + moved * (2.0) + unpacking,
                    "activation_bytes": own.activation_bytes + narrow,
                    "selective_activation_bytes": own.selective_activation_bytes + narrow,
                }
            ),
        }
    )
