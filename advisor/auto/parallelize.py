"""`advise` and `auto_parallelize`: profile model and machines, decide, apply.

The only file of this package that modifies modules.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from os import PathLike

from torch import nn

from advisor.auto.arguments import (
    ModelLike,
    OptimizerLike,
    cluster_of,
    module_of,
    optimizer_of,
    require_callables,
    require_kinds,
    require_path,
)
from advisor.auto.facts_from_module import LossFn, facts_from_module
from advisor.auto.given_plan import (
    PlanLike,
    is_by_world_size,
    partial_plan_of,
    plan_for_world_size,
)
from advisor.auto.job import machines_of, require_ranks
from advisor.auto.next_plan import NextPlans
from advisor.auto.preflight import warn_of_risks
from advisor.auto.proved_splits import Pairs, choose_checked
from advisor.auto.rank_zero import from_rank_zero, require_same_request
from advisor.decide.decision import Decision
from advisor.decide.offload import with_disk
from advisor.inputs.facts import Facts
from advisor.inputs.policy import Policy
from advisor.inputs.precision import hint as precision_hint
from advisor.inputs.stacks import require_of_engines, stack_of, with_stack
from advisor.learning.anchor import Anchor
from advisor.learning.run_log import keep_at_end
from advisor.learning.shortages import below, failed_here
from advisor.whatif.suggestions import with_suggestions
from engines.apply import Proofs, apply_plan, require_plain
from engines.context.proof import SequenceProof, prove
from engines.data.loss_rule import LossWeight
from engines.data.replica_checksums import DEFAULT_EVERY
from engines.parallel import ParallelModel, SchedulerFactory
from engines.plan import PartialPlan
from engines.runtime.world import join_world
from engines.state.optimizer import OptimizerFactory
from engines.state.weights import Weights
from engines.tensor.proposal import propose_styles
from engines.tensor.split_proof import SplitProof
from profiles.allocator.process_peak import release_freed_memory
from profiles.capture.batch.call import Batch
from profiles.capture.batch.dims import SaidDims, describe_dims
from profiles.errors import AdvisorError, InputError, NoPlanError
from profiles.machine.cluster import ClusterProfile
from profiles.machine.probe import probe
from profiles.workload.stack import Stack

log = logging.getLogger(__name__)


def advise(
    model: ModelLike,
    *,
    sample: Batch,
    loss_fn: LossFn | None = None,
    cluster: ClusterProfile | str = "auto",
    global_batch_size: int | None = None,
    batch_dims: SaidDims = None,
    optimizer: OptimizerLike = None,
    precision: str | None = None,
    samples: int | None = None,
    critical_batch_size: float | None = None,
    host_overhead_s: float = 0.0,
    plan: PlanLike = None,
    objective: str = "tree",
    timed: bool = False,
    allow_lossy: bool = False,
    imbalance: float | None = None,
    allow_stale: bool = False,
    anchor: Anchor | str | PathLike[str] | None = None,
    stack: Stack | str | None = None,
) -> Decision:
    """Plan how to spread `model`, and explain why. Changes and allocates nothing.

    The result renders as a report in a terminal (`print`) and in a notebook.

    Args:
        model: any module, on any device, the meta device too; or a function that builds it, which
            is called under `deferred()`.
        sample: what one device would get of a global batch: a tensor, (inputs..., target), a dict
            of keyword arguments, or the one object that the model takes; with any nesting.
        loss_fn: loss_fn(output, target), for batches that are no tuples loss_fn(output, batch);
            None if the model returns its loss: a scalar, `.loss`, `["loss"]`, or first in a tuple.
        cluster: a profile, a name ("4x8xH100-SXM-80GB"), a cluster.toml, or "auto": this machine,
            or the job that runs it.
        global_batch_size: samples per optimizer step; by default the sample's, times the devices,
            under every plan.
        batch_dims: dimensions of the batch, where they cannot be inferred: {"positions": None,
            "frames": 1}, None for a tensor that all samples share, "elements" for a list with an
            element a sample. In order for a tuple.
        optimizer: as for `auto_parallelize`; only its memory counts here.
        precision: "fp32", "bf16" or "fp16"; by default bf16 with fp32 masters on accelerators that
            have units for it, else that of the model. "auto" takes fp16 and a loss scale where
            there are units for that alone. Pass the same to `auto_parallelize`, which otherwise
            keeps the model's.
        samples: in the training set, for steps per epoch.
        critical_batch_size: as measured (`ParallelModel.noise_scale`), in samples: a larger global
            batch gives a warning.
        host_overhead_s: time of a step in which devices wait for data or the host; by default zero.
        plan: fixed settings ("tp=2", {"tp": 2}, a Plan, a file); the rest is decided.
        objective: "tree", "time" or "memory".
        timed: run the model's blocks on this machine, one at a time, and use their times instead of
            the roofline. They are saved for the next time. It takes some ten seconds and memory.
        allow_lossy: allow rounded or compressed gradients if that is predicted faster; it changes
            the training. A `compression` in `plan` is always allowed.
        imbalance: spread of the ranks' computation times: standard deviation over mean. By default
            from saved runs on such machines, with ranks that are always slower; without such runs,
            zero.
        allow_stale: allow asynchronous and periodic updates (servers, local SGD) if that is
            predicted faster; it changes the training. Those in `plan` are always allowed.
        anchor: a measured step of such a model (`advise check --anchor`), as a file or object; by
            default, for "auto", the one saved on this machine.
        stack: the software that will run it, a `profiles.workload.stack.Stack` or a preset's name
            (`advise explain stacks`); by default our own engines on stock torch.

    Raises:
        UnknownNameError: no such stack.
        InputError: `timed`, and the cluster's devices are not this machine's.
        NoPlanError: nothing fits.
        PlanError: the fixed settings allow no legal plan.
        ModelError: the model cannot be run on the sample.
    """
    require_kinds(locals())
    require_callables(model, loss_fn)
    machines, optimizer = cluster_of(cluster), optimizer_of(optimizer)
    model = module_of(model)
    partial, software = partial_plan_of(plan), stack_of(stack)
    facts = facts_from_module(
        model,
        sample,
        loss_fn=loss_fn,
        cluster=machines or probe(measure=True),
        global_batch_size=global_batch_size,
        optimizer=optimizer,
        precision=precision,
        samples=samples,
        critical_batch_size=critical_batch_size,
        host_overhead_s=host_overhead_s,
        partial=partial,
        timed=timed,
        imbalance=imbalance,
        learns=machines is None,
        anchor=_read(anchor),
        stack=software,
        may_reduce=True,
        batch_dims=batch_dims,
    )
    decision, _ = _decided(
        model,
        sample,
        facts,
        policy=_policy(objective, allow_lossy, allow_stale),
        partial=partial,
        loss_fn=loss_fn,
    )
    return with_suggestions(decision)


def auto_parallelize(
    model: ModelLike,
    *,
    sample: Batch,
    loss_fn: LossFn | None = None,
    optimizer: OptimizerLike = None,
    scheduler: SchedulerFactory | None = None,
    plan: PlanLike = None,
    global_batch_size: int | None = None,
    precision: str | None = None,
    samples: int | None = None,
    critical_batch_size: float | None = None,
    host_overhead_s: float = 0.0,
    batch_dims: SaidDims = None,
    loss_weight: LossWeight | None = None,
    max_grad_norm: float | None = None,
    weights: Weights | None = None,
    objective: str = "tree",
    cluster: ClusterProfile | str | None = None,
    timed: bool = False,
    allow_lossy: bool = False,
    imbalance: float | None = None,
    allow_stale: bool = False,
    outer_optimizer: OptimizerFactory | None = None,
    learns: bool = True,
    anchor: Anchor | str | PathLike[str] | None = None,
    anchors: bool = False,
    seed: int = 0,
    measure_noise: bool = False,
    on_nonfinite: str = "stop",
    check_replicas_every: int = DEFAULT_EVERY,
    timeout_s: float | None = None,
    offload_folder: str | PathLike[str] | None = None,
    stack: Stack | str | None = None,
) -> ParallelModel:
    """Decide how to spread `model` over the ranks of this job, and apply the plan.

    A step that runs out of memory on some rank is made again under a plan that takes less, without
    a change of its results: smaller microbatches and more accumulation, or more recompute.

    Start the script with `torchrun --nproc-per-node N`; without it the plan is for one device. Rank
    0 profiles and decides, and the others take its plan. Devices and links are timed for 20 seconds
    first, unless an equal job did so before (see `profiles.machine.bench.cache`) or `cluster` is
    given.

    Args:
        precision: "fp32", "bf16" or "fp16" (with fp32 masters, fp16 with a loss scale too), "auto"
            (bf16 or fp16 where the device has units for it); by default that of the model, so that
            the numerics of a training only change on request. A warning says which is faster.
        model, sample, loss_fn, batch_dims, samples, critical_batch_size, host_overhead_s,
            objective, timed, allow_lossy: as for `advise`; all ranks time their blocks at the same
            time, as in training.
        optimizer: a name ("adamw"), a factory `lambda params: torch.optim.AdamW(params)` or an
            optimizer already built on the model, which is carried over; None is AdamW.
        scheduler: a factory `lambda optimizer: LambdaLR(optimizer, ...)` of any scheduler of
            `torch.optim.lr_scheduler` that needs no metric. It is stepped after every step of the
            optimizer, and saved and loaded: `parallel.scheduler`.
        plan: None decides everything. A Plan, its file, or settings such as "dp_shard=4" fix what
            they name ("pp=2 tp=2 zero=1" leaves stages, microbatches and split layers open). A
            path with `{world_size}` in it, "plans/{world_size}.json", is a file for each number of
            ranks that an elastic job may have; where there is none, everything is decided.
        global_batch_size: samples per optimizer step over all ranks, the rows of the largest batch
            that the loader yields; by default the sample's, times the ranks, under every plan.
        loss_weight: number of terms in a microbatch's mean loss, for a true mean over uneven
            microbatches. By default what `sample` shows it to be: see `engines.data.loss_parts`.
        max_grad_norm: clip gradients to this norm in `train_step`.
        weights: of a model built by a function, under `deferred()` or on the meta device: a path
            to safetensors files or a checkpoint, a state dict or an init function; by default what
            its constructor gives it, drawn anew from `seed`. See `apply_plan`.
        cluster: facts of this job's machines, if known.
        learns: predict with constants fitted to runs on such machines, and save this run for later
            fits (see `advisor.learning.run_log`); plans that ran out of memory are not taken again.
        anchor: as for `advise`; by default, with `learns`, the one saved on this machine.
        anchors: after a training of at least five steps, save the ratio of each measured term to
            its estimate, for later plans and sizes of such models here.
        imbalance, allow_stale: as for `advise`.
        outer_optimizer: a factory, for `updates=diloco`; None is the paper's Nesterov momentum.
        seed: of the shuffling in `ParallelModel.shard`, and of initial weights.
        measure_noise: see `apply_plan`; `.noise_scale` is then the batch above which more samples
            are wasted.
        on_nonfinite: "stop", "skip" or "ignore", for losses and gradients that are nan or inf; see
            `apply_plan`.
        check_replicas_every: steps between two comparisons of replicas' parameters; 0: never.
        timeout_s: limit of every wait for another rank: for the job, for rank 0's decision, and in
            each exchange of a step. By default ten minutes, and in a step 20 times the longest one
            measured or predicted, at least a minute. The error names missing ranks.
        offload_folder: see `apply_plan`. If given, offload to its files is considered when nothing
            else fits.
        stack: as for `advise`, if our engines run it: "torch" or "torch-compiled", which is
            `plan="compile=true"`.

    Returns:
        A `ParallelModel`; `.decision` says why.

    Raises:
        as `advise`, InputError for the stack of other software, and PlanMismatchError or RankError
            if ranks disagree or are missing.
    """
    require_kinds(locals())
    require_callables(model, loss_fn)
    require_path(offload_folder, "offload_folder", "a folder on a fast local disk")
    known_machines, optimizer = cluster_of(cluster), optimizer_of(optimizer)
    model = module_of(model)
    require_plain(model)
    is_deferred = any(parameter.is_meta for parameter in model.parameters())
    software = stack_of(stack)
    require_of_engines(software)
    given = None if is_by_world_size(plan) else partial_plan_of(plan)
    known = _read(anchor)
    world = join_world(timeout_s=timeout_s)
    if given is None:
        given = plan_for_world_size(plan, world)
    partial = with_stack(given, software)
    allowed = {"allow_lossy": allow_lossy, "allow_stale": allow_stale}
    require_same_request(partial, world, global_batch_size, precision, objective, allowed)
    require_ranks(partial, world)
    machines = known_machines or machines_of(model, partial, world)
    if offload_folder is not None:
        machines = with_disk(machines, offload_folder)

    def facts() -> Facts:
        return facts_from_module(
            model,
            sample,
            loss_fn=loss_fn,
            cluster=machines,
            global_batch_size=global_batch_size,
            optimizer=optimizer,
            precision=precision,
            samples=samples,
            critical_batch_size=critical_batch_size,
            host_overhead_s=host_overhead_s,
            partial=partial,
            timed=timed,
            imbalance=imbalance,
            learns=learns,
            anchor=known,
            stack=software,
            batch_dims=batch_dims,
        )

    def decide() -> tuple[Decision, Proofs]:
        known = facts()
        policy = _policy(objective, allow_lossy, allow_stale)
        failed = failed_here(known) if learns else ()
        if failed:
            log.info("plans of this model that ran out of memory here: %d", len(failed))
            with contextlib.suppress(NoPlanError):  # what is fixed may be tried again
                lower = below(known, failed)
                return _decided(
                    model, sample, lower, policy=policy, partial=partial, loss_fn=loss_fn
                )
        return _decided(model, sample, known, policy=policy, partial=partial, loss_fn=loss_fn)

    if timed and world.rank > 0:
        with contextlib.suppress(AdvisorError):  # rank 0 raises it too, and broadcasts it
            facts()
    decision, proofs = from_rank_zero(decide, world)
    parallel = apply_plan(
        model,
        decision.plan,
        profile=decision.facts.model,
        cluster=decision.facts.cluster,
        loss_fn=loss_fn,
        optimizer=optimizer,
        scheduler=scheduler,
        loss_weight=loss_weight,
        max_grad_norm=max_grad_norm,
        weights=weights,
        outer_optimizer=outer_optimizer,
        sample=sample,
        world=world,
        seed=seed,
        measure_noise=measure_noise,
        on_nonfinite=on_nonfinite,
        check_replicas_every=check_replicas_every,
        offload_folder=offload_folder,
        proofs=proofs,
    )
    warn_of_risks(decision, ranks=world.size, is_loaded=is_deferred)
    parallel.decision = decision
    parallel.next_plan = NextPlans(decision, learns=learns)
    parallel.step_bound.predicted_s = decision.estimate.step_s
    if world.rank == 0:
        log.info("plan: %s", decision.plan)
        dims = decision.facts.model.batch_dims
        is_plain = batch_dims is not None or all(dim == 0 for dim in dims.values())
        hint = "" if is_plain else " (inferred, `batch_dims=` says it otherwise)"
        log.log(logging.INFO if is_plain else logging.WARNING, "%s%s", describe_dims(dims), hint)
        faster = precision_hint(decision.facts)
        if faster is not None:
            log.warning("%s", faster)
        if learns or anchors:
            keep_at_end(parallel, learns=learns, anchors=anchors)
    return parallel


def _decided(
    model: nn.Module,
    sample: Batch,
    facts: Facts,
    *,
    policy: Policy,
    partial: PartialPlan,
    loss_fn: LossFn | None,
) -> tuple[Decision, Proofs]:
    """Decide, with layers and sequences split as the engine proves possible; return the proofs.

    A decision's splits are proved on the modules; if the proof gives other splits, the decision is
    repeated with those.
    """
    layers: dict[int, SplitProof | None] = {}

    @functools.cache
    def check(tp: int, by_tokens: bool) -> Pairs:
        try:
            proposal = propose_styles(
                model,
                sample,
                size=tp,
                profile=facts.model,
                has_target=loss_fn is not None,
                by_tokens=by_tokens,
            )
        except AdvisorError as error:
            if partial.fixes("tp"):
                raise
            log.info("tensor parallel: %s", error.what)
            return ()
        release_freed_memory()
        for note in proposal.notes:
            log.info("tensor parallel: %s", note)
        layers[tp] = proposal.proof
        return proposal.styles

    while True:
        decision = choose_checked(facts, policy=policy, partial=partial, check=check)
        cp, proof = decision.plan.cp, None
        if cp > 1 and not partial.fixes("cp"):
            proof = _sequence_proof(model, sample, loss_fn, size=cp)
            if proof is None:
                partial = partial.fixing(cp=1)
                continue
        return decision, Proofs(layers=layers.get(decision.plan.tp), sequence=proof)


def _sequence_proof(
    model: nn.Module, sample: Batch, loss_fn: LossFn | None, *, size: int
) -> SequenceProof | None:
    """Engine's proof that the model's sequences can be split; None without one."""
    try:
        return prove(model, sample, loss_fn, size=size)
    except InputError as error:
        log.info("context parallel: %s", error.what)
        return None
    finally:
        release_freed_memory()


def _read(anchor: Anchor | str | PathLike[str] | None) -> Anchor | None:
    if anchor is None or isinstance(anchor, Anchor):
        return anchor
    require_path(anchor, "anchor", "the file that `advise check --anchor` wrote")
    return Anchor.load(anchor)


def _policy(objective: str, allow_lossy: bool, allow_stale: bool) -> Policy:
    allowed = {"allow_lossy": allow_lossy, "allow_stale": allow_stale}
    return Policy.build({"objective": objective, **allowed}, where="objective")
