"""BERT, RoBERTa and DistilBERT: encoders with a masked-language-model head."""

from __future__ import annotations

from dataclasses import dataclass

from profiles.closed_forms.families import kernels
from profiles.closed_forms.families import operations as ops
from profiles.closed_forms.families.attention import attend, heads
from profiles.closed_forms.families.fields import SIZES, Fields
from profiles.closed_forms.families.fusing import ALONE, GATHER
from profiles.closed_forms.families.layers import (
    ACTIVATION_CLASSES,
    ACTIVATIONS,
    activate,
    token_loss,
)
from profiles.closed_forms.families.memory import DType
from profiles.closed_forms.families.network import FamilyRun, FamilyUnit, ModelFamily
from profiles.closed_forms.families.tape import Array


@dataclass(frozen=True, slots=True)
class PostNormBlock:
    """A block: attention, sum, norm, feed-forward, sum, norm; with its modules' names.

    Attributes:
        inputs: of queries, keys and values.
        output: of what follows attention; `up` and `down` of the feed-forward.
    """

    width: int
    inner: int
    heads: int
    activation: str
    attention_dropout: float
    output_dropout: float
    inner_dropout: float
    inputs: tuple[str, str, str]
    output: str
    first_norm: str
    up: str
    down: str
    last_norm: str

    def __call__(self, unit: FamilyUnit, hidden: Array) -> Array:
        attended = unit.linear(self._attention(unit, hidden), self.output, self.width, bias=True)
        attended = ops.dropout(attended, self.output_dropout)
        attended = unit.layer_norm(ops.add(attended, hidden), self.first_norm)
        wide = activate(unit.linear(attended, self.up, self.inner, bias=True), self.activation)
        out = ops.dropout(unit.linear(wide, self.down, self.width, bias=True), self.inner_dropout)
        return unit.layer_norm(ops.add(out, attended), self.last_norm)

    def _attention(self, unit: FamilyUnit, hidden: Array) -> Array:
        query, key, value = (
            heads(unit.linear(hidden, path, self.width, bias=True), self.width // self.heads)
            for path in self.inputs
        )
        return attend(query, key, value, dropout=self.attention_dropout)


@dataclass(frozen=True, slots=True)
class Tables:
    """Embedding tables of tokens, positions and segments, and the norm after them."""

    vocab: int
    positions: int
    segments: int
    width: int
    dropout: float
    counts_padding: bool

    def __call__(self, unit: FamilyUnit, ids: Array) -> Array:
        numbers = unit.buffer(1, self.positions, dtype=DType.INT64)
        segment_numbers = unit.buffer(1, self.positions, dtype=DType.INT64)
        batch, length = ids.shape
        if self.counts_padding:
            places = _counted(ids)
            table = ops.expand(segment_numbers, batch, self.positions)
        else:
            places, table = ops.narrow(numbers, 1, length), segment_numbers
        segments = _gathered(table, places)
        words = unit.embedding(ids, "word_embeddings", self.vocab, self.width)
        kinds = unit.embedding(
            ops.expand(segments, batch, length), "token_type_embeddings", self.segments, self.width
        )
        hidden = ops.add(words, kinds)
        where = unit.embedding(places, "position_embeddings", self.positions, self.width)
        hidden = ops.add(hidden, where)
        hidden = unit.layer_norm(hidden, "LayerNorm")
        return ops.dropout(hidden, self.dropout)


def bert(fields: Fields) -> ModelFamily:
    return _bert(fields, "Bert")


def roberta(fields: Fields) -> ModelFamily:
    return _bert(fields, "Roberta")


def _bert(fields: Fields, prefix: str) -> ModelFamily:
    kind = fields.architecture(f"{prefix}ForMaskedLM")
    fields.only("is_decoder", False, None)
    fields.only("add_cross_attention", False, None)
    fields.only("position_embedding_type", "absolute", None)
    fields.require(*SIZES)
    width, count = fields.heads("hidden_size", "num_attention_heads")
    layers = fields.size("num_hidden_layers")
    dropout = fields.share("hidden_dropout_prob", 0.1)
    tables = Tables(
        vocab=fields.size("vocab_size"),
        positions=fields.size("max_position_embeddings", 512),
        segments=fields.size("type_vocab_size", 2),
        width=width,
        dropout=dropout,
        counts_padding=prefix == "Roberta",
    )
    layer = PostNormBlock(
        width=width,
        inner=fields.size("intermediate_size"),
        heads=count,
        activation=fields.choice("hidden_act", "gelu", ACTIVATIONS),
        attention_dropout=fields.share("attention_probs_dropout_prob", 0.1),
        output_dropout=dropout,
        inner_dropout=dropout,
        inputs=("attention.self.query", "attention.self.key", "attention.self.value"),
        output="attention.output.dense",
        first_norm="attention.output.LayerNorm",
        up="intermediate.dense",
        down="output.dense",
        last_norm="output.LayerNorm",
    )
    is_tied = fields.flag("tie_word_embeddings", True)
    stem = prefix.lower()

    def run(network: FamilyRun) -> tuple[Array, ...]:
        embeddings = network.unit(f"{stem}.embeddings", f"{prefix}Embeddings")
        hidden = embeddings(tables, network.ids())
        for index in network.layers(f"{stem}.encoder.layer", ["layer"] * layers):
            name = f"{stem}.encoder.layer.{index}"
            hidden = network.unit(name, f"{prefix}Layer", is_block=True)(layer, hidden)
        words = embeddings.parameters[f"{stem}.embeddings.word_embeddings.weight"]
        top = (
            network.unit("cls", "BertOnlyMLMHead")
            if prefix == "Bert"
            else network.unit("lm_head", "RobertaLMHead")
        )
        logits = top(head, hidden, tied=words if is_tied else None)
        return token_loss(logits, network.ids()), logits

    def head(unit: FamilyUnit, hidden: Array, *, tied: Array | None) -> Array:
        before, transform, norm, function = (
            ("predictions.", "predictions.transform.dense", "predictions.transform.LayerNorm", None)
            if prefix == "Bert"
            else ("", "dense", "layer_norm", "gelu")
        )
        bias = unit.parameter(f"{before}bias", tables.vocab)
        hidden = unit.linear(hidden, transform, width, bias=True)
        hidden = unit.layer_norm(activate(hidden, function or layer.activation), norm)
        decoder = f"{before}decoder"
        if tied is None:
            return unit.linear(hidden, decoder, tables.vocab, bias=True)
        return unit.linear(hidden, decoder, tables.vocab, bias=False, tied=tied, tied_bias=bias)

    return ModelFamily(kind, run, longest=tables.positions)


def distilbert(fields: Fields) -> ModelFamily:
    """DistilBERT: BERT without segments, its head in modules of their own."""
    kind = fields.architecture("DistilBertForMaskedLM")
    fields.require("vocab_size", "dim", "hidden_dim", "n_layers", "n_heads")
    width, parts = fields.heads("dim", "n_heads")
    vocab, layers = fields.size("vocab_size"), fields.size("n_layers")
    count = fields.size("max_position_embeddings", 512)
    dropout = fields.share("dropout", 0.1)
    # A table of sinuses is not trained, and is not counted as trainable.
    fields.only("sinusoidal_pos_embds", False, None)
    layer = PostNormBlock(
        width=width,
        inner=fields.size("hidden_dim"),
        heads=parts,
        activation=fields.choice("activation", "gelu", ACTIVATIONS),
        attention_dropout=fields.share("attention_dropout", 0.1),
        output_dropout=0.0,
        inner_dropout=dropout,
        inputs=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        output="attention.out_lin",
        first_norm="sa_layer_norm",
        up="ffn.lin1",
        down="ffn.lin2",
        last_norm="output_layer_norm",
    )
    is_tied = fields.flag("tie_word_embeddings", True)

    def run(network: FamilyRun) -> tuple[Array, ...]:
        embeddings = network.unit("distilbert.embeddings", "Embeddings")
        hidden = embeddings(embed, network.ids())
        for index in network.layers("distilbert.transformer.layer", ["layer"] * layers):
            name = f"distilbert.transformer.layer.{index}"
            hidden = network.unit(name, "TransformerBlock", is_block=True)(layer, hidden)
        transform = network.unit("vocab_transform", "Linear")
        scores = transform(lambda unit, x: unit.linear(x, "", width, bias=True), hidden)
        function = network.unit("activation", ACTIVATION_CLASSES[layer.activation])
        scores = function(lambda unit, x: activate(x, layer.activation), scores)
        norm = network.unit("vocab_layer_norm", "LayerNorm")
        scores = norm(lambda unit, x: unit.layer_norm(x, ""), scores)
        words = embeddings.parameters["distilbert.embeddings.word_embeddings.weight"]
        tied = words if is_tied else None
        projector = network.unit("vocab_projector", "Linear")
        scores = projector(lambda unit, x: unit.linear(x, "", vocab, bias=True, tied=tied), scores)
        rows, labels = ops.reshape(scores, -1, vocab), ops.reshape(network.ids(), -1)
        loss_function = network.unit("mlm_loss_fct", "CrossEntropyLoss")
        loss = loss_function(lambda unit, x, y: kernels.cross_entropy(x, y), rows, labels)
        return loss, scores

    def embed(unit: FamilyUnit, ids: Array) -> Array:
        numbers = unit.buffer(1, count, dtype=DType.INT64)
        words = unit.embedding(ids, "word_embeddings", vocab, width)
        places = ops.narrow(numbers, 1, ids.shape[1])
        where = unit.embedding(places, "position_embeddings", count, width)
        hidden = unit.layer_norm(ops.add(words, where), "LayerNorm")
        return ops.dropout(hidden, dropout)

    return ModelFamily(kind, run, longest=count)


def _counted(ids: Array) -> Array:
    """Positions counted over what is no padding, as RoBERTa does."""
    shape = ids.shape
    present = ops.cast(ids.tape.run([ids], shape, DType.BOOL), DType.INT32)
    summed = ops.cast(ids.tape.run([present], shape, DType.INT64, fusing=ALONE), DType.INT32)
    summed = ids.tape.run([summed], shape, DType.INT32)
    places = ops.cast(ids.tape.run([summed, present], shape, DType.INT32), DType.INT64)
    return ids.tape.run([places], shape, DType.INT64)


def _gathered(table: Array, index: Array) -> Array:
    """For each index one entry of its row."""
    return index.tape.run([table, index], index.shape, table.dtype, gathers=True, fusing=GATHER)
