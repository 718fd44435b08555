"""Proofs that a split computes what the whole model computes."""

from __future__ import annotations

from engines.apply.build import Build
from engines.blocks.trial import run_twice
from engines.context.proof import SequenceProof, prove
from engines.data.coupled_rows import require_no_coupling, warn_of_state
from engines.data.gradient_hooks import HookTrial, require_hooks_of_parts, tried_hooks
from engines.data.loss_parts import few_rows, seen_on
from engines.data.loss_rule import LossParts
from engines.plan import Plan, Recompute
from engines.runtime.world import texts_of_ranks
from engines.tensor.split_proof import SplitProof, prove_split
from profiles.capture.batch.call import Batch
from profiles.capture.batch.dims import describe_dims
from profiles.capture.batch.rows import batch_size
from profiles.errors import BatchError, PlanError
from profiles.record import Record


class Proofs(Record):
    """Splits that are proved, to be applied without a second proof."""

    layers: SplitProof | None = None
    sequence: SequenceProof | None = None


def prove_layers(build: Build, sample: Batch | None, known: SplitProof | None) -> SplitProof | None:
    """The proof that split layers compute the same: the `known` one if it is of this split."""
    plan = build.plan
    if plan.tp == 1:
        return None
    if known is not None and known.covers(build.model, plan.tensor_styles, size=plan.tp):
        return known
    return prove_split(
        build.model,
        _require_sample(sample, f"tp={plan.tp}: the split of layers"),
        plan.tensor_styles,
        size=plan.tp,
        profile=build.profile,
        has_target=build.loss_fn is not None,
    )


def prove_sequence(
    build: Build, sample: Batch | None, known: SequenceProof | None
) -> SequenceProof | None:
    """The proof that ranks may share a sequence: the `known` one if it is of as many ranks."""
    size = build.plan.cp
    if size == 1:
        return None
    if known is not None and known.size == size:
        return known
    sample = _require_sample(sample, f"cp={size}: the split of sequences")
    return prove(build.model, sample, build.loss_fn, size=size)


def see_parts(build: Build, sample: Batch | None) -> LossParts:
    """The rule by which losses of parts of a batch make up that of the batch: rank 0 looks, and
    without a message, so that the others can be told of an error."""
    world = build.world
    if sample is None or world.is_fake or world.rank > 0:
        return LossParts(terms=build.profile.loss_terms)
    said = build.training.loss_weight
    model, loss_fn, profile = build.model, build.loss_fn, build.profile
    seen = seen_on(model, sample, loss_fn, profile=profile, said=said)
    seen = seen.model_copy(update=tried_hooks(model, build.plan)._asdict())
    batch = few_rows(model, sample, profile) if build.plan.recompute is not Recompute.NONE else None
    if batch is None:
        return seen
    trial = run_twice(
        model,
        batch,
        loss_fn,
        profile=profile,
        compiled=build.plan.compile,
        overlaps=build.plan.pp > 1 and build.plan.in_flight > 1,
    )
    return seen.model_copy(update=trial._asdict())


def agree_on_parts(build: Build, sample: Batch | None, seen: LossParts) -> LossParts:
    """The rule that rank 0 has `seen`, on all ranks.

    Raises:
        BatchError: the model cannot run on a part of the rows, as the plan would have it do; or no
            rule holds, and a rank's rows are cut: see `engines.data.coupled_rows`.
        PlanError: a block would not recompute what it computed, or replicas would come apart, by
            the forward or by a hook.
    """
    world, training, plan = build.world, build.training, build.plan
    if sample is None or world.is_fake:
        return seen
    text = seen.model_dump_json() if world.rank == 0 else ""
    parts = LossParts.model_validate_json(texts_of_ranks("loss of parts", text, world)[0])
    dims = build.profile.batch_dims
    if parts.unlike:
        raise _is_unlike(parts.unlike, plan)
    if parts.parameter_of_rows and plan.data_degree > 1:
        raise PlanError(
            f"the forward changes its own parameter `{parts.parameter_of_rows}` by the rows that it"
            " sees (as the `max_norm` of an embedding does): replicas, which see other rows each,"
            " would come apart",
            where=f"plan: {plan}",
            hints=["change it after the optimizer's step, by rows of all ranks or by none"],
        )
    hooks = HookTrial(parts.stepped_by_hook, parts.bent_by_hook)
    require_hooks_of_parts(hooks, plan, warns=world.rank == 0)
    if plan.data_degree * plan.forwards == 1:
        _require_no_memory(parts, build)
        return parts
    if parts.refusal:
        rows = batch_size(sample, dims or None)
        if plan.microbatch_size is None or plan.microbatch_size < rows:
            raise BatchError(
                parts.refusal,
                where=f"plan: {plan}; {describe_dims(dims)}",
                hints=[
                    "`batch_dims=` says what has a row for each sample, along which dimension:"
                    " {name: 1}, and None for what all samples share",
                    "or take a plan that leaves a batch in one piece: tp=2",
                ],
            )
    _require_no_memory(parts, build)
    require_no_coupling(
        parts.doubt_of(sample),
        plan,
        is_said=training.loss_weight is not None,
        warns=world.rank == 0,
    )
    if world.rank == 0:
        warn_of_state(parts, plan)
    return parts


def _is_unlike(block: str, plan: Plan) -> PlanError:
    """The refusal of a block that would recompute something else."""
    differs = f"`{block}` computes something else when it runs again"
    where, hints = f"plan: {plan}", ["or recompute=none"]
    if plan.compile:
        return PlanError(
            f"{differs} after the forward, and torch.compile cannot follow how what it is given and"
            " holds is put back for that",
            where=where,
            hints=["set compile=false", *hints],
        )
    return PlanError(
        f"{differs}, with all put back that modules lead to: its forward changes state outside of"
        " them (in globals, on classes, in closures or iterators), or code writes in place into"
        " what it was given or holds",
        where=where,
        hints=[
            "let the module hold that state: an attribute, a buffer",
            "or put another tensor in its place: `x = x + y` for `x += y`",
            *hints,
        ],
    )


def _require_no_memory(parts: LossParts, build: Build) -> None:
    """Refuse stages where the code that all of them run computes with what it made of the results
    of units in an earlier forward: a stage has its own units' results alone."""
    _require_state_before_border(parts, build.plan)
    names = build.profile.flow.attributes_between
    if build.plan.pp > 1 and parts.state and names:
        raise PlanError(
            f"the forward computes with what an earlier one left in `{names[0]}`, and that is made"
            " of what units computed: stages have their own units' results alone",
            where=f"plan: {build.plan}",
            hints=[
                "let the module that computes it hold it; or hand it in with the batch",
                "or replicate or shard: dp_replicate, dp_shard",
            ],
        )


def _require_state_before_border(parts: LossParts, plan: Plan) -> None:
    """Refuse stages that end before the code that changes what the next forward computes with."""
    border = plan.stages[0] if plan.pp > 1 else None
    late = [name for name, units in parts.state_between.items() if border in units]
    if late:
        raise PlanError(
            f"the forward computes with what an earlier one left in `{late[0]}`, and code that runs"
            f" after the call of `{border}` changes it: the stages before end at that call",
            where=f"plan: {plan}",
            hints=[
                f"change `{late[0]}` at the start of the forward, or in the module that uses it",
                "or replicate or shard: dp_replicate, dp_shard",
            ],
        )


def _require_sample(sample: Batch | None, split: str) -> Batch:
    if sample is None:
        raise PlanError(
            f"{split} is proved on a sample before it is used, and none was given",
            hints=["give `apply_plan(..., sample=batch)`"],
        )
    return sample
