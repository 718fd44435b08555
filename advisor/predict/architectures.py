"""Transformer shapes: a row's columns, public configurations by name, and rules for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from math import cbrt
from types import MappingProxyType

from advisor.predict.rows import TableRow
from advisor.predict.software import family_of
from profiles.closed_forms.transformer import TransformerShape as Shape
from profiles.record.bounds import MOST_LAYERS

# Public configurations (config.json of each on its model hub), by prefix of the name; published
# tables print only some of their fields.
_PUBLIC: Mapping[str, Mapping[str, int | bool]] = MappingProxyType(
    {
        "deepseek-v3": {
            "n_layers": 61, "hidden": 7168, "n_heads": 128, "n_kv_heads": 128, "ffn_hidden": 18432,
            "vocab": 129280, "n_experts": 256, "moe_topk": 8, "moe_ffn_hidden": 2048,
            "shared_ffn": 2048, "dense_layers": 3, "latent": True, "head_width": 128,
        },
        "kimi-k2": {
            "n_layers": 61, "hidden": 7168, "n_heads": 64, "n_kv_heads": 64, "ffn_hidden": 18432,
            "vocab": 163840, "n_experts": 384, "moe_topk": 8, "moe_ffn_hidden": 2048,
            "shared_ffn": 2048, "dense_layers": 1, "latent": True, "head_width": 128,
        },
        "moonlight-16b": {
            "n_layers": 27, "hidden": 2048, "n_heads": 16, "n_kv_heads": 16, "ffn_hidden": 11264,
            "vocab": 163840, "n_experts": 64, "moe_topk": 6, "moe_ffn_hidden": 1408,
            "shared_ffn": 2816, "dense_layers": 1, "latent": True, "head_width": 128,
        },
        "deepseek-v2-lite": {
            "n_layers": 27, "hidden": 2048, "n_heads": 16, "n_kv_heads": 16, "ffn_hidden": 10944,
            "vocab": 102400, "n_experts": 64, "moe_topk": 6, "moe_ffn_hidden": 1408,
            "shared_ffn": 2816, "dense_layers": 1, "latent": True, "head_width": 128,
        },
        "nemotron-3-nano": {
            "n_layers": 52, "hidden": 2688, "n_heads": 32, "n_kv_heads": 2, "vocab": 131072,
            "n_experts": 128, "moe_topk": 6, "moe_ffn_hidden": 1856, "shared_ffn": 3712,
            "head_width": 128, "attention_layers": 6, "mamba_layers": 23, "mamba_width": 4096,
        },
        "nemotron-3-super": {
            "n_layers": 88, "hidden": 4096, "n_heads": 32, "n_kv_heads": 2, "vocab": 131072,
            "n_experts": 512, "moe_topk": 22, "moe_ffn_hidden": 2688, "shared_ffn": 5376,
            "head_width": 128, "attention_layers": 8, "mamba_layers": 40, "mamba_width": 8192,
            "expert_width": 1024,
        },
        "nemotron-3-ultra": {
            "n_layers": 108, "hidden": 8192, "n_heads": 64, "n_kv_heads": 2, "vocab": 131072,
            "n_experts": 512, "moe_topk": 22, "moe_ffn_hidden": 5120, "shared_ffn": 10240,
            "head_width": 128, "attention_layers": 12, "mamba_layers": 48, "mamba_width": 16384,
            "expert_width": 2048,
        },
        "nemotron-3-5-lightning": {
            "n_layers": 52, "hidden": 2688, "n_heads": 32, "n_kv_heads": 2, "vocab": 131072,
            "n_experts": 128, "moe_topk": 6, "moe_ffn_hidden": 1856, "shared_ffn": 3712,
            "head_width": 128, "attention_layers": 6, "mamba_layers": 23, "mamba_width": 4096,
        },
        # NVIDIA's configurations for WikiText-103, whose words are its vocabulary.
        "transformer-xl-base": {
            "n_layers": 16, "hidden": 512, "n_heads": 8, "ffn_hidden": 2048, "vocab": 267735,
        },
        "transformer-xl-large": {
            "n_layers": 18, "hidden": 1024, "n_heads": 16, "ffn_hidden": 4096, "vocab": 267735,
        },
        "llama-3-8b": {
            "n_layers": 32, "hidden": 4096, "n_heads": 32, "n_kv_heads": 8, "ffn_hidden": 14336,
            "vocab": 128256,
        },
        "llama-3-70b": {
            "n_layers": 80, "hidden": 8192, "n_heads": 64, "n_kv_heads": 8, "ffn_hidden": 28672,
            "vocab": 128256,
        },
        "llama-3-405b": {
            "n_layers": 126, "hidden": 16384, "n_heads": 128, "n_kv_heads": 8, "ffn_hidden": 53248,
            "vocab": 128256,
        },
        "llama-2-7b": {
            "n_layers": 32, "hidden": 4096, "n_heads": 32, "n_kv_heads": 32, "ffn_hidden": 11008,
            "vocab": 32000,
        },
        "llama-2-13b": {
            "n_layers": 40, "hidden": 5120, "n_heads": 40, "n_kv_heads": 40, "ffn_hidden": 13824,
            "vocab": 32000,
        },
        "llama-2-70b": {
            "n_layers": 80, "hidden": 8192, "n_heads": 64, "n_kv_heads": 8, "ffn_hidden": 28672,
            "vocab": 32000,
        },
        "mixtral-8x7b": {
            "n_layers": 32, "hidden": 4096, "n_heads": 32, "n_kv_heads": 8, "ffn_hidden": 14336,
            "vocab": 32000, "n_experts": 8, "moe_topk": 2, "moe_ffn_hidden": 14336,
        },
        "mixtral-8x22b": {
            "n_layers": 56, "hidden": 6144, "n_heads": 48, "n_kv_heads": 8, "ffn_hidden": 16384,
            "vocab": 32768, "n_experts": 8, "moe_topk": 2, "moe_ffn_hidden": 16384,
        },
    }
)  # fmt: skip
# Configuration fields that no column of a table names.
_FACTS = ("shared_ffn", "dense_layers", "latent", "head_width", "attention_layers", "mamba_layers",
          "mamba_width", "expert_width")  # fmt: skip
# Layers of models that only count their parameters: hidden is about 128 times the layers in GPT-3's
# table (12 x 768, 32 x 4096, 96 x 12288: 64, 128, 128; arXiv 2005.14165, Table 2.1).
ASPECT = 128
# Rows of common vocabularies; programs pad them to a multiple of 128 for each tensor rank.
GPT_VOCABULARY = 50257
VOCABULARIES = MappingProxyType({"bert": 30522, "t5": 32128, "llama": 32000})


def shape_of(row: TableRow) -> tuple[Shape, tuple[str, ...]] | str:
    """Return the shape of a row's transformer and the assumptions, or the reason for refusal."""
    assumed: list[str] = []
    name = (row.model_name or "").lower().replace("_", "-").replace("llama3", "llama-3")
    name = name.replace("llama-3.1", "llama-3").replace("llama2", "llama-2")
    public = next((facts for key, facts in _PUBLIC.items() if name.startswith(key)), {})

    def number(column: str) -> int:
        given = getattr(row, column, None)
        if given is not None:
            return int(given)
        if column in public:
            assumed.append(f"{column} {public[column]} of the public configuration")
        return int(public.get(column, 0))

    kind = row.arch or "dense_gpt"
    layers, hidden = number("n_layers"), number("hidden")
    if not hidden and not row.params_b:
        return "the model's shape is unknown: `hidden` and `params_b` are blank"
    vocab = number("vocab")
    if not vocab and row.n_layers == 1 and not row.params_b:
        assumed.append("one layer by itself, without embedding, head and update")
    elif not vocab:
        # Megatron-LM uses GPT-2's vocabulary by default, whatever the layers.
        own = kind in ("bert", "t5") or family_of(row) not in ("megatron", "nemo")
        vocab = VOCABULARIES.get(kind, GPT_VOCABULARY) if own else GPT_VOCABULARY
        assumed.append(f"a vocabulary of {vocab}")
    # Parameters of a layer of width h: 12 h^2; an encoder-decoder has 28 h^2 of each pair.
    of_layer = 28 if kind == "t5" else 12
    blocks = max(1.0, (row.params_b or 0) * 1e9 - vocab * hidden)
    if not hidden:
        hidden = round(cbrt(blocks * ASPECT / of_layer) / 128) * 128 or 128
        assumed.append(f"hidden {hidden} from the parameters")
        blocks = max(1.0, (row.params_b or 0) * 1e9 - vocab * hidden)
    if not layers:
        if not row.params_b:
            return "the model's shape is unknown: `n_layers` and `params_b` are blank"
        layers = max(1, round(blocks / (of_layer * hidden**2)))
        if layers > MOST_LAYERS:
            return f"{layers:,} layers from the parameters: {MOST_LAYERS:,} are the most"
        assumed.append(f"{layers} layers from the parameters")
    heads = number("n_heads")
    if not heads:
        tp = row.tp or 1
        # About 128, dividing the width; else the nearest head count that the ranks can split.
        near = max(1, round(hidden / 128 / tp)) * tp
        fits = [n for n in range(tp, 2 * near, tp) if hidden % n == 0 and hidden // n % 8 == 0]
        heads = min(fits, key=lambda n: abs(n - near), default=near)
        assumed.append(f"{heads} heads, of about 128 each")
    kv_heads = number("n_kv_heads") or heads
    experts, topk = number("n_experts"), number("moe_topk")
    expert_ffn = number("moe_ffn_hidden")
    if kind.endswith("moe") and not experts:
        return "a mixture of experts of unknown shape: `n_experts` is blank"
    gated = kind == "llama" or (kind == "moe" and bool(expert_ffn))
    ffn = number("ffn_hidden")
    if not ffn and not kind.startswith("hybrid"):
        ffn = round(8 * hidden / 3 / 256) * 256 if kind == "llama" else 4 * hidden
        if experts and expert_ffn:
            ffn = 0
        else:
            assumed.append(f"an inner width of {ffn}")
    if experts and not expert_ffn:
        expert_ffn = ffn or 4 * hidden
    if experts:
        topk = topk or 1
    facts = {key: public[key] for key in _FACTS if key in public}
    shape = Shape(
        kind=kind,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=min(kv_heads, heads),
        ffn=ffn,
        vocab=vocab,
        length=row.seq_len or _length(kind),
        gated=gated,
        # A GPT with experts in place of its MLP ties its head to its embedding, as a GPT does.
        tied=kind in ("dense_gpt", "bert", "t5", "transformer_xl") or (kind == "moe" and not gated),
        head_width=int(facts.pop("head_width", 0)) or hidden // heads or 1,
        experts=experts,
        topk=topk,
        expert_ffn=expert_ffn,
        **facts,
    )
    if row.seq_len is None:
        assumed.append(f"sequences of {shape.length}")
    if kind == "moe" and not public and row.params_b:
        shape, width_notes = _with_head_width(shape, row.params_b * 1e9)
        assumed += width_notes
    return shape, tuple(assumed)


def parameters_of(shape: Shape) -> float:
    """Parameters of the whole model, without those of norms and biases."""
    h = shape.hidden
    queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    attention = float(2 * h * queries + 2 * h * keys)
    if shape.latent:
        # Latents of 1536 for queries, 512 + 64 for keys and values (DeepSeek-V3 configuration).
        attention = h * 1536 + 1536 * shape.heads * 192 + h * 576 + 512 * shape.heads * 256
        attention += h * queries
    matrices = 3 if shape.gated else 2
    dense = matrices * h * shape.ffn
    inner = shape.expert_width or h
    experts = matrices * inner * shape.expert_ffn * shape.experts + h * shape.experts
    experts += matrices * h * shape.shared_ffn + 2 * h * shape.expert_width
    embedding = shape.vocab * h * (1 if shape.tied else 2)
    if shape.is_hybrid:
        mamba = h * (3 * shape.mamba_width + 2048)  # in: twice the width and states; out
        moe_layers = shape.layers - shape.attention_layers - shape.mamba_layers
        total = shape.attention_layers * attention + shape.mamba_layers * mamba
        return total + moe_layers * experts + embedding
    if shape.kind == "t5":
        return shape.layers * (3 * attention + 2 * dense) + embedding
    if shape.experts:
        with_experts = shape.layers - shape.dense_layers
        total = shape.layers * attention + with_experts * experts + shape.dense_layers * dense
        return total + embedding
    return shape.layers * (attention + dense) + embedding


def _with_head_width(shape: Shape, parameters: float) -> tuple[Shape, list[str]]:
    """Choose 64, 128 or hidden / heads, whichever explains the printed parameters best."""
    widths = (64, 128, shape.hidden // shape.heads)
    choices = [shape.model_copy(update={"head_width": w}) for w in dict.fromkeys(widths) if w]
    best = min(choices, key=lambda s: (abs(parameters_of(s) - parameters), s.head_width))
    if best.head_width == shape.hidden // shape.heads:
        return best, []
    return best, [f"heads of {best.head_width} from the parameters"]


def _length(kind: str) -> int:
    return 512 if kind in ("bert", "t5") else 2048
