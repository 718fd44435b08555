"""ViT: an encoder of image patches with a classifier."""

from __future__ import annotations

from profiles.closed_forms.families import kernels
from profiles.closed_forms.families import operations as ops
from profiles.closed_forms.families.attention import attend, heads
from profiles.closed_forms.families.fields import Fields
from profiles.closed_forms.families.layers import ACTIVATIONS, activate
from profiles.closed_forms.families.memory import DType
from profiles.closed_forms.families.network import FamilyRun, FamilyUnit, ModelFamily
from profiles.closed_forms.families.tape import Array
from profiles.model.layers import LayerKind


def vit(fields: Fields) -> ModelFamily:
    """One token for each patch and one for the class; norms come first."""
    kind = fields.architecture("ViTForImageClassification")
    fields.only("problem_type", None, "single_label_classification")
    fields.require("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    width, count = fields.heads("hidden_size", "num_attention_heads")
    layers, inner = fields.size("num_hidden_layers"), fields.size("intermediate_size")
    image, patch = fields.size("image_size", 224), fields.size("patch_size", 16)
    channels = fields.size("num_channels", 3)
    classes = fields.size("num_labels", fields.count("id2label", 2))
    if classes == 1:
        raise fields.refusal("num_labels", classes, "two or more are wanted, one is a regression")
    activation = fields.choice("hidden_act", "gelu", ACTIVATIONS)
    dropout = fields.share("hidden_dropout_prob", 0.0)
    drop_attention = fields.share("attention_probs_dropout_prob", 0.0)
    bias = fields.flag("qkv_bias", True)

    def run(network: FamilyRun) -> tuple[Array, ...]:
        pixels = network.batch(channels, image, image, dtype=DType.FLOAT32)
        hidden = network.unit("vit.embeddings", "ViTEmbeddings")(embed, pixels)
        for layer in network.layers("vit.layers", ["layer"] * layers):
            block = network.unit(f"vit.layers.{layer}", "ViTLayer", is_block=True)
            hidden = block(one_layer, hidden)
        norm = network.unit("vit.layernorm", "LayerNorm")
        hidden = norm(lambda unit, x: unit.layer_norm(x, ""), hidden)
        first = ops.reshape(ops.narrow(hidden, 1, 1), network.samples, width)
        top = network.unit("classifier", "Linear")
        logits = top(lambda unit, x: unit.linear(x, "", classes, bias=True), first)
        return kernels.cross_entropy(logits, network.batch()), logits

    def embed(unit: FamilyUnit, pixels: Array) -> Array:
        batch, side = pixels.shape[0], image // patch
        token = unit.parameter("cls_token", 1, 1, width)
        places = unit.parameter("position_embeddings", 1, side * side + 1, width)
        path = "patch_embeddings.projection"
        weight = unit.parameter(f"{path}.weight", width, channels, patch, patch)
        bias = unit.parameter(f"{path}.bias", width)

        def project() -> Array:
            return kernels.patches(pixels, weight, bias)

        hidden = unit.layer(path, LayerKind.CONVOLUTION, pixels, weight, bias, project)
        hidden = ops.transpose(ops.reshape(hidden, batch, width, -1), 1, 2)
        hidden = ops.cat([ops.expand(token, batch, 1, width), hidden], 1)
        hidden = ops.add(hidden, places)
        return ops.dropout(hidden, dropout)

    def one_layer(unit: FamilyUnit, hidden: Array) -> Array:
        residual = hidden
        hidden = attention(unit, unit.layer_norm(hidden, "layernorm_before"))
        hidden = ops.add(ops.dropout(hidden, dropout), residual)
        residual = hidden
        hidden = unit.layer_norm(hidden, "layernorm_after")
        wide = activate(unit.linear(hidden, "mlp.fc1", inner, bias=True), activation)
        hidden = ops.dropout(unit.linear(wide, "mlp.fc2", width, bias=True), dropout)
        return ops.add(hidden, residual)

    def attention(unit: FamilyUnit, hidden: Array) -> Array:
        query, key, value = (
            heads(unit.linear(hidden, f"attention.{name}_proj", width, bias=bias), width // count)
            for name in "qkv"
        )
        attended = attend(query, key, value, dropout=drop_attention)
        return unit.linear(attended, "attention.o_proj", width, bias=True)

    return ModelFamily(kind, run, takes_tokens=False)
