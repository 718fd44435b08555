"""Largest microbatch, sequence or model that fits."""

from __future__ import annotations

from advisor.inputs.changed_facts import Lever, step, value, varied
from advisor.inputs.facts import Facts
from advisor.inputs.model_sizes import SCALING, head_step, heads_of, scaled
from advisor.inputs.policy import Policy
from advisor.whatif.sizing.answer import Answer, Largest, Trial, largest, on_device, taken, trial
from engines.plan import PartialPlan
from profiles.errors import NoPlanError
from profiles.units import format_count

_DEFAULT = Policy()
_ALL_OPEN = PartialPlan()
# More is a mistake in the question: the bisection would end there.
_MOST_SAMPLES = 2**20
_MOST_TOKENS = 2**30
# Parameters grow with the cube of the factor: beyond the largest model ever trained.
_MOST_TIMES = 64


def largest_microbatch(
    facts: Facts, *, policy: Policy = _DEFAULT, partial: PartialPlan = _ALL_OPEN
) -> Answer:
    """The most samples of one forward on any plan that keeps `partial`.

    The global batch follows: as many as the replicas then take, in as many microbatches as a
    pipeline needs.

    Raises:
        NoPlanError: not even one sample fits.
    """
    partial = on_device(partial)
    world = facts.cluster.world_size

    def at(size: int) -> Facts:
        workload = facts.workload.model_copy(update={"global_batch_size": size * world})
        return facts.model_copy(update={"workload": workload})

    def check(size: int) -> Trial:
        return trial(at(size), policy, partial.fixing(microbatch_size=size))

    result = _found(largest(check, start=1, step=1, highest=_MOST_SAMPLES), "one sample")
    fixed = partial.fixing(microbatch_size=result.value)
    return _answer(
        f"Largest microbatch of {facts.model.name}:",
        result,
        unit="samples",
        policy=policy,
        partial=fixed,
        notes=[f"with a global batch of {result.value * world}"],
    )


def largest_sequence(
    facts: Facts, *, policy: Policy = _DEFAULT, partial: PartialPlan = _ALL_OPEN
) -> Answer:
    """The longest sequences, in steps of 128 tokens, on any plan that keeps `partial`.

    The profile is counted anew at every length, so it must be of a config.json.

    Raises:
        InputError: the profile is known at one length only.
        NoPlanError: not even the shortest fits.
    """
    partial = on_device(partial)
    now, tokens = value(facts, Lever.SEQUENCE), step(facts, Lever.SEQUENCE)
    assert tokens is not None  # tokens are counted

    def check(length: int) -> Trial:
        return trial(varied(facts, Lever.SEQUENCE, length), policy, partial)

    result = _found(
        largest(check, start=int(now), step=tokens, highest=_MOST_TOKENS), f"{tokens} tokens"
    )
    return _answer(
        f"Longest sequence of {facts.model.name}:",
        result,
        unit="tokens",
        policy=policy,
        partial=partial,
    )


def largest_model(
    facts: Facts, *, policy: Policy = _DEFAULT, partial: PartialPlan = _ALL_OPEN
) -> Answer:
    """The most parameters of this family of models on any plan that keeps `partial`.

    The model is scaled by the rule `advisor.inputs.model_sizes.SCALING`, head by head.

    Raises:
        InputError: the profile is not of a config.json that can be scaled.
        NoPlanError: not even the smallest fits.
    """
    partial = on_device(partial)
    heads, group = heads_of(facts.model), head_step(facts.model)

    def check(count: int) -> Trial:
        model = scaled(facts.model, count)
        return trial(facts.model_copy(update={"model": model}), policy, partial)

    result = _found(
        largest(check, start=heads, step=group, highest=_MOST_TIMES * heads),
        f"the model with {group} heads",
    )
    answer = _answer(
        f"Largest model of the family of {facts.model.name}:",
        result,
        unit="heads",
        policy=policy,
        partial=partial,
        notes=[SCALING],
    )
    model = result.fits.facts.model
    return answer.model_copy(
        update={
            "value": model.parameters,
            "unit": "parameters",
            "low": model.parameters,
            "high": scaled(facts.model, result.may_fit).parameters,
            "notes": (
                f"{format_count(model.parameters)} parameters: {result.value} heads, {heads} now",
                *answer.notes,
            ),
        }
    )


def _found(result: Largest | Trial, smallest: str) -> Largest:
    if isinstance(result, Largest):
        return result
    raise NoPlanError(f"{smallest} is too much: {result.because}")


def _answer(
    question: str,
    result: Largest,
    *,
    unit: str,
    policy: Policy,
    partial: PartialPlan,
    notes: list[str] | None = None,
) -> Answer:
    winner = taken(result.fits.facts, policy, partial)
    because = result.too_large.because if result.too_large else result.refused
    return Answer(
        question=question,
        value=result.value,
        unit=unit,
        low=result.value,
        high=max(result.value, result.may_fit),
        plan=winner.plan,
        step_s=winner.estimate.step_s,
        peak_high_bytes=winner.estimate.peak_high_bytes,
        verified=(f"{result.next} {unit}: {because}",),
        notes=tuple(notes or ()),
    )
