"""A transformer's shape as a `ModelProfile`, its blocks as units."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from profiles.closed_forms.transformer.blocks import order_of, write_block
from profiles.closed_forms.transformer.draft import FP32, UnitBuilder, per_sample, unit_profile
from profiles.closed_forms.transformer.shape import DECODER_SHARE, TransformerShape
from profiles.model.affine import Affine
from profiles.model.flow import Edge, Flow, UnitCall, Value
from profiles.model.profile import LOSS, ModelProfile, Numerics, UnitCost, UnitProfile
from profiles.model.work import FusibleKind

# Positions that learned embeddings have where no table says: as long as the sample.
BATCH_TOKEN_BYTES = 16  # ids and labels, int64
HALF = 2


def transformer_profile(
    shape: TransformerShape,
    *,
    name: str,
    numerics: Sequence[Numerics] = (Numerics.AS_BUILT, Numerics.BF16, Numerics.BF16_AUTOCAST),
    vocabulary_multiple: int = 1,
) -> ModelProfile:
    """The profile of a model built in fp32 that is trained on next (or masked) tokens.

    Costs are those of stock kernels: flash attention, torch's own norms, everything else operation
    by operation, with what fused kernels would save (`profiles.workload.under_stack` takes that
    off).

    Args:
        vocabulary_multiple: rows of the embedding are padded to a multiple of this.
    """
    vocabulary = ceil(shape.vocab / vocabulary_multiple) * vocabulary_multiple
    units: list[UnitProfile] = []
    tokens, h = float(shape.length), shape.hidden

    def add(unit: str, kind: str, write: object, *, is_block: bool, outputs: float) -> None:
        drafts: dict[Numerics, tuple[UnitBuilder, UnitCost]] = {}
        for each in numerics:
            e = FP32 if each is Numerics.AS_BUILT else HALF
            draft = UnitBuilder(unit, kind, element_bytes=e, is_block=is_block)
            write(draft)  # type: ignore[operator]
            inputs = e * tokens * h * is_block
            drafts[each] = draft, draft.cost(inputs=inputs, outputs=e * outputs)
        units.append(unit_profile(drafts, name=unit))

    def embedding(draft: UnitBuilder) -> None:
        draft.embedding("words", vocabulary, h, tokens=tokens)
        if shape.kind in ("dense_gpt", "bert"):
            draft.shapes[shape.length, h] += 1
            draft.elementwise(
                FusibleKind.RESIDUAL,
                fused=(3 * draft.e * tokens * h, 2 * draft.e * tokens * h),
                eager=(3 * draft.e * tokens * h, 2 * draft.e * tokens * h),
                kernels=(2, 2),
            )
        draft.keep((draft.e + shape.dropout) * tokens * h)

    if shape.vocab:
        add("embedding", "Embedding", embedding, is_block=False, outputs=tokens * h)
    place = 0
    for kind, count in order_of(shape):
        # Equal blocks are drafted once.
        first = len(units)
        outputs = tokens * h / (DECODER_SHARE if kind == "decoder" else 1)
        if count:
            add(
                f"layers.{place}",
                kind,
                lambda draft, kind=kind: write_block(draft, shape, kind),
                is_block=True,
                outputs=outputs,
            )
        for offset in range(1, count):
            units.append(units[first].model_copy(update={"name": f"layers.{place + offset}"}))
        place += count
    # A T5's decoder is what is read out.
    read = tokens / (DECODER_SHARE if shape.kind == "t5" else 1)

    def head(draft: UnitBuilder) -> None:
        draft.norm(h, read, rms=shape.gated or shape.is_rotary)
        draft.linear("", h, vocabulary, rows=read, is_tied=shape.tied, is_last=True)
        draft.keep(draft.e * read * vocabulary, of_product=True)
        draft.transient(0.0, draft.e * read * vocabulary)

    def loss(draft: UnitBuilder) -> None:
        # Logits are cast to fp32 and their log-softmax is kept; the backward makes fp32 gradients
        # and casts them. One kernel reads the logits and later writes gradients over them.
        logits, e = read * vocabulary, draft.e
        draft.elementwise(
            FusibleKind.LOSS,
            fused=((e + FP32) * logits, (FP32 + e) * logits),
            eager=((e + 3 * FP32) * logits, (3 * FP32 + e) * logits),
            kernels=(4, 4),
            saved=0.0,
            saved_eager=FP32 * logits,
            transient=2 * FP32 * logits,
        )
        draft.transient(2 * FP32 * logits, (FP32 + e) * logits)

    if shape.vocab:
        add("head", "Linear", head, is_block=False, outputs=read * vocabulary)
        add(LOSS, "loss", loss, is_block=False, outputs=0.0)
    return ModelProfile(
        name=name,
        units=tuple(units),
        dtype="float32",
        samples=1,
        tokens_per_sample=shape.length,
        batch_bytes=per_sample(BATCH_TOKEN_BYTES * tokens),
        tied=(("embedding.words.weight", "head.weight"),) if shape.tied and shape.vocab else (),
        has_loss=shape.vocab > 0,
        flow=_chain(units),
        experts_per_token=shape.topk or None,
    )


def _chain(units: Sequence[UnitProfile]) -> Flow:
    """Each unit takes what the one before it hands on."""
    calls = tuple(UnitCall(unit=unit.name, values=(_value(unit),)) for unit in units)
    edges = tuple(Edge(source=n, value=0, target=n + 1) for n in range(len(units) - 1))
    return Flow(calls=calls, edges=edges)


def _value(unit: UnitProfile) -> Value:
    """Value that a unit hands on, in fp32: a flow is `AS_BUILT`."""
    kind, cost = next(iter(unit.costs.items()))
    scale = 1 if kind is Numerics.AS_BUILT else FP32 / HALF
    nbytes = scale * cost.output_bytes.at(1)
    return Value(
        shape=(1, max(1, round(nbytes / FP32))),
        dtype="float32",
        bytes=Affine(per_sample=nbytes),
        needs_gradient=True,
    )
