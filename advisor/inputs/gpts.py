"""Bundled GPTs: counted in closed form without torch, or built on the meta device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import JsonValue

from advisor.inputs.bundled.gpt_closed_form import gpt_family
from advisor.inputs.bundled.gpt_shapes import GPTConfig
from profiles.closed_forms.families.fields import Fields
from profiles.closed_forms.families.profile import profile_of
from profiles.model.profile import ModelProfile, Numerics

if TYPE_CHECKING:
    from torch import nn

    from profiles.capture.batch.call import Batch, LossFn

BUNDLED = "advisor.inputs.bundled.gpt"
"""`model_type` of their shapes, as profiles keep them."""


def gpt_profile(
    shape: GPTConfig,
    *,
    name: str,
    samples: int,
    sequence_length: int | None,
    numerics: Sequence[Numerics],
) -> ModelProfile:
    """Profile a GPT on accelerators: what a capture of the module gives, to the byte.

    Cycles of processors' cores have no closed form: for those the module is captured.
    """
    length = sequence_length or shape.context
    profile = profile_of(
        gpt_family(_long_enough(shape, length)),
        samples=samples,
        sequence_length=length,
        name=name,
        numerics=tuple(dict.fromkeys(numerics)),
        on_processor=False,
    )
    return profile.model_copy(update={"config": config_of(shape)})


def build_gpt(
    shape: GPTConfig, *, samples: int, sequence_length: int | None
) -> tuple[nn.Module, Batch, LossFn]:
    """Build the module, a batch of token ids (B, T) with targets (B, T), and the loss."""
    import torch

    from advisor.inputs.bundled.gpt import GPT, loss

    length = sequence_length or shape.context
    with torch.device("meta"):
        module = GPT(_long_enough(shape, length))
    ids = torch.zeros(samples, length, dtype=torch.long)
    return module, (ids, ids), loss


def _long_enough(shape: GPTConfig, length: int) -> GPTConfig:
    """Learned positions: a longer sequence needs a longer table, nothing else changes."""
    return dataclasses.replace(shape, context=max(length, shape.context))


def config_of(shape: GPTConfig) -> dict[str, JsonValue]:
    """Return the shape as profiles keep it."""
    return {"model_type": BUNDLED, **dataclasses.asdict(shape)}


def shape_of(config: Mapping[str, object], where: str) -> GPTConfig:
    """Read what `config_of` returns.

    Raises:
        FileError, InputError: a size is missing, or none.
    """
    fields = Fields(config, where=where)
    width, num_heads = fields.heads("width", "num_heads")
    return GPTConfig(
        vocab_size=fields.size("vocab_size"),
        context=fields.size("context"),
        num_layers=fields.size("num_layers"),
        num_heads=num_heads,
        width=width,
        dropout=fields.share("dropout", 0.0),
    )
