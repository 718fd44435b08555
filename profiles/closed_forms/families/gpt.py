"""GPT-2, GPT-NeoX and OPT: decoders with layer norms and plain feed-forward layers."""

from __future__ import annotations

from profiles.closed_forms.families import kernels
from profiles.closed_forms.families import operations as ops
from profiles.closed_forms.families.attention import (
    attend,
    heads,
    look_for_packing,
    positions,
    rotary_table,
    rotate_partly,
)
from profiles.closed_forms.families.fields import SIZES, Fields
from profiles.closed_forms.families.fusing import ALONE
from profiles.closed_forms.families.layers import ACTIVATIONS, activate, head, next_token_loss
from profiles.closed_forms.families.memory import DType
from profiles.closed_forms.families.network import FamilyRun, FamilyUnit, ModelFamily
from profiles.closed_forms.families.tape import Array
from profiles.model.layers import LayerKind


def gpt2(fields: Fields) -> ModelFamily:
    """GPT-2: learned positions, one matrix for queries, keys and values, a tied head."""
    kind = fields.architecture("GPT2LMHeadModel", default="GPT2LMHeadModel")
    fields.only("add_cross_attention", False, None)
    fields.require("vocab_size", "n_embd", "n_head", "n_layer", "n_positions")
    width, count = fields.heads("n_embd", "n_head")
    vocab, longest = fields.size("vocab_size"), fields.size("n_positions")
    layers, inner = fields.size("n_layer"), fields.size("n_inner", 4 * width)
    activation = fields.choice("activation_function", "gelu_new", ACTIVATIONS)
    drop_attention = fields.share("attn_pdrop", 0.1)
    drop_residual = fields.share("resid_pdrop", 0.1)
    drop_embedding = fields.share("embd_pdrop", 0.1)
    is_tied = fields.flag("tie_word_embeddings", True)

    def run(network: FamilyRun) -> tuple[Array, ...]:
        tokens = network.unit("transformer.wte", "Embedding")
        hidden = tokens(lambda unit, ids: unit.embedding(ids, "", vocab, width), network.ids())
        position_ids = positions(network)
        table = network.unit("transformer.wpe", "Embedding")
        places = table(lambda unit, ids: unit.embedding(ids, "", longest, width), position_ids)
        embedded = hidden
        hidden = ops.add(embedded, places)
        look_for_packing(network, position_ids)
        drop = network.unit("transformer.drop", "Dropout")
        hidden = drop(lambda unit, x: ops.dropout(x, drop_embedding), hidden)
        for layer in network.layers("transformer.h", ["block"] * layers):
            block = network.unit(f"transformer.h.{layer}", "GPT2Block", is_block=True)
            hidden = block(one_layer, hidden, position_ids)
        norm = network.unit("transformer.ln_f", "LayerNorm")
        hidden = norm(lambda unit, x: unit.layer_norm(x, ""), hidden)
        logits = head(network, hidden, vocab, tokens if is_tied else None)
        return next_token_loss(network, logits), logits

    def one_layer(unit: FamilyUnit, hidden: Array, position_ids: Array) -> Array:
        residual = hidden
        hidden = unit.layer_norm(hidden, "ln_1")
        fused = unit.conv1d(hidden, "attn.c_attn", 3 * width)
        query, key, value = (heads(x, width // count) for x in ops.split(fused, [width] * 3))
        attended = attend(query, key, value, dropout=drop_attention, is_causal=True)
        attended = unit.conv1d(attended, "attn.c_proj", width)
        del query, key, value, fused
        attended = ops.dropout(attended, drop_residual)
        hidden = ops.add(attended, residual)
        residual = hidden
        hidden = unit.layer_norm(hidden, "ln_2")
        wide = activate(unit.conv1d(hidden, "mlp.c_fc", inner), activation)
        return ops.add(residual, ops.dropout(unit.conv1d(wide, "mlp.c_proj", width), drop_residual))

    return ModelFamily(kind, run, longest=longest)


def gpt_neox(fields: Fields) -> ModelFamily:
    """GPT-NeoX and Pythia: rotary positions on a part of each head, parallel residuals."""
    kind = fields.architecture("GPTNeoXForCausalLM", default="GPTNeoXForCausalLM")
    fields.require(*SIZES)
    width, count = fields.heads("hidden_size", "num_attention_heads")
    vocab, layers = fields.size("vocab_size"), fields.size("num_hidden_layers")
    inner, longest = fields.size("intermediate_size"), fields.size("max_position_embeddings", 2048)
    activation = fields.choice("hidden_act", "gelu", ACTIVATIONS)
    bias = fields.flag("attention_bias", True)
    drop_attention = fields.share("attention_dropout", 0.0)
    drop_hidden = fields.share("hidden_dropout", 0.0)
    is_parallel = fields.flag("use_parallel_residual", True)
    is_tied = fields.flag("tie_word_embeddings", False)
    rope = fields.inner("rope_parameters")
    share = rope.share("partial_rotary_factor", fields.share("rotary_pct", 0.25))
    rotary_width = int(width // count * share)

    def run(network: FamilyRun) -> tuple[Array, ...]:
        tokens = network.unit("gpt_neox.embed_in", "Embedding")
        embedded = tokens(lambda unit, ids: unit.embedding(ids, "", vocab, width), network.ids())
        position_ids = positions(network)
        look_for_packing(network, position_ids)
        drop = network.unit("gpt_neox.emb_dropout", "Dropout")
        hidden = drop(lambda unit, x: ops.dropout(x, drop_hidden), embedded)
        rotary = network.unit("gpt_neox.rotary_emb", "GPTNeoXRotaryEmbedding")
        cosine, sine = rotary(rotary_table, hidden, position_ids, width=rotary_width)
        for layer in network.layers("gpt_neox.layers", ["layer"] * layers):
            block = network.unit(f"gpt_neox.layers.{layer}", "GPTNeoXLayer", is_block=True)
            hidden = block(one_layer, hidden, position_ids, cosine, sine)
        norm = network.unit("gpt_neox.final_layer_norm", "LayerNorm")
        hidden = norm(lambda unit, x: unit.layer_norm(x, ""), hidden)
        logits = head(network, hidden, vocab, tokens if is_tied else None)
        return next_token_loss(network, logits), logits

    def one_layer(
        unit: FamilyUnit, hidden: Array, position_ids: Array, cosine: Array, sine: Array
    ) -> Array:
        attended = attention(unit, unit.layer_norm(hidden, "input_layernorm"), cosine, sine)
        attended = ops.dropout(attended, drop_hidden)
        if is_parallel:
            wide = feed_forward(unit, unit.layer_norm(hidden, "post_attention_layernorm"))
            return ops.add(ops.add(wide, attended), hidden)
        attended = ops.add(attended, hidden)
        wide = feed_forward(unit, unit.layer_norm(attended, "post_attention_layernorm"))
        return ops.add(wide, attended)

    def attention(unit: FamilyUnit, hidden: Array, cosine: Array, sine: Array) -> Array:
        fused = unit.linear(hidden, "attention.query_key_value", 3 * width, bias=bias)
        query, key, value = ops.split(heads(fused, 3 * width // count), [width // count] * 3)
        query, key = rotate_partly(query, cosine, sine), rotate_partly(key, cosine, sine)
        attended = attend(query, key, value, dropout=drop_attention, is_causal=True)
        return unit.linear(attended, "attention.dense", width, bias=bias)

    def feed_forward(unit: FamilyUnit, hidden: Array) -> Array:
        wide = unit.linear(hidden, "mlp.dense_h_to_4h", inner, bias=True)
        wide = unit.linear(activate(wide, activation), "mlp.dense_4h_to_h", width, bias=True)
        return ops.dropout(wide, drop_hidden)

    return ModelFamily(kind, run, longest=longest)


def opt(fields: Fields) -> ModelFamily:
    """OPT: learned positions, norms before or (350m) after."""
    kind = fields.architecture("OPTForCausalLM", default="OPTForCausalLM")
    fields.only("layerdrop", 0, 0.0, None)
    fields.only("layer_norm_elementwise_affine", True)
    fields.require("vocab_size", "hidden_size", "ffn_dim", "num_hidden_layers")
    width, count = fields.heads("hidden_size", "num_attention_heads")
    vocab, layers = fields.size("vocab_size"), fields.size("num_hidden_layers")
    inner, longest = fields.size("ffn_dim"), fields.size("max_position_embeddings", 2048)
    embedding_width = fields.size("word_embed_proj_dim", width)
    activation = fields.choice("activation_function", "relu", ACTIVATIONS)
    bias = fields.flag("enable_bias", True)
    drop = fields.share("dropout", 0.1)
    drop_attention = fields.share("attention_dropout", 0.0)
    norms_first = fields.flag("do_layer_norm_before", True)
    has_last_norm = norms_first and not fields.flag("_remove_final_layer_norm", False)
    is_tied = fields.flag("tie_word_embeddings", True)

    def run(network: FamilyRun) -> tuple[Array, ...]:
        tokens = network.unit("model.decoder.embed_tokens", "Embedding")
        embedded = tokens(
            lambda unit, ids: unit.embedding(ids, "", vocab, embedding_width), network.ids()
        )
        present, position_ids = counted(embedded)
        table = network.unit("model.decoder.embed_positions", "OPTLearnedPositionalEmbedding")
        places = table(learned, present, position_ids)
        if embedding_width != width:
            project = network.unit("model.decoder.project_in", "Linear")
            embedded = project(lambda unit, x: unit.linear(x, "", width, bias=False), embedded)
        hidden = ops.add(embedded, places)
        for layer in network.layers("model.decoder.layers", ["layer"] * layers):
            block = network.unit(f"model.decoder.layers.{layer}", "OPTDecoderLayer", is_block=True)
            hidden = block(one_layer, hidden, position_ids)
        if has_last_norm:
            norm = network.unit("model.decoder.final_layer_norm", "LayerNorm")
            hidden = norm(lambda unit, x: unit.layer_norm(x, ""), hidden)
        if embedding_width != width:
            project = network.unit("model.decoder.project_out", "Linear")
            hidden = project(
                lambda unit, x: unit.linear(x, "", embedding_width, bias=False), hidden
            )
        logits = head(network, hidden, vocab, tokens if is_tied else None)
        return next_token_loss(network, logits), logits

    def counted(like: Array) -> tuple[Array, Array]:
        """Mask of tokens, all present, and their positions, counted over it."""
        shape = like.shape[:2]
        present = like.tape.run([], shape, DType.FLOAT32)
        summed = like.tape.run([present], shape, DType.FLOAT32, fusing=ALONE)
        summed = like.tape.run([summed, present], shape, DType.FLOAT32)
        summed = like.tape.run([summed], shape, DType.FLOAT32)
        return present, ops.cast(summed, DType.INT64)

    def learned(unit: FamilyUnit, present: Array, position_ids: Array) -> Array:
        weight = unit.parameter("weight", longest + 2, width)  # two rows are never asked for

        def call() -> Array:
            moved = position_ids.tape.run([position_ids], position_ids.shape, DType.INT64)
            return kernels.embedding(weight, moved)

        return unit.layer("", LayerKind.EMBEDDING, present, weight, None, call)

    def one_layer(unit: FamilyUnit, hidden: Array, position_ids: Array) -> Array:
        residual = hidden
        if norms_first:
            hidden = unit.layer_norm(hidden, "self_attn_layer_norm")
        hidden = ops.add(residual, ops.dropout(attention(unit, hidden), drop))
        if not norms_first:
            hidden = unit.layer_norm(hidden, "self_attn_layer_norm")
        shape = hidden.shape
        hidden = ops.reshape(hidden, -1, width)
        residual = hidden
        if norms_first:
            hidden = unit.layer_norm(hidden, "final_layer_norm")
        hidden = activate(unit.linear(hidden, "fc1", inner, bias=bias), activation)
        hidden = ops.dropout(unit.linear(hidden, "fc2", width, bias=bias), drop)
        hidden = ops.reshape(ops.add(residual, hidden), *shape)
        return hidden if norms_first else unit.layer_norm(hidden, "final_layer_norm")

    def attention(unit: FamilyUnit, hidden: Array) -> Array:
        query = ops.mul_number(unit.linear(hidden, "self_attn.q_proj", width, bias=bias))
        query = heads(query, width // count)
        key = unit.linear(hidden, "self_attn.k_proj", width, bias=bias)
        value = unit.linear(hidden, "self_attn.v_proj", width, bias=bias)
        key, value = heads(key, width // count), heads(value, width // count)
        attended = attend(query, key, value, dropout=drop_attention, is_causal=True)
        return unit.linear(attended, "self_attn.out_proj", width, bias=bias)

    return ModelFamily(kind, run, longest=longest)
