"""Language models' losses in other kernels: what of the logits still lives in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from profiles.model.affine import Affine
from profiles.model.layers import LayerCost
from profiles.model.profile import LOSS, Numerics, UnitCost, UnitProfile
from profiles.workload.stack import Loss


@dataclass(frozen=True, slots=True)
class Head:
    """The layer that makes the logits of the loss; `name` is its path in the model."""

    name: str
    layer: LayerCost


def head_of(units: Sequence[UnitProfile]) -> Head | None:
    """The last layer of the unit before the loss, if the loss is of what that returns."""
    if len(units) < 2 or units[-1].name != LOSS or set(units[-1].costs) != set(units[-2].costs):
        return None
    unit, (cost, *_) = units[-2], units[-2].costs.values()
    if unit.is_block or not cost.layers or not cost.layers[-1].reaches_output:
        return None
    layer = cost.layers[-1]
    return Head(".".join(filter(None, (unit.name, layer.path))), layer)


def with_loss(units: Sequence[UnitProfile], loss: Loss, *, chunks: int) -> tuple[UnitProfile, ...]:
    """Units whose loss runs as `loss` says; as they are where it is not the unit after the head.

    In one kernel with the head no logits live; they are made again in the backward: a product more
    (arXiv:2411.09009). In `chunks` of the tokens, what the loss keeps and takes for its backward
    lives a chunk at a time. Gradients are made in the forward and multiplied at once, so that what
    stays is that of the head's input and the sum of those of its weight (Liger-Kernel,
    arXiv:2410.10989, section 3.2), which every chunk reads and writes.
    """
    ways = {Loss.CHUNKED: chunks, Loss.HEAD: 0}
    if loss not in ways or head_of(units) is None or _is_parted(units[-2]):
        return tuple(units)
    *others, head, last = units
    kinds = head.costs
    changed = {
        kind: _changed(kind, cost, last.costs[kind], ways[loss]) for kind, cost in kinds.items()
    }
    return (
        *others,
        head.model_copy(update={"costs": {kind: pair[0] for kind, pair in changed.items()}}),
        last.model_copy(update={"costs": {kind: pair[1] for kind, pair in changed.items()}}),
    )


def _is_parted(head: UnitProfile) -> bool:
    """True if only a part of its logits is live at a time already."""
    cost = next(iter(head.costs.values()))
    return cost.output_bytes.at(1) < cost.layers[-1].output_bytes.at(1)


def _changed(
    kind: Numerics, head: UnitCost, last: UnitCost, chunks: int
) -> tuple[UnitCost, UnitCost]:
    """Head and loss, in one kernel where there are no chunks."""
    layer = head.layers[-1]
    share, runs = (1 / chunks, chunks) if chunks else (0.0, 1)
    # Logits that stay for the backward are kept by what comes after the layer.
    saved, selective = layer.after.activation_bytes, layer.after.selective_activation_bytes
    none = {"activation_bytes": Affine(), "selective_activation_bytes": Affine()}
    again = Affine() if chunks else layer.own.forward_flop
    summed = Affine(fixed=_weight_gradient_bytes(layer, kind) * bool(chunks))
    added = summed * (2.0 * (runs - 1))
    backward = {"backward_flop": again, "backward_moved_bytes": added}
    own = layer.own.model_copy(
        update={name: getattr(layer.own, name) + more for name, more in backward.items()}
    )
    new_layer = layer.model_copy(update={"own": own, "after": layer.after.model_copy(update=none)})
    new_head = head.model_copy(
        update={
            "layers": (*head.layers[:-1], new_layer),
            **{name: getattr(head, name) + more for name, more in backward.items()},
            "forward_kernels": head.forward_kernels * runs,
            "backward_kernels": head.backward_kernels * runs,
            "activation_bytes": head.activation_bytes + saved * -1.0,
            "selective_activation_bytes": head.selective_activation_bytes + selective * -1.0,
            "output_bytes": head.output_bytes * share,
            "forward_transient_bytes": head.forward_transient_bytes * share,
            "backward_transient_bytes": head.backward_transient_bytes * share,
        }
    )
    stays = layer.input_bytes + summed
    part = (saved + last.activation_bytes + last.backward_transient_bytes) * share
    new_last = last.model_copy(
        update={
            "forward_kernels": last.forward_kernels * runs,
            "backward_kernels": last.backward_kernels * runs,
            "activation_bytes": stays,
            "selective_activation_bytes": stays,
            "input_bytes": Affine(),
            "forward_transient_bytes": part + stays,
            "backward_transient_bytes": Affine(),
        }
    )
    return new_head, new_last


def _weight_gradient_bytes(layer: LayerCost, kind: Numerics) -> float:
    """In the dtype of the product, fp32 under autocast; a tied weight has one too."""
    if layer.weight_bytes and not layer.weight_gradient_bytes:
        return 0.0  # frozen
    elements = layer.inputs * layer.outputs
    rows = layer.own.forward_flop.at(1) / (2 * elements)
    element_bytes = layer.output_bytes.at(1) / (rows * layer.outputs) if rows else 0.0
    return elements * element_bytes * (2 if kind is Numerics.BF16_AUTOCAST else 1)
