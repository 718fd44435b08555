"""A model built in bf16: parameters, gradients and states of its optimizer in 16 bits."""

from __future__ import annotations

from profiles.model.flow import Flow, UnitCall
from profiles.model.layers import LayerCost, Stretch
from profiles.model.profile import ModelProfile, Numerics, ParameterShape, UnitCost, UnitProfile


def half_numerics(model: ModelProfile) -> Numerics | None:
    """The numerics whose costs are those of a model in bf16; None where they are not known."""
    if model.dtype == "bfloat16":
        return Numerics.AS_BUILT
    is_known = model.dtype == "float32" and Numerics.BF16 in model.numerics
    return Numerics.BF16 if is_known else None


def in_bf16(model: ModelProfile) -> ModelProfile | None:
    """`model`, built in fp32, as `model.bfloat16()` would be looked at; None where its costs in
    bf16 are not known, or parameters are of other dtypes."""
    dtypes = {dtype for unit in model.units for dtype in unit.dtypes}
    if half_numerics(model) is not Numerics.BF16 or dtypes - {"float32"}:
        return None
    done: dict[int, dict[Numerics, UnitCost]] = {}
    units = []
    for unit in model.units:
        # Equal blocks share their costs: change them once.
        key = id(unit.costs)
        if key not in done:
            done[key] = {Numerics.AS_BUILT: _halved_cost(unit)}
        units.append(_halved_unit(unit, done[key]))
    glue = model.glue
    return model.model_copy(
        update={
            "units": tuple(units),
            "dtype": "bfloat16",
            "glue": {Numerics.AS_BUILT: glue[Numerics.BF16]} if Numerics.BF16 in glue else {},
            "flow": halved_flow(model.flow),
            "times": (),
            "config": None,
            "crossings": {},
        }
    )


def _halved_unit(unit: UnitProfile, costs: dict[Numerics, UnitCost]) -> UnitProfile:
    return unit.model_copy(
        update={
            "parameter_bytes": unit.parameter_bytes // 2,
            "gradient_bytes": unit.gradient_bytes // 2,
            "whole_bytes": unit.whole_bytes // 2,
            "dtypes": ("bfloat16",) * len(unit.dtypes),
            "trained_dtypes": ("bfloat16",) * len(unit.trained_dtypes),
            "shapes": tuple(map(_halved_shape, unit.shapes)),
            "whole_shapes": tuple(map(_halved_shape, unit.whole_shapes)),
            "costs": costs,
        }
    )


def _halved_shape(shape: ParameterShape) -> ParameterShape:
    return shape.model_copy(update={"element_bytes": shape.element_bytes // 2})


def _halved_cost(unit: UnitProfile) -> UnitCost:
    cost = unit.cost(Numerics.BF16)
    return cost.model_copy(update={"layers": tuple(map(_halved_layer, cost.layers))})


def _halved_layer(layer: LayerCost) -> LayerCost:
    """A layer's cost with weights in 16 bits, which are noted as built."""
    names = ("weight_bytes", "bias_bytes", "weight_gradient_bytes", "bias_gradient_bytes")
    halved = {name: getattr(layer, name) // 2 for name in names}
    parts = {"own": _halved_stretch(layer.own), "after": _halved_stretch(layer.after)}
    return layer.model_copy(update={**halved, **parts})


def _halved_stretch(part: Stretch) -> Stretch:
    halved = tuple(nbytes // 2 for nbytes in part.parameter_gradient_bytes)
    return part.model_copy(update={"parameter_gradient_bytes": halved})


def halved_flow(flow: Flow) -> Flow:
    """Bytes in 16 bits of what calls hand on in fp32."""

    def half(call: UnitCall) -> UnitCall:
        values = tuple(
            value.model_copy(update={"dtype": "bfloat16", "bytes": value.bytes * (0.5)})
            if value.dtype == "float32"
            else value
            for value in call.values
        )
        return call.model_copy(update={"values": values})

    return flow.model_copy(update={"calls": tuple(map(half, flow.calls))})
