"""Layers that several families are made of."""

from __future__ import annotations

from profiles.closed_forms.families import kernels
from profiles.closed_forms.families import operations as ops
from profiles.closed_forms.families.memory import DType
from profiles.closed_forms.families.network import FamilyRun, FamilyUnit
from profiles.closed_forms.families.tape import Array

ACTIVATION_CLASSES = {
    "gelu": "GELUActivation",
    "gelu_new": "NewGELUActivation",
    "gelu_pytorch_tanh": "GELUTanh",
    "relu": "ReLU",
    "silu": "SiLUActivation",
    "swish": "SiLU",
    "tanh": "Tanh",
}
"""Modules of activation functions by transformers' names; `activate` has these."""
ACTIVATIONS = tuple(ACTIVATION_CLASSES)


def activate(x: Array, name: str) -> Array:
    """An activation function; `gelu_new` is written out in Python, operation by operation."""
    if name in ("relu", "tanh"):
        return ops.unary_by_result(x)
    if name == "gelu_new":
        # One expression, as there: what is in between goes as soon as it was used.
        half = ops.mul_number(x)
        return ops.mul(
            half,
            ops.add_number(
                ops.unary_by_result(ops.mul_number(ops.add(x, ops.mul_number(ops.power(x)))))
            ),
        )
    return ops.unary(x)


def next_token_loss(network: FamilyRun, logits: Array) -> Array:
    """Cross entropy in fp32 of each position's logits against the token that follows."""
    labels = network.ids()
    logits = ops.cast(logits, DType.FLOAT32)
    padded = network.tape.run([labels], (network.samples, network.length + 1), labels.dtype)
    targets = ops.contiguous_copy(ops.narrow(padded, 1, network.length))
    classes = logits.shape[-1]
    return kernels.cross_entropy(ops.reshape(logits, -1, classes), ops.reshape(targets, -1))


def token_loss(logits: Array, labels: Array) -> Array:
    """Cross entropy of each position's logits against its own label."""
    classes = logits.shape[-1]
    return kernels.cross_entropy(ops.reshape(logits, -1, classes), ops.reshape(labels, -1))


def head(network: FamilyRun, hidden: Array, vocab: int, embedding: FamilyUnit | None) -> Array:
    """Logits by a linear layer without bias, tied to the embedding if that is given."""
    tied = embedding.parameters[f"{embedding.name}.weight"] if embedding else None

    def project(unit: FamilyUnit, x: Array) -> Array:
        return unit.linear(x, "", vocab, bias=False, tied=tied)

    return network.unit("lm_head", "Linear")(project, hidden)
