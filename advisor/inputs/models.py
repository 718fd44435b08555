"""MODEL, as people write it on the command line, to a module, a sample and a loss.

MODEL is a bundled name (of a GPT, or of a network on images: see `advisor.inputs.networks`),
`pkg.module:factory` or `file.py:factory`, a Hugging Face config.json, or a saved profile. A factory
runs as it is, with the rights and the devices it takes; bundled and Hugging Face models are built
on the meta device (ResNets, which can be run, are not). A bundled model on accelerators, or a
config of a kind that `profiles.closed_forms.families` knows, is counted in closed form, without an
import of torch or transformers.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from pydantic import JsonValue

from advisor.inputs import hugging_face, user_code
from advisor.inputs.bundled.gpt_shapes import SHAPES, GPTConfig
from advisor.inputs.console import say
from advisor.inputs.gpts import BUNDLED, build_gpt, config_of, gpt_profile, shape_of
from advisor.inputs.infinite_numbers import read_json
from advisor.inputs.networks import build_network, is_network, network_profile
from advisor.inputs.user_code import RETURN
from profiles.errors import InputError, ModelError, UnknownNameError, a_type
from profiles.model.profile import ModelProfile, Numerics

if TYPE_CHECKING:
    from torch import Tensor, nn

    from profiles.capture.batch.call import Batch, LossFn

CONFIG = "config.json"
KINDS = (
    "a bundled name, `pkg.module:factory` or `file.py:factory`, a Hugging Face config.json, or a"
    " saved profile"
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model to profile.

    Attributes:
        sample: one batch: a tensor, (inputs..., target) or a dict of keyword arguments.
        loss_fn: loss_fn(output, target), or None where the model returns its loss.
    """

    module: nn.Module
    sample: Batch
    loss_fn: LossFn | None
    name: str


def profile_model(
    text: str,
    *,
    samples: int,
    sequence_length: int | None,
    numerics: Sequence[Numerics] = (),
    timed: bool = False,
    on_processor: bool = False,
    on_load: Callable[[LoadedModel], None] | None = None,
) -> ModelProfile:
    """Profile of MODEL: read from a saved profile (without torch), or captured now.

    Args:
        samples, sequence_length: of the sample where it is made here; see `load_model`.
        numerics: kinds to capture beside `AS_BUILT`; those that the model's dtype rules out are
            left out.
        timed: run its blocks on this machine too, and add their times.
        on_processor: it trains there, where torch writes out attention with dropout.
        on_load: called with the module, where one is built.

    Raises:
        InputError: a saved profile of another sequence length, or that is to be timed; else as
            `load_model`.
    """
    path = _json_path(text)
    content = read_json(path) if path is not None else {}
    if path is not None and "units" in content:
        try:
            profile = ModelProfile.from_object(content, where=str(path))
        except InputError as error:
            error.hints = (*error.hints, f"profile again: `advise profile MODEL -o {path}`")
            raise
        if sequence_length not in (None, profile.tokens_per_sample):
            raise InputError(
                f"`--seq {sequence_length}`, but the profile is of"
                f" {profile.tokens_per_sample or 'no'} tokens",
                where=str(path),
                hints=[f"profile again: `advise profile MODEL --seq {sequence_length} -o {path}`"],
            )
        if timed:
            raise InputError(
                "a saved profile has no code to run",
                where=str(path),
                hints=[f"name the model itself: `advise profile MODEL --time -o {path}`"],
            )
        return profile
    if is_network(text) and not timed:
        _require_no_length(text, sequence_length)
        return network_profile(text, samples=samples)
    if path is None and ":" not in text and not timed and not on_processor:
        return gpt_profile(
            _shape(text),
            name=text,
            samples=samples,
            sequence_length=sequence_length,
            numerics=(Numerics.AS_BUILT, *numerics),
        )
    if path is not None and not timed:
        profile_or_none = hugging_face.closed_form(
            path,
            samples=samples,
            sequence_length=sequence_length,
            numerics=(Numerics.AS_BUILT, *numerics),
            on_processor=on_processor,
        )
        if profile_or_none is not None:
            return profile_or_none
    if path is not None and timed and (missing := hugging_face.missing_package()) is not None:
        raise ModelError(
            f"`{path}` cannot be timed: its blocks run only where {missing} is installed",
            hints=["leave `--time` out: the closed form counts, and a roofline gives times"],
        )
    loaded = load_model(text, samples=samples, sequence_length=sequence_length)
    if on_load is not None:
        on_load(loaded)
    profile = _captured(loaded, (Numerics.AS_BUILT, *numerics), on_processor)
    profile = profile.model_copy(update=_made_from(text))
    return _timed(loaded, profile) if timed else profile


def _captured(loaded: LoadedModel, kinds: Sequence[Numerics], on_processor: bool) -> ModelProfile:
    from profiles.capture.capture import capture

    wanted = kinds if _has_float32(loaded.module) else (Numerics.AS_BUILT,)
    try:
        return capture(
            loaded.module,
            loaded.sample,
            loss_fn=loaded.loss_fn,
            numerics=tuple(dict.fromkeys(wanted)),
            name=loaded.name,
            on_processor=on_processor,
        )
    except ModelError as error:
        if ":" in loaded.name:
            error.hints = (*error.hints, RETURN)
        raise


def _made_from(text: str) -> dict[str, object]:
    """Profile fields that record the model's source, to capture it again at another size."""
    path = _json_path(text)
    if path is not None:
        return {"config": hugging_face.read_config(path)}
    if ":" in text:
        return {"factory": text}
    if is_network(text):
        return {}
    return {"config": config_of(_shape(text))}


def profile_of_config(
    config: Mapping[str, JsonValue], *, like: ModelProfile, sequence_length: int | None
) -> ModelProfile:
    """Profile the model of `config` as `like` was, without messages.

    Raises:
        InputError: the model does not take such sequences, or cannot be built.
    """
    from profiles.closed_forms.families import family_of, profile_from_config

    where, samples = f"config of {like.name}", like.samples
    if config.get("model_type") == BUNDLED:
        shape = shape_of(config, where)
        if like.on_processor is False:
            return gpt_profile(
                shape,
                name=like.name,
                samples=samples,
                sequence_length=sequence_length,
                numerics=like.numerics,
            )
        built = build_gpt(shape, samples=samples, sequence_length=sequence_length)
        loaded = LoadedModel(*built, like.name)
    else:
        try:
            family_of(config, where=where)
        except InputError:
            if hugging_face.missing_package() is not None:
                raise
        else:
            return profile_from_config(
                config,
                samples=samples,
                sequence_length=sequence_length,
                name=like.name,
                numerics=like.numerics,
                on_processor=like.on_processor is not False,
                where=where,
            )
        module, batch = hugging_face.build(
            Path(where), samples=samples, sequence_length=sequence_length, content=config
        )
        loaded = LoadedModel(module, batch, None, like.name)
    profile = _captured(loaded, like.numerics, like.on_processor is not False)
    return profile.model_copy(update={"config": dict(config)})


def profile_of_factory(factory: str, *, like: ModelProfile, sequence_length: int) -> ModelProfile:
    """Profile the model that `factory` returns as `like` was, at another sequence length.

    Every dimension of its sample that equals the old sequence length is resized.

    Raises:
        ModelError: it cannot be made again, or does not take such sequences; or a file names it and
            the user did not: files run no code.
    """
    if factory not in _NAMED:
        raise ModelError(
            f"`{factory}` is named in a file, and files run no code",
            hints=[f"name the model itself: `advise {factory}`"],
        )
    module, *rest = _made_again(factory)
    if not rest:
        loaded = _with_token_sample(factory, module, like.samples, sequence_length)
    else:
        sample = _resized(rest[0], like.tokens_per_sample, sequence_length)
        loaded = LoadedModel(module, sample, rest[1] if len(rest) == 2 else None, factory)
    profile = _captured(loaded, like.numerics, like.on_processor is not False)
    return profile.model_copy(update={"name": like.name, "factory": factory})


def _resized(sample: Batch, before: int | None, after: int) -> Batch:
    """Resize by repeating values, which do not matter."""
    import torch

    from profiles.capture.batch.tree import map_batch

    def resized(tensor: Tensor) -> Tensor:
        for dim in range(1, tensor.ndim):
            if tensor.shape[dim] == before:
                index = torch.arange(after, device=tensor.device) % before
                tensor = tensor.index_select(dim, index)
        return tensor

    return map_batch(resized, sample)


def require_model(text: str) -> None:
    """Check that MODEL names something, as far as possible without running user code.

    Raises:
        UnknownNameError, ModelError, FileError: as `load_model`.
    """
    path = _json_path(text)
    if path is not None:
        read_json(path)
    elif ":" in text:
        user_code.require_package(_factory_name(text)[0])
    elif not is_network(text):
        _shape(text)


def _require_no_length(text: str, sequence_length: int | None) -> None:
    if sequence_length is not None:
        raise InputError(
            f"`--seq {sequence_length}`, but `{text}` takes images",
            hints=["leave `--seq` out; the side of its images is in its name: `resnet50-224px`"],
        )


def _timed(loaded: LoadedModel, profile: ModelProfile) -> ModelProfile:
    """Add block times on this machine's device, in all numerics of the profile."""
    from profiles.machine.probe import probe
    from profiles.timing.stopwatch import with_times

    name = probe().device.name
    say(f"timing the blocks of {loaded.name} on {name} ...")
    return with_times(
        loaded.module, loaded.sample, profile, device_name=name, loss_fn=loaded.loss_fn
    )


def load_model(text: str, *, samples: int, sequence_length: int | None) -> LoadedModel:
    """Build the model that MODEL names.

    Args:
        samples: batch size of a sample that is made here.
        sequence_length: tokens of it; None takes what the model says of itself.

    Raises:
        UnknownNameError: no bundled model, module, or name in the module is called so.
        ModelError: the module does not import, the factory raises or returns something else.
        FileError: a file that is neither a profile nor a Hugging Face config.
    """
    path = _json_path(text)
    if path is not None:
        module, batch = hugging_face.build(path, samples=samples, sequence_length=sequence_length)
        return LoadedModel(module, batch, None, hugging_face.name_of(path))
    if ":" in text:
        return _from_factory(text, samples, sequence_length)
    if is_network(text):
        from torch.nn.functional import cross_entropy

        _require_no_length(text, sequence_length)
        return LoadedModel(*build_network(text, samples=samples), cross_entropy, text)
    built = build_gpt(_shape(text), samples=samples, sequence_length=sequence_length)
    return LoadedModel(*built, text)


def _shape(name: str) -> GPTConfig:
    if name in SHAPES:
        return SHAPES[name]
    config, code = Path(name) / CONFIG, f"{name.removesuffix('.py')}.py"
    inside = [f"did you mean `{config}`?"] if os.path.isfile(config) else []
    if os.path.isfile(code):
        inside.append(f"name its function, as in `{code}:build_model`")
    raise UnknownNameError("model", name, SHAPES, hints=[*inside, f"MODEL is {KINDS}"])


def _factory_name(text: str) -> tuple[str, str]:
    """Module, or its file, and attribute of `pkg.module:factory`."""
    module_name, _, attribute = text.partition(":")
    if not module_name or not attribute:
        raise ModelError(
            f"`{text}` is not `pkg.module:factory`", hints=["for example `train:build_model`"]
        )
    return module_name, attribute


def _from_factory(text: str, samples: int, sequence_length: int | None) -> LoadedModel:
    _NAMED.add(text)
    module, *rest = _made(text)
    if not rest:
        return _with_token_sample(text, module, samples, sequence_length)
    if sequence_length is not None:
        raise InputError(
            f"`--seq {sequence_length}`, but `{text}` brings its own sample",
            hints=["leave `--seq` out, or return the Module alone"],
        )
    return LoadedModel(module, rest[0], rest[1] if len(rest) == 2 else None, text)


def _made(text: str) -> tuple[Any, ...]:
    """Result of a factory: (module,), (module, sample) or (module, sample, loss_fn)."""
    module_name, attribute = _factory_name(text)
    module = user_code.import_module(module_name)
    target = user_code.attribute(module, attribute, called=module_name)
    from torch import nn

    made = user_code.call(text, target) if _is_factory(target, nn.Module) else target
    parts = made if isinstance(made, tuple) and made else (made,)
    if not isinstance(parts[0], nn.Module) or len(parts) > 3:
        raise ModelError(f"`{text}` gives {_describe(made)}, not a torch.nn.Module", hints=[RETURN])
    return parts


_NAMED: set[str] = set()
"""Factories that the user of this process named."""
# Cached, since a query tries many lengths.
_made_again = lru_cache(maxsize=1)(_made)


def _with_token_sample(
    text: str, module: nn.Module, samples: int, sequence_length: int | None
) -> LoadedModel:
    """Create a batch of token ids for a model without a sample.

    A model with `config.vocab_size`, or whose first parameters are an embedding's, takes token ids.
    With a `labels` argument it computes its loss; others are assumed to return logits.
    """
    from torch import nn

    from advisor.inputs.bundled.gpt import loss

    config = getattr(module, "config", None)
    owners = (m for m in module.modules() if next(m.parameters(recurse=False), None) is not None)
    if not hasattr(config, "vocab_size") and not isinstance(next(owners, None), nn.Embedding):
        raise ModelError(
            f"`{text}` gives no sample, and the model does not begin with token ids",
            hints=[RETURN],
        )
    lengths = (
        sequence_length,
        *(getattr(config, name, None) for name in ("context", "block_size")),
    )
    length = next((length for length in lengths if length), None)
    if length is None:
        raise InputError(
            f"`{text}` gives no sample, and does not say how long a sequence is",
            hints=["add `--seq 2048`", RETURN],
        )
    ids = _ids(samples, length)
    if {"input_ids", "labels"} <= set(inspect.signature(module.forward).parameters):
        return LoadedModel(module, {"input_ids": ids, "labels": ids}, None, text)
    return LoadedModel(module, (ids, ids), loss, text)


def _is_factory(value: object, module_class: type) -> TypeGuard[Callable[[], object]]:
    return callable(value) and not isinstance(value, module_class)


def _describe(made: object) -> str:
    """Summarize a factory's result."""
    if isinstance(made, tuple):
        return f"({', '.join(type(part).__name__ for part in made)})"
    if made is None or isinstance(made, type):
        return f"`{made!r}`"
    return a_type(made)


def _ids(samples: int, length: int) -> Tensor:
    import torch

    return torch.zeros(samples, length, dtype=torch.long)


def _has_float32(module: nn.Module) -> bool:
    """Return True if precision is open: other dtypes run as built."""
    import torch

    return any(p.dtype == torch.float32 for p in module.parameters())


def _json_path(text: str) -> Path | None:
    """Path of the file that MODEL names; None for a name or a factory."""
    path = Path(text)
    return path if path.suffix == ".json" else None
