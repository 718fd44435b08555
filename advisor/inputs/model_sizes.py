"""The same model at another size, profiled again from its source.

A config.json is profiled in closed form or built by transformers, a bundled model is built, and a
factory is called again; a module alone cannot be resized.
"""

from __future__ import annotations

from math import gcd

from pydantic import JsonValue

from advisor.inputs.models import profile_of_config, profile_of_factory
from profiles.errors import InputError
from profiles.model.profile import ModelProfile

# Synonyms in configs; the first one present counts.
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KEY_HEADS = "num_key_value_heads"
_DEPTHS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_decoder_layers",
    "max_window_layers",
)
_WIDTHS = ("hidden_size", "n_embd", "dim", "d_model", "width", "word_embed_proj_dim")
_INNER = (
    "intermediate_size",
    "n_inner",
    "ffn_dim",
    "hidden_dim",
    "d_ff",
    "moe_intermediate_size",
)
# Widths that are no multiple of it are slow on matrix units (NVIDIA, matrix multiplication guide:
# 16-bit operands want multiples of 8).
_ROUND = 8
SCALING = (
    "heads, width, feed-forward width and depth grow by one factor; the width of a head, the"
    " vocabulary and the number of experts stay"
)
"""The rule of `scaled`, in words."""
_WAY_OUT = "name its config.json, which is known at any size; a `pkg.module:factory` at any length"


def at_length(profile: ModelProfile, sequence_length: int) -> ModelProfile:
    """Return the profile of the model for sequences of this many tokens.

    Raises:
        InputError: it is not known what the profile was made from, the model takes no tokens, or
            its positions do not go so far.
    """
    if profile.factory is not None:
        return profile_of_factory(profile.factory, like=profile, sequence_length=sequence_length)
    return _counted(profile, _config(profile), sequence_length)


def has_other_lengths(profile: ModelProfile) -> bool:
    """Return True if `at_length` supports the profile."""
    return profile.tokens_per_sample is not None and bool(profile.factory or profile.config)


def scaled(profile: ModelProfile, heads: int) -> ModelProfile:
    """Return the profile of the model with this many heads, scaled by the rule `SCALING`.

    Raises:
        InputError: the profile is of no config, or the number of heads is no multiple of
            `head_step`.
    """
    config, step = _config(profile), head_step(profile)
    if heads < 1 or heads % step:
        raise InputError(
            f"{heads} heads of {profile.name} cannot share keys as its {heads_of(profile)} do",
            hints=[f"take a multiple of {step}"],
        )
    factor = heads / heads_of(profile)
    changed = dict(config)
    for name, value in config.items():
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        if name in _HEADS:
            changed[name] = heads
        elif name == _KEY_HEADS:
            changed[name] = value * heads // heads_of(profile)
        elif name in _WIDTHS:
            changed[name] = value // heads_of(profile) * heads
        elif name in _INNER:
            changed[name] = max(1, round(value * factor / _ROUND)) * _ROUND
        elif name in _DEPTHS:
            changed[name] = max(1, round(value * factor))
    return _counted(profile, changed, profile.tokens_per_sample)


def heads_of(profile: ModelProfile) -> int:
    """Attention heads of a layer, from its config.json."""
    config = _config(profile)
    values = (config.get(name) for name in _HEADS)
    heads = next((value for value in values if isinstance(value, int)), None)
    if heads is None:
        raise InputError(f"the config of {profile.name} names no heads: it cannot be scaled")
    return heads


def head_step(profile: ModelProfile) -> int:
    """Step of the number of heads that preserves the number of query heads per key-value head.

    Per-layer lists in a config do not extend to other depths.
    """
    config, heads = _config(profile), heads_of(profile)
    lists = [name for name, value in config.items() if isinstance(value, list)]
    if "layer_types" in lists or "mlp_only_layers" in lists:
        raise InputError(f"{profile.name} is described layer by layer: it cannot be scaled")
    key_heads = config.get(_KEY_HEADS)
    return heads // gcd(heads, key_heads) if isinstance(key_heads, int) else 1


def _config(profile: ModelProfile) -> dict[str, JsonValue]:
    if profile.factory is not None:
        raise InputError(
            f"`{profile.factory}` makes {profile.name} at one size",
            hints=["save its configuration as config.json, which is known at any size"],
        )
    if profile.config is None:
        raise InputError(
            f"{profile.name} is known at {_size(profile)} only: its profile is of a module",
            hints=[_WAY_OUT],
        )
    return profile.config


def _size(profile: ModelProfile) -> str:
    tokens = profile.tokens_per_sample
    return f"{tokens} tokens" if tokens else "one size"


def _counted(
    profile: ModelProfile, config: dict[str, JsonValue], sequence_length: int | None
) -> ModelProfile:
    return profile_of_config(config, like=profile, sequence_length=sequence_length)
