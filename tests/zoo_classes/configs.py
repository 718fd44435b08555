"""Small configs by rule: fields of a default config are shrunk by their names.

Fields that go together keep together since one name has one size everywhere: widths are `WIDTH`,
feed-forward widths `WIDE`, heads `HEADS`, so that a head has `HEAD_DIM` and projections between
towers fit. Lists of widths grow as they did, lists with an entry for each layer are cut as the
layers are. Where a class does not take that, less is shrunk: `SIZES` is tried in order.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from transformers import CONFIG_MAPPING

WIDTH, WIDE, HEADS, HEAD_DIM, GROUPS = 32, 64, 4, 8, 2
VOCABULARY, POSITIONS, IMAGE = 128, 128, 64
SPECIAL = 32
"""Token ids below it are special; texts have those from it on."""
SIZES = ("small", "shallow")
"""All is shrunk; depth and vocabulary alone."""

Change = Callable[[int], int]


def _at_most(limit: int) -> Change:
    return lambda value: min(value, limit)


_DEPTH: list[tuple[str, Change]] = [
    (r"feat_extract_layers|num_conv_layers|num_downsampl|exit_layer", lambda v: v),
    (r"mamba_num_layers|(^|_)(n|num)_(\w+_)?layers?$|^(\w+_)?layers$|(^|_)depth$", _at_most(2)),
    (r"num_hidden_groups|inner_group_num", _at_most(1)),
    (r"first_k_dense_replace|num_dense_layers", _at_most(1)),
    (r"(^|_)vocab(ulary)?_size(_per\w+)?$|^vocab_size", _at_most(VOCABULARY)),
    (r"(^|_)max_(source|target)_positions$", _at_most(32)),
    (r"max_position|n_positions|(^|_)n_ctx$|max_seq_len|max_sequence_length", _at_most(POSITIONS)),
    (r"attention_window$|window_attention_size|sliding_window", _at_most(8)),
]  # fmt: skip
_WIDTHS: list[tuple[str, Change]] = [
    (r"^window_size$", _at_most(2)),  # the last of four stages sees 2 x 2 patches
    (r"coordinate_size$", _at_most(WIDTH // 8)),
    (r"shape_size$", _at_most(WIDTH // 4)),
    (r"head_dim$|(^|_)d_kv$|kv_channels|attention_head_size|d_head$|head_size$|qk_\w*dim$|v_dim$",
     _at_most(HEAD_DIM)),
    (r"mamba_(n|num)_heads", _at_most(2 * HEADS)),
    (r"num_(key_value|kv)_heads|num_kv$|multi_query_group_num|num_query_groups",
     lambda v: v if v == 1 else GROUPS),
    (r"(^|_)num_linear_heads|linear_num_\w+_heads|(^|_)n_?heads?$|num_(\w+_)?heads?$|_heads?$",
     _at_most(HEADS)),
    (r"partial_rotary|rotary_pct", lambda v: v),
    (r"rotary_dim$|rotary_ndims", _at_most(4)),
    (r"_lora_rank|lora_dim", _at_most(16)),
    (r"(state_size|d_state|ssm_state\w*)$", _at_most(HEAD_DIM)),
    (r"moe_\w*intermediate_size|shared_expert_intermediate_size", _at_most(WIDTH)),
    (r"intermediate_(size|dim)|ffn_(hidden_size|dim|embed_dim)|ffn_dim$|(^|_)d_ff$|n_inner$|"
     r"mlp_hidden|feedforward_dim|feed_forward_\w*|dim_feedforward|(^|_)hidden_dim$|inner_dim$",
     _at_most(WIDE)),
    (r"(num|n)_(\w+_)?experts$|moe_num_experts", _at_most(4)),
    (r"experts_per_tok\w*$|top_?k(_experts)?$|moe_k$", _at_most(2)),
    (r"(^|_)n_group$|topk_group$", _at_most(1)),
    (r"num_queries$|query_tokens$|num_latents$|num_query|num_object_queries", _at_most(HEAD_DIM)),
    (r"hidden_size(_\w+)?$|d_model$|n_embd$|(^|_)dim$|embed_dim(s)?$|embedding_size$|emb_dim$|"
     r"_channels_dim|projection_(dim|size)$|proj_dim$|proj_size$|output_dim$|d_latents$|d_embed$|"
     r"hidden_channels$|embedding_dim$|embed_size$|width$|attention_dim$|feature_size$",
     _at_most(WIDTH)),
]  # fmt: skip
_FOLLOWS = object()
_SPECIAL = re.compile(r"_token_(id|index)$|_tok(en)?$|_id$")
_SIDES = re.compile(r"^(image|input|img)_size$")
_WIDTH_LISTS = re.compile(r"hidden_sizes|embed_dims?$|dims$|conv_dim$|widths|channels$|neck_hidden")
_HEAD_LISTS = re.compile(r"heads$")
_STAGES = ("out_features", "out_indices", "backbone_out_indices", "depths")
"""Fields that name some of the layers: their number then stays."""
_DEPTH_LISTS = re.compile(r"depths?$|layers$|blocks$")


def overrides_for(kind: type[Any], size: str) -> dict[str, object]:
    """Keyword arguments for the config class `kind`; `size` is one of `SIZES`.

    Raises:
        Exception: it has no default config.
    """
    made = _changed(kind().to_dict(), size, _arguments(kind))
    made.pop("model_type", None)
    return made


def _arguments(kind: type[Any]) -> dict[str, object]:
    """The fields that a config is made of, with their defaults; others follow from them."""
    fields = getattr(kind, "__dataclass_fields__", {})
    made = {name: field.default for name, field in fields.items()}
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        made.setdefault(name, parameter.default)
    return made


def small_config(kind: type[Any], size: str) -> Any:
    """A small config of class `kind`, without caches.

    Raises:
        Exception: by the class, which does not take it.
    """
    config = kind(**overrides_for(kind, size))
    for part in (config, *_inner(config)):
        for name, value in (("use_cache", False), ("pad_token_id", 0)):
            if hasattr(part, name) and (getattr(part, name) is None or name == "use_cache"):
                setattr(part, name, value)
        if getattr(part, "layerdrop", 0):
            part.layerdrop = 0.0
    return config


def _inner(config: Any) -> list[Any]:
    parts = []
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            parts += [value, *_inner(value)]
    return parts


def _changed(
    fields: Mapping[str, Any], size: str, own: Mapping[str, object] | None
) -> dict[str, object]:
    """The fields that are to be changed; `own` are the arguments of the config, if it is one."""
    fields = {
        name: v
        for name, v in fields.items()
        if name not in ("id2label", "label2id")
        and (own is None or name == "model_type" or (own.get(name, _FOLLOWS) is not _FOLLOWS
             and not (own[name] is None and type(v) is int)))
    }  # fmt: skip
    made: dict[str, object] = {}
    depths = _depths(fields, size)
    for name, value in fields.items():
        if isinstance(value, Mapping):
            known = CONFIG_MAPPING.get(value.get("model_type", ""), None)
            inner = _changed(value, size, _arguments(known) if known else None)
            if inner:
                made[name] = {**_said(value, known), **inner}
        elif isinstance(value, list | tuple) and value:
            new = _list(name, list(value), size, depths)
            if new != list(value):
                made[name] = new
        elif type(value) is int:
            is_depth = _is_depth(name) and value in depths
            number = depths[value] if is_depth else _by_name(name, value, size)
            number = _side(fields, value) if _SIDES.search(name) and size != "shallow" else number
            if number != value:
                made[name] = number
    if fields.get("num_experts_per_tok", 1) is None:
        made["num_experts_per_tok"] = 2
    if fields.get("num_key_value_heads", 1) is None and size != "shallow":
        made["num_key_value_heads"] = HEADS
    if fields.get("num_key_value_heads") == fields.get("num_attention_heads", 0):
        made.pop("num_key_value_heads", None)
        if "num_attention_heads" in made:
            made["num_key_value_heads"] = made["num_attention_heads"]
    if size != "shallow" and re.search(r"vl|omni", str(fields.get("model_type"))):
        rope = made.get("rope_parameters", fields.get("rope_parameters"))
        if isinstance(rope, Mapping):
            made["rope_parameters"] = {**rope, "mrope_section": [2, 1, 1]}
    made.update(_special(fields))
    return made


def _depths(fields: Mapping[str, Any], size: str) -> dict[int, int]:
    """Numbers of layers, and what becomes of them. Patterns of layers need some more."""
    before = {v: name for name, v in fields.items() if type(v) is int and _is_depth(name)}
    if any(fields.get(name) for name in _STAGES):
        return {depth: depth for depth in before}
    least = 4 if _has_pattern(fields) else 0
    return {v: max(_by_name(name, v, size), min(v, least)) for v, name in before.items() if v > 2}


def _said(fields: Mapping[str, Any], known: type[Any] | None) -> dict[str, object]:
    """The arguments of an inner config: all fields that do not follow from others."""
    own = _arguments(known) if known else None
    return {
        name: v
        for name, v in fields.items()
        if own is None or name == "model_type" or (name in own and own[name] is not None)
    }


def _is_depth(name: str) -> bool:
    return any(re.search(pattern, name) for pattern, _ in _DEPTH[1:2]) and not re.search(
        _DEPTH[0][0], name
    )


def _has_pattern(fields: Mapping[str, Any]) -> bool:
    return any(
        re.search(r"layer_types|pattern|period|interval|_every|block_type", n) for n in fields
    )


def _by_name(name: str, value: int, size: str) -> int:
    if value <= 1:
        return value
    rules = _DEPTH if size == "shallow" else [*_DEPTH, *_WIDTHS]
    return next((change(value) for pattern, change in rules if re.search(pattern, name)), value)


def _list(name: str, values: list[Any], size: str, depths: Mapping[int, int]) -> list[Any]:
    if name == "mrope_section":
        return [2, 1, 1] if size != "shallow" else values
    if len(values) in depths:
        values = values[: depths[len(values)]]
    if not all(type(v) is int for v in values):
        return values
    if _DEPTH_LISTS.search(name):
        return [min(v, 2) for v in values]
    if size == "shallow":
        return values
    if _HEAD_LISTS.search(name):
        return [min(v, 2) for v in values]
    if name == "attention_window":
        return [min(v, 8) for v in values]
    if max(values) <= WIDTH:
        return values
    if _WIDTH_LISTS.search(name):
        first = min(v for v in values if v > 0)
        return [v if v <= 4 else max(16, 16 * round(v / first)) for v in values]
    return values


def _side(fields: Mapping[str, Any], side: int) -> int:
    patch = next((v for n, v in fields.items() if n == "patch_size" and type(v) is int), 1)
    return min(side, patch * 4 if patch >= 8 else IMAGE)


def _special(fields: Mapping[str, Any]) -> dict[str, object]:
    """Ids of special tokens, below `SPECIAL`: one number a name, wherever it is."""
    made: dict[str, object] = {}
    known = {"pad": 0, "bos": 1, "eos": 2, "decoder_start": 2, "cls": 1, "sep": 2, "mask": 3}
    for name, value in fields.items():
        if type(value) is int and _SPECIAL.search(name) and value >= SPECIAL:
            stem = _SPECIAL.sub("", name)
            made[name] = known.get(stem, 4 + sum(map(ord, name)) % (SPECIAL - 4))
    return made
