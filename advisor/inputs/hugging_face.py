"""A Hugging Face config.json: counted in closed form, or its model built by transformers."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advisor.inputs import user_code
from advisor.inputs.console import say
from advisor.inputs.infinite_numbers import as_numbers, read_json
from advisor.inputs.offline import bounded_modules, offline, without_code
from advisor.inputs.user_code import RETURN
from profiles.closed_forms.families.counted_fields import require_countable
from profiles.closed_forms.families.fields import require_whole_weights
from profiles.errors import FileError, InputError, ModelError, UnknownNameError, near_misses
from profiles.model.profile import ModelProfile, Numerics

if TYPE_CHECKING:
    from torch import Tensor, nn

USUAL_SEQUENCE = 2048  # only an example in a hint
USUAL_IMAGE_SIDE = 224  # pixels; ImageNet's crop (Krizhevsky et al. 2012, section 4.1)
MOST_NUMBERS = 2**26  # of the images that are made: 256 MiB, a photograph of 22 megapixels
# transformers' common names; `attribute_map` has a model's own names.
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_MISSPELT = 0.9  # similarity of field names; less similar ones belong to other versions


def build(
    path: Path,
    *,
    samples: int,
    sequence_length: int | None,
    content: Mapping[str, object] | None = None,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model of a config on the meta device, and a batch with labels: it makes its own loss.

    Only classes of the installed transformers are made: code that a config names (`auto_map`) is
    neither fetched nor imported, and no hub is asked.

    Args:
        content: of the config, where it is not read from `path`; no notes are made then.

    Raises:
        FileError: the file is no such config.
        ModelError: transformers is missing, or does not build it, or it takes something else.
        InputError: a sequence length is wanted, or too long; a number is beyond its bound; or
            weights are quantized.
    """
    says, content = content is None, content or read_config(path)
    require_countable(content, where=str(path))
    require_whole_weights(content, where=str(path))
    import torch

    try:
        import transformers
    except ImportError:
        raise ModelError(
            f"`{path}` is a Hugging Face config, and transformers is not installed",
            hints=["`pip install 'parallel-advisor[hf]'`"],
        ) from None
    kind = str(content["model_type"])
    if kind not in transformers.CONFIG_MAPPING:
        raise _unknown_kind(path, kind, content)
    with user_code.guarded(f"`{path}` cannot be built"), offline(), bounded_modules(path):
        config = transformers.CONFIG_MAPPING[kind].from_dict(
            as_numbers(without_code(content, path))
        )
        name = next(iter(getattr(config, "architectures", None) or ()), None) or ""
        takes_images = name.endswith("ForImageClassification")
        if not hasattr(config, "vocab_size") and not takes_images:
            raise ModelError(
                f"`{name or config.model_type}` does not take token ids alone",
                where=str(path),
                hints=["write a factory for `pkg.module:factory`", RETURN],
            )
        if says:
            fields = inspect.signature(type(config)).parameters
            _check_fields(path, content, fields, config.attribute_map)
        config.use_cache = False  # the key-value cache serves generation, not training
        model_class: Any = getattr(transformers, name, None)
        is_model = inspect.isclass(model_class)
        if not is_model or not issubclass(model_class, transformers.PreTrainedModel):
            model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        with torch.device("meta"):
            module = model_class(config)  # float32, whatever dtype the weights were saved in
        if takes_images:
            _refuse_length(path, sequence_length)
            batch = _images(path, config, samples)
        else:
            longest = getattr(config, "max_position_embeddings", None)
            length = _sequence_length(path, sequence_length, longest)
            ids = torch.zeros(samples, length, dtype=torch.long)
            batch = {"input_ids": ids, "labels": ids}
    if says:
        _tell_dtype(path, getattr(config, "dtype", None))
    return module, batch


def _unknown_kind(path: Path, kind: str, content: Mapping[str, object]) -> InputError:
    import transformers

    if near_misses(kind, transformers.CONFIG_MAPPING):
        return UnknownNameError("`model_type`", kind, transformers.CONFIG_MAPPING, where=str(path))
    what = f"transformers {transformers.__version__} has no `model_type` {kind[:80]!r}"
    if "auto_map" in content:
        what += ", and code that a config names (`auto_map`) is never run"
    return ModelError(
        what, where=str(path), hints=["write a factory for `pkg.module:factory`", RETURN]
    )


def _images(path: Path, config: Any, samples: int) -> dict[str, Tensor]:
    import torch

    size = getattr(config, "image_size", None)
    if size is None:  # convolutional networks take any
        size = USUAL_IMAGE_SIDE
        say(f"note: {path} has no `image_size`: {size} x {size} pixels")
    height, width = size if isinstance(size, list | tuple) else (size, size)
    if (numbers := samples * config.num_channels * height * width) > MOST_NUMBERS:
        raise InputError(
            f"`image_size` = {size}: an image has {numbers:,} numbers, {MOST_NUMBERS:,} are the"
            " most",
            where=str(path),
        )
    return {
        "pixel_values": torch.zeros(samples, config.num_channels, height, width),
        "labels": torch.zeros(samples, dtype=torch.long),
    }


def _check_fields(
    path: Path,
    content: Mapping[str, object],
    fields: Collection[str],
    own_names: Mapping[str, str],
) -> None:
    """Refuse a config without a size, and note fields that are misspelt.

    What a file leaves out transformers fills in, with the shape of some published model.

    Args:
        fields: of the configuration class.
        own_names: what the model calls sizes that others have under one name.
    """
    mapped = {own_names.get(name, name): name for name in SIZES}
    missing = [
        own
        for own, name in mapped.items()
        if own in fields and content.get(own) is None and content.get(name) is None
    ]
    unknown = [name for name in content if name not in fields and name not in SIZES]
    unused = [name for name in fields if name not in content]
    misspelt = [
        (name, meant)
        for name in unknown
        for meant in difflib.get_close_matches(name, unused, 1, _MISSPELT)
    ]
    if missing:
        raise FileError(
            f"{', '.join(f'`{name}`' for name in missing)} {'is' if len(missing) == 1 else 'are'}"
            f" missing, without which a `{content['model_type']}` model has no shape",
            where=str(path),
            hints=[f"`{name}` is not a field: `{meant}` is" for name, meant in misspelt],
        )
    for name, meant in misspelt:
        say(f"note: `{name}` in {path} is not a field, and not looked at: `{meant}` is one")


def closed_form(
    path: Path,
    *,
    samples: int,
    sequence_length: int | None,
    numerics: Sequence[Numerics],
    on_processor: bool,
) -> ModelProfile | None:
    """The profile of a config whose kind `profiles.closed_forms.families` knows, which imports
    neither torch nor transformers; None where it has to be captured from the model that
    transformers builds.

    Raises:
        FileError, InputError: see `profiles.closed_forms.families.profile_from_config`; of a config
            without a closed form only where it cannot be captured either.
    """
    from profiles.closed_forms.families import family_of, profile_from_config
    from profiles.closed_forms.families.known_fields import FIELDS, OWN_NAMES

    content = read_config(path)
    kind, missing = str(content["model_type"]), missing_package()
    # A T5's split rests on which layers share its table of positions: only its module tells.
    if missing is None and (kind not in FIELDS or kind == "t5"):
        return None
    try:
        family = family_of(content, where=str(path))
    except InputError:
        if missing is None:
            return None  # transformers takes it, or says why not
        if kind in FIELDS:
            _check_fields(path, content, FIELDS[kind], OWN_NAMES.get(kind, {}))
        raise
    _check_fields(path, content, FIELDS[kind], OWN_NAMES.get(kind, {}))
    if family.takes_tokens:
        sequence_length = _sequence_length(path, sequence_length, family.longest)
    else:
        _refuse_length(path, sequence_length)
    if missing is not None:
        say(
            f"note: without {missing}, {family.kind} is profiled in closed form: parameters, FLOP,"
            " activations and memory traffic of training as transformers runs it"
        )
    _tell_dtype(path, content.get("dtype") or content.get("torch_dtype"))
    return profile_from_config(
        content,
        samples=samples,
        sequence_length=sequence_length,
        name=name_of(path),
        numerics=tuple(dict.fromkeys(numerics)),
        on_processor=on_processor,
        where=str(path),
    )


def missing_package() -> str | None:
    """The package that building a model from a config needs and that is not installed.

    Nothing is imported: that takes seconds.
    """
    for package in ("torch", "transformers"):
        try:
            spec = importlib.util.find_spec(package)
        except ImportError:  # by a finder that blocks it
            spec = None
        if spec is None:
            return package
    return None


def name_of(path: Path) -> str:
    """Return the model's name from its path: the folder of a config.json."""
    return path.resolve().parent.name if path.name == "config.json" else path.stem


def read_config(path: Path) -> dict[str, object]:
    """Read the content of a config.

    Raises:
        FileError: it cannot be read, or is something else.
    """
    content = read_json(path)
    if "model_type" not in content:
        raise FileError(
            "neither a model profile (`units`) nor a Hugging Face config (`model_type`)",
            where=str(path),
            hints=["`advise profile MODEL -o model.json` writes a profile"],
        )
    return content


def _sequence_length(path: Path, given: int | None, longest: int | None) -> int:
    if given is None:
        raise InputError(
            f"`{path}` does not say how long a training sequence is",
            hints=[
                f"add `--seq {min(USUAL_SEQUENCE, longest or USUAL_SEQUENCE)}`"
                + (f" (positions go to {longest})" if longest else "")
            ],
        )
    if longest and given > longest:
        raise InputError(
            f"`--seq {given}`, but the positions of this model go to {longest}",
            where=f"{path}: max_position_embeddings",
            hints=[f"`--seq {longest}`, or raise `max_position_embeddings` in the file"],
        )
    return given


def _refuse_length(path: Path, given: int | None) -> None:
    if given is not None:
        raise InputError(
            f"`--seq {given}`, but this model takes images",
            where=str(path),
            hints=["leave `--seq` out"],
        )


def _tell_dtype(path: Path, dtype: object) -> None:
    saved = str(dtype or "float32").removeprefix("torch.")
    if saved != "float32":
        say(f"note: {path} names {saved}; parameters are taken as fp32, for training")
