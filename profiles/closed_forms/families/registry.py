"""Registry of families by `model_type`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from profiles.closed_forms.families import bert, deepseek, gpt, llama, moe, t5, vit
from profiles.closed_forms.families.fields import WAY_OUT, Fields
from profiles.closed_forms.families.network import ModelFamily
from profiles.errors import FileError, UnknownNameError

FAMILIES: dict[str, Callable[[Fields], ModelFamily]] = {
    "bert": bert.bert,
    "deepseek_v3": deepseek.deepseek_v3,
    "distilbert": bert.distilbert,
    "gemma": llama.family,
    "gpt2": gpt.gpt2,
    "gpt_neox": gpt.gpt_neox,
    "llama": llama.family,
    "mistral": llama.family,
    "mixtral": moe.mixtral,
    "opt": gpt.opt,
    "phi3": llama.family,
    "qwen2": llama.family,
    "qwen3": llama.family,
    "qwen3_moe": moe.qwen3_moe,
    "roberta": bert.roberta,
    "t5": t5.family,
    "vit": vit.vit,
}


def family_of(config: Mapping[str, object], *, where: str = "config.json") -> ModelFamily:
    """The model that the content of a config.json describes.

    Raises:
        FileError: no `model_type`, or a size is missing.
        UnknownNameError: a `model_type`, class or function that has no closed form; the near miss
            is named.
        InputError: a field whose value has none.
    """
    fields = Fields(config, where=where)
    if not fields.has("model_type"):
        raise FileError("`model_type` is missing", where=where)
    if fields.family not in FAMILIES:
        raise UnknownNameError(
            "`model_type` without transformers",
            fields.family,
            sorted(FAMILIES),
            where=where,
            hints=[WAY_OUT],
        )
    return FAMILIES[fields.family](fields)
