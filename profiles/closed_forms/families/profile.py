"""A Hugging Face config.json to a `ModelProfile`, without torch and without transformers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from pydantic import JsonValue

from profiles.closed_forms.families import operations as ops
from profiles.closed_forms.families.gradients import gradient_number
from profiles.closed_forms.families.memory import DType, saved_bytes
from profiles.closed_forms.families.network import FamilyRun, FamilyUnit, ModelFamily
from profiles.closed_forms.families.registry import family_of
from profiles.closed_forms.families.wiring import flow_of
from profiles.errors import InputError
from profiles.model.flow import Flow
from profiles.model.profile import (
    GLUE,
    LOSS,
    Affine,
    ModelProfile,
    Numerics,
    ParameterShape,
    UnitCost,
    UnitProfile,
)
from profiles.trace.tally import Cost, fitted, glue_costs, tally


def profile_from_config(
    config: Mapping[str, object],
    *,
    samples: int,
    sequence_length: int | None,
    name: str,
    numerics: Sequence[Numerics] = (Numerics.AS_BUILT,),
    on_processor: bool = True,
    where: str = "config.json",
) -> ModelProfile:
    """The profile that `profiles.capture.capture.capture` gives for the model that transformers
    builds.

    The forward of each family is written down operation by operation, as transformers 5 runs it,
    and followed on arrays that have shapes and no values; what torch launches, saves and releases
    for each operation is known. Two runs, at the batch and at twice it, tell what is fixed from
    what grows, as in `capture`.

    It is assumed, as `capture` of such a model does: training mode, with dropout as the file says;
    attention by torch's `scaled_dot_product_attention` on a CPU (fused without dropout, written out
    with), or as accelerators run it; `use_cache` off; parameters built in fp32 whatever dtype the
    file names; no attention mask and no positions in the batch, so that rows are full and of one
    sequence each; the loss computed by the model from `labels`; experts as one grouped matrix
    product. Rotary positions are those of the plain kind: other kinds (Llama 3's, YaRN) change
    frequencies and no size; the dozen launches by which LongRoPE chooses between two sets of them
    are not counted.

    Args:
        config: the content of the file.
        samples, sequence_length: of the batch; the length is None where it is images.
        on_processor: else attention is fused also where scores are dropped or values are of another
            width, which only the kernels for accelerators do.
        where: the file, for messages.

    Raises:
        FileError: a field that the shape needs is missing.
        UnknownNameError: an unknown `model_type`, architecture or activation; near misses named.
        InputError: a field has a value that has no closed form here.
    """
    profile = profile_of(
        family_of(config, where=where),
        samples=samples,
        sequence_length=sequence_length,
        name=name,
        numerics=numerics,
        on_processor=on_processor,
        where=where,
    )
    return profile.model_copy(update={"config": _as_json(config)})


def profile_of(
    family: ModelFamily,
    *,
    samples: int,
    sequence_length: int | None,
    name: str,
    numerics: Sequence[Numerics] = (Numerics.AS_BUILT,),
    on_processor: bool = True,
    where: str | None = None,
) -> ModelProfile:
    """The profile of a model whose forward is written down; see `profile_from_config`.

    Raises:
        InputError: it does not take such sequences.
    """
    _check_length(family, sequence_length, where)
    runs = {
        kind: _run_twice(family, kind, samples, sequence_length, on_processor=on_processor)
        for kind in numerics
    }
    network = next(iter(runs.values())).network
    shared = network.tied_units().union(*(run.network.tape.shared for run in runs.values()))
    return ModelProfile(
        name=name,
        units=tuple(_unit_profiles(network, {k: run.costs for k, run in runs.items()}, shared)),
        dtype="float32",
        samples=samples,
        tokens_per_sample=sequence_length,
        batch_bytes=Affine(per_sample=network.batch_bytes / samples),
        tied=tuple(tuple(names) for names in network.ties.values()),
        unused=network.unused(),
        has_loss=True,
        flow=next(iter(runs.values())).flow,
        glue={kind: run.glue for kind, run in runs.items() if run.glue},
        experts_per_token=family.experts_per_token,
        on_processor=on_processor,
    )


def _as_json(config: Mapping[str, object]) -> dict[str, JsonValue]:
    """The configuration as a file holds it: the same whether read from one or written in Python."""
    return cast("dict[str, JsonValue]", json.loads(json.dumps(config)))


def _check_length(family: ModelFamily, sequence_length: int | None, where: str | None) -> None:
    if family.takes_tokens and sequence_length is None:
        raise InputError(f"`{family.kind}` takes tokens: how many in a sequence?", where=where)
    if not family.takes_tokens and sequence_length is not None:
        raise InputError(
            f"`{family.kind}` takes images, no sequence of {sequence_length} tokens", where=where
        )
    if family.longest is not None and (sequence_length or 0) > family.longest:
        raise InputError(
            f"{sequence_length} tokens, but the positions of this model go to {family.longest}",
            where=where,
        )


@dataclass(frozen=True, slots=True)
class _Run:
    """The network as it was run at the batch itself, what its units and the code between them cost,
    and what feeds them."""

    network: FamilyRun
    costs: Mapping[str, UnitCost]
    glue: dict[str, UnitCost]
    flow: Flow


def _run_twice(
    family: ModelFamily,
    numerics: Numerics,
    samples: int,
    sequence_length: int | None,
    *,
    on_processor: bool,
) -> _Run:
    length = sequence_length or 0
    once, twice = (
        FamilyRun(
            family.kind,
            numerics,
            samples=count * samples,
            length=length,
            on_processor=on_processor,
        )
        for count in (1, 2)
    )
    (one, glue), (two, glue_of_two) = _costs(once, family), _costs(twice, family)
    return _Run(
        once,
        fitted(one, two, samples),
        fitted(glue, glue_of_two, samples),
        flow_of(once.wiring, twice.wiring, samples),
    )


def _costs(network: FamilyRun, family: ModelFamily) -> tuple[dict[str, Cost], dict[str, Cost]]:
    """Forward and backward: what each unit took, and code before each (`ModelProfile.glue`)."""
    tape = network.tape
    first, *others = family.run(network)
    loss = network.loss_of(first, family.loss) if family.loss else network.finish(first, *others)
    del first, others
    saved = saved_bytes(tape.made)
    tape.backward(loss, ops.adapt)
    parameters = (p for unit in network.units.values() for p in unit.parameters.values())
    numbers = (gradient_number(parameter) for parameter in parameters)
    ignored = frozenset(number for number in numbers if number is not None)
    amounts = tape.scopes, saved, tape.timeline
    return tally(*amounts, ignored=ignored), glue_costs(*amounts, ignored=ignored)


def _in_order(network: FamilyRun, costs: Mapping[str, UnitCost]) -> list[str]:
    """Units in the order of their first call, then those never called; the loss last."""
    called = [name for name in network.order if network.twin(name) in costs]
    never = [name for name in network.order if network.twin(name) not in costs]
    glue = [GLUE] if costs[GLUE] != UnitCost() else []
    return [*glue, *called, *never, LOSS]


def _unit_profiles(
    network: FamilyRun,
    costs: Mapping[Numerics, Mapping[str, UnitCost]],
    shared: Collection[str],
) -> Iterator[UnitProfile]:
    """Of all units in order; layers that were not run differ from their twin in the name alone."""
    known: dict[str, UnitProfile] = {}
    for name in _in_order(network, next(iter(costs.values()))):
        twin = network.twin(name)
        if twin not in known:
            known[twin] = _unit_profile(network, twin, costs, shared)
        yield known[twin] if name == twin else known[twin].model_copy(update={"name": name})


def _unit_profile(
    network: FamilyRun,
    name: str,
    costs: Mapping[Numerics, Mapping[str, UnitCost]],
    shared: Collection[str],
) -> UnitProfile:
    unit = network.units.get(name)
    parameters = sum(p.elements for p in unit.parameters.values()) if unit else 0
    return UnitProfile(
        name=name,
        kind=unit.kind if unit else network.kind if name == GLUE else "loss",
        is_block=unit is not None and unit.is_block,
        parameters=parameters,
        trainable_parameters=parameters,
        parameter_bytes=parameters * DType.FLOAT32.size_bytes,
        gradient_bytes=parameters * DType.FLOAT32.size_bytes,
        buffer_bytes=unit.buffer_bytes if unit else 0,
        dtypes=("float32",) if parameters else (),
        shapes=tuple(_shapes(unit)) if unit else (),
        experts=_experts(unit) if unit else (),
        is_shared=name in shared,
        costs={kind: by_name.get(name, UnitCost()) for kind, by_name in costs.items()},
    )


def _shapes(unit: FamilyUnit) -> Iterator[ParameterShape]:
    counts = Counter(parameter.shape for parameter in unit.parameters.values())
    for sizes, count in sorted(counts.items()):
        yield ParameterShape(sizes=sizes, element_bytes=DType.FLOAT32.size_bytes, count=count)


def _experts(unit: FamilyUnit) -> tuple[int, ...]:
    """Of parameters that are a matrix for each of several experts: no family has others of three
    sizes."""
    return tuple(sorted({p.shape[0] for p in unit.parameters.values() if len(p.shape) == 3}))
