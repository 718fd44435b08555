"""Language models' losses in other kernels: what of the logits still lives in memory."""

from __future__ import annotations

from collections.abc import Sequence

from profiles.model.affine import Affine
from profiles.model.layers import LayerCost
from profiles.model.profile import LOSS, UnitCost, UnitProfile
from profiles.workload.stack import Loss

# Parts that the tokens are taken in: torchtune, `num_output_chunks` of its chunked losses.
CHUNKS = 8
_SHARES = {Loss.CHUNKED: 1 / CHUNKS, Loss.HEAD: 0.0}


def with_loss(units: Sequence[UnitProfile], loss: Loss) -> tuple[UnitProfile, ...]:
    """Units whose loss runs as `loss` says; as they are where it is not the unit after the head.

    Chunked or in one kernel with the head, logits live a part at a time: their gradients are made
    in the forward and multiplied at once, so that what stays is the gradient of the head's input
    (Liger-Kernel, arXiv:2410.10989, section 3.2). One kernel with the head makes logits again in
    the backward: a product more (arXiv:2411.09009).
    """
    if loss not in _SHARES or not has_loss_after_head(units) or _is_parted(units[-2]):
        return tuple(units)
    *others, head, last = units
    kinds = head.costs
    return (
        *others,
        head.model_copy(update={"costs": {k: _head(kinds[k], loss) for k in kinds}}),
        last.model_copy(update={"costs": {k: _last(last.costs[k], kinds[k], loss) for k in kinds}}),
    )


def has_loss_after_head(units: Sequence[UnitProfile]) -> bool:
    """True if the last two units are a layer that makes logits and the loss of them."""
    if len(units) < 2 or units[-1].name != LOSS or set(units[-1].costs) != set(units[-2].costs):
        return False
    cost = next(iter(units[-2].costs.values()))
    return bool(cost.layers) and cost.layers[-1].reaches_output and not units[-2].is_block


def _is_parted(head: UnitProfile) -> bool:
    """True if only a part of its logits is live at a time already."""
    cost = next(iter(head.costs.values()))
    return cost.output_bytes.at(1) < cost.layers[-1].output_bytes.at(1)


def _head(cost: UnitCost, loss: Loss) -> UnitCost:
    share, layer = _SHARES[loss], cost.layers[-1]
    # Logits that stay for the backward are kept by what comes after the layer.
    logits = layer.after.activation_bytes
    after = layer.after.model_copy(
        update={"activation_bytes": Affine(), "selective_activation_bytes": Affine()}
    )
    again = layer.own.forward_flop if loss is Loss.HEAD else Affine()
    own = layer.own.model_copy(update={"backward_flop": layer.own.backward_flop + again})
    changed: LayerCost = layer.model_copy(update={"own": own, "after": after})
    selective = layer.after.selective_activation_bytes
    return cost.model_copy(
        update={
            "layers": (*cost.layers[:-1], changed),
            "backward_flop": cost.backward_flop + again,
            "activation_bytes": cost.activation_bytes + logits * -1.0,
            "selective_activation_bytes": cost.selective_activation_bytes + selective * -1.0,
            "output_bytes": cost.output_bytes * share,
            "forward_transient_bytes": cost.forward_transient_bytes * share,
            "backward_transient_bytes": cost.backward_transient_bytes * share,
        }
    )


def _last(cost: UnitCost, head: UnitCost, loss: Loss) -> UnitCost:
    layer = head.layers[-1]
    # One part's logits, over which their gradient is written.
    part = layer.output_bytes * _SHARES[loss]
    return cost.model_copy(
        update={
            "activation_bytes": layer.input_bytes,
            "selective_activation_bytes": layer.input_bytes,
            "input_bytes": cost.input_bytes * _SHARES[loss],
            "forward_transient_bytes": part,
            "backward_transient_bytes": part,
        }
    )
