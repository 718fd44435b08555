"""Profiles in closed form against captures of what transformers builds."""

from __future__ import annotations

import inspect

import pytest

from advisor.inputs.hugging_face import SIZES
from profiles.closed_forms.families import profile_from_config
from profiles.closed_forms.families.known_fields import FIELDS, OWN_NAMES
from profiles.closed_forms.families.registry import FAMILIES
from profiles.model.profile import ModelProfile, Numerics
from profiles.workload.under_stack import AMOUNTS
from tests.nightly import half
from tests.profiles.capture.equal_profiles import assert_equal, without_cycles
from tests.profiles.closed_forms.family_configs import (
    CONFIGS,
    GROUPED,
    LLAMA_3_8B,
    MIXTRAL,
    TOKENS,
    Config,
    tokens_of,
)

SAMPLES = 2
FIELDS_OF = ("5.23.", "5.24.")  # versions of transformers that the table of fields is of
FORMS_OF = (5, 23)
"""The first version of transformers that runs the operations which are counted: 5.17 has others in
rotary embeddings, T5's feed-forward and deepseek_v3's attention."""
# Of layers that are alike two and the last are run in closed form; the deeper ones have more.
ONE_OF_EACH = (
    "llama",
    "llama, grouped, with dropout",
    "mistral, a window shorter than the sequence",
    "gpt2",
    "bert",
    "t5",
    "vit",
    "mixtral",
    "deepseek_v3",
)


def require_operations() -> None:
    """Skip under a transformers that runs other operations than the closed forms count."""
    transformers = pytest.importorskip("transformers")
    if tuple(map(int, transformers.__version__.split(".")[:2])) < FORMS_OF:
        pytest.skip(
            f"operations are those of transformers {'.'.join(map(str, FORMS_OF))} and later,"
            f" this is {transformers.__version__}"
        )


def captured(
    config: Config, samples: int, numerics: tuple[Numerics, ...], *, on_processor: bool = True
) -> ModelProfile:
    """The profile of the model that transformers builds, in training mode, on accelerators."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from profiles.capture.capture import capture

    content = dict(config)
    named = content.pop("architectures", [None])
    built = transformers.AutoConfig.for_model(content.pop("model_type"), **content)
    built.use_cache = False
    model_class = (
        getattr(transformers, named[0])  # type: ignore[index]
        if named[0]  # type: ignore[index]
        else transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(built)]
    )
    with torch.device("meta"):
        model = model_class(built)
    if tokens_of(config) is None:
        images = torch.zeros(samples, 3, built.image_size, built.image_size)
        batch = {"pixel_values": images, "labels": torch.zeros(samples, dtype=torch.long)}
    else:
        ids = torch.zeros(samples, TOKENS, dtype=torch.long)
        batch = {"input_ids": ids, "labels": ids}
    profile = capture(
        model.train(), batch, numerics=numerics, name="model", on_processor=on_processor
    )
    return without_cycles(profile) if on_processor else profile


@pytest.mark.parametrize("name", half(CONFIGS, of=3))
def test_a_config_gives_what_capture_of_its_model_gives(name: str) -> None:
    require_operations()
    config = CONFIGS[name]
    numerics = tuple(Numerics) if name in ONE_OF_EACH else (Numerics.AS_BUILT,)
    profile = profile_from_config(
        config,
        samples=SAMPLES,
        sequence_length=tokens_of(config),
        name="model",
        numerics=numerics,
    )
    assert_equal(profile, captured(config, SAMPLES, numerics))


@pytest.mark.parametrize("name", ["llama", "t5", "vit"])
def test_the_closed_form_of_one_sample_equals_its_capture(name: str) -> None:
    require_operations()
    config = CONFIGS[name]
    profile = profile_from_config(
        config, samples=1, sequence_length=tokens_of(config), name="model"
    )
    assert_equal(profile, captured(config, 1, (Numerics.AS_BUILT,)))


def test_every_family_is_compared_with_a_capture() -> None:
    assert {config["model_type"] for config in CONFIGS.values()} == set(FAMILIES)


def test_the_fields_of_each_kind_are_those_of_its_configuration_class() -> None:
    transformers = pytest.importorskip("transformers")
    if not transformers.__version__.startswith(FIELDS_OF):
        pytest.skip(f"fields are those of transformers {', '.join(FIELDS_OF)}")
    for kind in FAMILIES:
        of_kind = transformers.CONFIG_MAPPING[kind]
        assert FIELDS[kind] == set(inspect.signature(of_kind).parameters), kind
        own = {n: m for n, m in of_kind.attribute_map.items() if n in SIZES}
        assert OWN_NAMES.get(kind, {}) == own, kind


def test_at_full_size_a_profile_is_that_of_the_capture() -> None:
    """Llama-3-8B at 2,048 tokens; 24 of the captured layers are not run in closed form."""
    require_operations()
    import torch
    import transformers

    from profiles.capture.capture import capture

    config = transformers.LlamaConfig(
        **{k: v for k, v in LLAMA_3_8B.items() if k not in ("model_type", "torch_dtype")}
    )
    config.use_cache = False
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).train()
    ids = torch.zeros(1, 2048, dtype=torch.long)
    expected = capture(model, {"input_ids": ids, "labels": ids}, name="full")
    profile = profile_from_config(LLAMA_3_8B, samples=1, sequence_length=2048, name="full")
    assert_equal(profile, without_cycles(expected))


@pytest.mark.parametrize(
    "name", ["gpt2", "llama, grouped, with dropout", "bert", "t5", "vit", "mixtral"]
)
def test_a_config_gives_what_capture_gives_for_accelerators(name: str) -> None:
    """Memory, work and launches; a capture forgets which attention drops scores."""
    config, kinds = CONFIGS[name], tuple(Numerics)
    tokens = tokens_of(config)
    profile = profile_from_config(
        config,
        samples=SAMPLES,
        sequence_length=tokens,
        numerics=kinds,
        on_processor=False,
        name="model",
    )
    expected = captured(config, SAMPLES, kinds, on_processor=False)
    for ours, theirs in zip(profile.units, expected.units, strict=True):
        for kind in kinds:
            one, other = ours.costs[kind], theirs.costs[kind]
            for amount in AMOUNTS:
                assert getattr(one, amount) == getattr(other, amount), (ours.name, kind, amount)
            assert one.forward_kernels == other.forward_kernels, (ours.name, kind)


@pytest.mark.parametrize(
    "name", ["gpt2", "llama, deeper", "t5", "bert", "vit", "mixtral", "deepseek_v3"]
)
def test_values_across_unit_borders_equal_those_of_a_capture(name: str) -> None:
    """Compares values with gradients: the closed form follows nothing else (T5 hands on a mask,
    too)."""
    config = CONFIGS[name]
    actual = profile_from_config(
        config, samples=SAMPLES, sequence_length=tokens_of(config), name="model"
    ).flow
    expected = captured(config, SAMPLES, (Numerics.AS_BUILT,)).flow
    ours = [call.unit for call in actual.calls]
    assert ours == [call.unit for call in expected.calls]
    for position in range(1, len(ours)):
        crossing, wanted = (
            [(v.shape, v.dtype, v.bytes) for v in flow.crossing(position) if v.needs_gradient]
            for flow in (actual, expected)
        )
        assert sorted(crossing, key=str) == sorted(wanted, key=str), ours[position]


@pytest.mark.parametrize(
    ("kind", "default"), [("mistral", 4096), ("phi3", None), ("mixtral", None)]
)
def test_windows_that_a_config_leaves_out_are_those_of_transformers(
    kind: str, default: int | None
) -> None:
    """MistralConfig has a window of 4,096 tokens, the others of its form have none."""
    config = {**(MIXTRAL if kind == "mixtral" else GROUPED), "model_type": kind}
    left_out, with_it, without = (
        profile_from_config(
            {**config, "max_position_embeddings": 8192, **window},
            samples=1,
            sequence_length=5000,
            name=kind,
        )
        for window in ({}, {"sliding_window": 4096}, {"sliding_window": None})
    )
    assert with_it.units != without.units
    assert left_out.units == (without if default is None else with_it).units
