"""The bundled GPT in closed form, operation by operation: see `profiles.closed_forms`. No torch."""

from __future__ import annotations

from advisor.inputs.bundled.gpt_shapes import GPTConfig
from profiles.closed_forms.families import operations as ops
from profiles.closed_forms.families.attention import attend
from profiles.closed_forms.families.layers import token_loss
from profiles.closed_forms.families.memory import DType
from profiles.closed_forms.families.network import FamilyRun, FamilyUnit, ModelFamily
from profiles.closed_forms.families.tape import Array


def gpt_family(config: GPTConfig) -> ModelFamily:
    """The forward of `advisor.inputs.bundled.gpt.GPT`, and its loss."""
    width, vocab, drop = config.width, config.vocab_size, config.dropout

    def run(network: FamilyRun) -> tuple[Array, ...]:
        ids = network.ids()
        places = network.tape.run([], (network.length,), DType.INT64)
        tokens = network.unit("tokens", "Embedding")
        hidden = tokens(lambda unit, x: unit.embedding(x, "", vocab, width), ids)
        positions = network.unit("positions", "Embedding")
        table = positions(lambda unit, x: unit.embedding(x, "", config.context, width), places)
        hidden = ops.add(hidden, table)
        del table
        for layer in network.layers("blocks", ["block"] * config.num_layers):
            block = network.unit(f"blocks.{layer}", "Block", is_block=True)
            hidden = block(one_block, hidden)
        norm = network.unit("norm", "LayerNorm")
        hidden = norm(lambda unit, x: unit.layer_norm(x, ""), hidden)
        tied = tokens.parameters["tokens.weight"]
        head = network.unit("head", "Linear")
        return (head(lambda u, x: u.linear(x, "", vocab, bias=False, tied=tied), hidden),)

    def one_block(unit: FamilyUnit, hidden: Array) -> Array:
        hidden = ops.add(hidden, ops.dropout(attention(unit, hidden), drop))
        return ops.add(hidden, ops.dropout(mlp(unit, hidden), drop))

    def attention(unit: FamilyUnit, x: Array) -> Array:
        x = unit.layer_norm(x, "attention_norm")
        fused = unit.linear(x, "attention.qkv", 3 * width, bias=True)
        split = ops.reshape(fused, *x.shape[:2], 3, -1, width // config.num_heads)
        query, key, value = ops.unbind(ops.permute(split, 2, 0, 3, 1, 4))
        mixed = attend(query, key, value, dropout=drop, is_causal=True)
        return unit.linear(mixed, "attention.out", width, bias=True)

    def mlp(unit: FamilyUnit, x: Array) -> Array:
        x = unit.layer_norm(x, "mlp_norm")
        wide = ops.unary(unit.linear(x, "mlp.0", 4 * width, bias=True))
        return unit.linear(wide, "mlp.2", width, bias=True)

    def loss(network: FamilyRun, logits: Array) -> Array:
        return token_loss(logits, network.ids())

    return ModelFamily("GPT", run, loss=loss, longest=config.context)
