"""The whole way: look at the model and the machines, decide, apply.

The only file of this package that touches modules.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
from collections.abc import Callable, Mapping
from datetime import timedelta
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from advisor.choose import choose
from advisor.complete import completed, spans_devices
from advisor.decision import Decision
from advisor.facts import Facts
from advisor.policy import Policy
from advisor.proved import with_proved_styles
from engines.failures import together
from engines.footprint import optimizer_footprint
from engines.hybrid import apply_plan
from engines.optimizer import OptimizerFactory
from engines.parallel import ParallelModel
from engines.plan import AXES, Plan, Precision, load_plan, parse_settings
from engines.tensor.proposal import propose_styles
from engines.weights import Weights
from engines.world import DEFAULT_TIMEOUT_S, World, join_world, require_same
from profiles.batch import Batch, batch_size
from profiles.bench import recall_or_bench
from profiles.capture import capture
from profiles.cluster import ClusterProfile
from profiles.clusters import resolve_cluster
from profiles.errors import AdvisorError, InputError, PlanError, RankError
from profiles.host import resident_bytes
from profiles.model import ModelProfile, Numerics
from profiles.probe import probe
from profiles.provenance import Source
from profiles.stopwatch import with_times
from profiles.torch_compat import default_store
from profiles.workload import Workload

log = logging.getLogger(__name__)

# Kernels, threads and their heaps are set up at first use, after the look: 5 to 50 MiB were seen on
# top of 370 to 420 MiB over runs of the demo.
FIRST_USE_ERROR = 0.12

LossFn = Callable[..., Tensor]
PlanLike = Plan | str | PathLike[str] | None
Optimizer = torch.optim.Optimizer | OptimizerFactory


def advise(
    model: nn.Module,
    *,
    sample: Batch,
    loss_fn: LossFn | None = None,
    cluster: ClusterProfile | str = "auto",
    global_batch_size: int | None = None,
    optimizer: Optimizer | None = None,
    precision: str | None = None,
    plan: PlanLike = None,
    objective: str = "tree",
    timed: bool = False,
) -> Decision:
    """How to spread `model`, and why. Looks, changes nothing, allocates nothing.

    The result renders as a report in a terminal (`print`) and in a notebook.

    Args:
        model: any module, on any device, the meta device too.
        sample: one local batch: a tensor, (inputs..., target) or a dict of keyword arguments; the
            first dimension of every tensor is the batch.
        loss_fn: loss_fn(output, target), for dicts loss_fn(output, batch); None where the model
            returns its loss.
        cluster: a profile, a name ("4x8xH100-SXM-80GB"), a cluster.toml, or "auto": this machine,
            or the job that runs it.
        global_batch_size: samples per optimizer step; by default one sample batch per device.
        optimizer: as for `auto_parallelize`; only its memory counts here.
        precision: "fp32" or "bf16"; by default what the model is built in.
        plan: settings that are fixed ("tp=2", a Plan, a file); the rest is decided.
        objective: "tree", "time" or "memory".
        timed: run the model's blocks on this machine, one at a time, and decide by their times in
            place of the roofline; kept for the next time. Takes some ten seconds and memory.

    Raises:
        InputError: `timed`, and the cluster's devices are not this machine's.
        NoPlanError: nothing fits.
        PlanError: the fixed settings allow no legal plan.
        ModelError: the model cannot be run on the sample.
    """
    machines = resolve_cluster(cluster) if isinstance(cluster, str) and cluster != "auto" else None
    if isinstance(cluster, ClusterProfile):
        machines = cluster
    pins = pins_of(plan)
    facts = look(
        model,
        sample,
        loss_fn=loss_fn,
        cluster=machines or probe(measure=True),
        global_batch_size=global_batch_size,
        optimizer=optimizer,
        precision=precision or pins.get("precision"),
        timed=timed,
    )
    decision = choose(facts, policy=_policy(objective), pins=pins)
    return with_proved_styles(decision, model, sample, has_target=loss_fn is not None)


def auto_parallelize(
    model: nn.Module,
    *,
    sample: Batch,
    loss_fn: LossFn | None = None,
    optimizer: Optimizer | None = None,
    plan: PlanLike = None,
    global_batch_size: int | None = None,
    precision: str | None = None,
    count: Callable[[Batch], float | Tensor] | None = None,
    max_grad_norm: float | None = None,
    weights: Weights | None = None,
    objective: str = "tree",
    cluster: ClusterProfile | None = None,
    timed: bool = False,
    seed: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> ParallelModel:
    """Decide how to spread `model` over the ranks of this job, and do it.

    Start the script with `torchrun --nproc-per-node N`; alone it is a plan of one device. Rank 0
    looks and decides, the others take its plan. Devices and links are timed for 20 seconds first,
    unless an equal job did so before (see `profiles.bench.cache`) or `cluster` says what they are.

    Args:
        model, sample, loss_fn, precision, objective, timed: as for `advise`; all ranks time their
            blocks at the same moment, as they will train.
        optimizer: a factory `lambda params: torch.optim.AdamW(params)`, or an optimizer already
            built on the model, which is carried over; None is AdamW.
        plan: None decides everything. A Plan, its file, or settings such as "dp_shard=4" fix what
            they name. Plans with stages or split layers ("pp=2 tp=2 zero=1") are carried out as
            told, what they leave open is filled in by rule (see `advisor.complete`), and there is
            no decision: they are not weighed.
        global_batch_size: samples per optimizer step over all ranks; by default the sample's on
            every rank.
        count: what a microbatch's mean loss is a mean over, where that is not its rows:
            `lambda batch: (batch["labels"] != -100).sum()`.
        max_grad_norm: clip gradients to this norm in `train_step`.
        weights: of a model built on the meta device: an init function, a state dict or a path to
            safetensors files; see `apply_plan`.
        cluster: facts of this job's machines, where they are known.
        seed: of the shuffling in `ParallelModel.shard`, and of an init function.
        timeout_s: bound of every wait for another rank.

    Returns:
        A `ParallelModel`; `.decision` says why, None where nothing was decided.

    Raises:
        as `advise`, and PlanMismatchError or RankError where ranks disagree or are missing.
    """
    pins = pins_of(plan)
    world = join_world(timeout_s=timeout_s)
    _require_same_request(pins, world, global_batch_size, precision, objective)
    _require_ranks(pins, world)
    if cluster is None:
        cluster = recall_or_bench(probe()) if world.size > 1 else probe(measure=True)
    machines = cluster
    if spans_devices(pins):
        return _as_told(
            model,
            pins,
            sample=sample,
            loss_fn=loss_fn,
            cluster=machines,
            optimizer=optimizer,
            count=count,
            max_grad_norm=max_grad_norm,
            global_batch_size=global_batch_size,
            weights=weights,
            world=world,
            seed=seed,
        )

    def facts() -> Facts:
        return look(
            model,
            sample,
            loss_fn=loss_fn,
            cluster=machines,
            global_batch_size=global_batch_size,
            optimizer=optimizer,
            precision=precision or pins.get("precision"),
            timed=timed,
        )

    def decide() -> Decision:
        decision = choose(facts(), policy=_policy(objective), pins=pins)
        return with_proved_styles(decision, model, sample, has_target=loss_fn is not None)

    if timed and world.rank > 0:
        with contextlib.suppress(AdvisorError):  # rank 0 meets it too, and tells all
            facts()
    decision = _from_rank_zero(decide, world)
    parallel = apply_plan(
        model,
        decision.plan,
        profile=decision.facts.model,
        cluster=decision.facts.cluster,
        loss_fn=loss_fn,
        optimizer=optimizer,
        count=count,
        max_grad_norm=max_grad_norm,
        weights=weights,
        sample=sample,
        world=world,
        seed=seed,
    )
    parallel.decision = decision
    if world.rank == 0:
        log.info("plan: %s", decision.plan)
    return parallel


def _as_told(
    model: nn.Module,
    pins: Mapping[str, Any],
    *,
    sample: Batch,
    loss_fn: LossFn | None,
    cluster: ClusterProfile,
    global_batch_size: int | None,
    world: World,
    **options: Any,
) -> ParallelModel:
    """Stages and split layers: every rank fills in the same plan, and carries it out."""
    profile = capture(model, sample, loss_fn=loss_fn, name=type(model).__name__)
    has_target = loss_fn is not None

    def styles(size: int) -> tuple[tuple[str, str], ...]:
        proposal = propose_styles(model, sample, size=size, profile=profile, has_target=has_target)
        for note in proposal.notes:
            log.info("tensor parallel: %s", note)
        return proposal.styles

    degrees = [int(pins.get(axis, 1)) for axis in ("pp", "cp", "tp")]
    replicas = max(1, world.size // math.prod(degrees))
    rows = global_batch_size // replicas if global_batch_size else batch_size(sample)
    with together("completing the plan", timeout_s=world.timeout_s):
        plan = completed(pins, profile, cluster, rows=rows, styles=styles)
    if world.rank == 0:
        log.info("plan: %s", plan)
    return apply_plan(
        model,
        plan,
        profile=profile,
        cluster=cluster,
        loss_fn=loss_fn,
        sample=sample,
        world=world,
        **options,
    )


def look(
    model: nn.Module,
    sample: Batch,
    *,
    loss_fn: LossFn | None,
    cluster: ClusterProfile,
    global_batch_size: int | None = None,
    optimizer: Optimizer | None = None,
    precision: str | None = None,
    timed: bool = False,
) -> Facts:
    """What there is to know before deciding."""
    dtype = _dtype(model)
    wanted = precision or next((p.value for p in Precision if p.dtype == dtype), "fp32")
    numerics: tuple[Numerics, ...] = (Numerics.AS_BUILT,)
    if wanted == "bf16" and dtype == "float32":
        numerics = (Numerics.AS_BUILT, Numerics.BF16, Numerics.BF16_AUTOCAST)
    profile: ModelProfile = capture(
        model, sample, loss_fn=loss_fn, numerics=numerics, name=type(model).__name__
    )
    if timed:
        profile = _with_times(model, sample, loss_fn, profile, cluster)
    cluster = _with_context(cluster, model)
    batch = global_batch_size
    if batch is None:
        batch = batch_size(sample) * cluster.world_size
    workload = Workload.build(
        {
            "global_batch_size": batch,
            "tokens_per_sample": profile.tokens_per_sample,
            "optimizer": optimizer_footprint(
                optimizer,
                model,
                units=[unit.name for unit in profile.units],
                device_kind=cluster.device.kind,
            ),
            "precision": wanted,
            "given": _given(
                global_batch_size=global_batch_size, optimizer=optimizer, precision=precision
            ),
        }
    )
    return Facts(model=profile, cluster=cluster, workload=workload)


def _with_times(
    model: nn.Module,
    sample: Batch,
    loss_fn: LossFn | None,
    profile: ModelProfile,
    cluster: ClusterProfile,
) -> ModelProfile:
    here, wanted = probe().device.name, cluster.device.name
    if here != wanted:
        raise InputError(
            f"blocks are timed on this machine's {here}, the cluster has {wanted}",
            where="timed=True",
            hints=["leave `timed` out, or run this on the cluster"],
        )
    return with_times(model, sample, profile, device_name=wanted, loss_fn=loss_fn)


def _given(**arguments: object) -> tuple[str, ...]:
    """The fields of a workload that the caller named."""
    return tuple(name for name, value in arguments.items() if value is not None)


def _with_context(cluster: ClusterProfile, model: nn.Module) -> ClusterProfile:
    """What this process holds besides the model, now that all libraries are loaded.

    CPU ranks only: a GPU's context is not in main memory.
    """
    context = cluster.device.context_bytes
    if cluster.device.kind != "cpu" or context.source is not Source.MEASURED:
        return cluster
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()) if t.device.type == "cpu")
    now = context.model_copy(
        update={
            "value": max(context.value, resident_bytes() - held),
            "relative_error": FIRST_USE_ERROR,
            "origin": "this process before its first step",
        }
    )
    device = cluster.device.model_copy(update={"context_bytes": now})
    return cluster.model_copy(update={"device": device})


def pins_of(plan: PlanLike) -> Mapping[str, Any]:
    """The settings that a plan, a file or a string fixes.

    A whole plan fixes every setting; a string only what it names.
    """
    if plan is None:
        return {}
    if isinstance(plan, str) and not plan.endswith(".json"):
        return parse_settings(plan)
    whole = plan if isinstance(plan, Plan) else load_plan(plan)
    settings = {name: getattr(whole, name) for name in Plan.model_fields}
    del settings["schema_version"]
    return {name: value for name, value in settings.items() if value is not None}


def _require_same_request(
    pins: Mapping[str, Any],
    world: World,
    global_batch_size: int | None,
    precision: str | None,
    objective: str,
) -> None:
    """Rank 0 decides for all; a rank that was asked for something else must not go unheard."""
    asked = {
        **pins,
        "global_batch_size": global_batch_size,
        "precision": precision,
        "objective": objective,
    }
    words = " ".join(f"{key}={value}" for key, value in sorted(asked.items()) if value is not None)
    require_same("settings", f"{hashlib.sha256(words.encode()).hexdigest()[:8]} {words}", world)


def _require_ranks(pins: Mapping[str, Any], world: World) -> None:
    """Before anything is timed: the degrees that are fixed can multiply to the number of ranks."""
    degrees = {axis: int(pins[axis]) for axis in AXES if axis in pins}
    needed = math.prod(degrees.values())
    is_whole = len(degrees) == len(AXES)
    if world.size % needed or (is_whole and needed != world.size):
        words = " ".join(f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1)
        raise PlanError(
            f"{words or 'a plan of one device'} needs {'' if is_whole else 'a multiple of '}"
            f"{needed} rank{'s' if needed > 1 else ''}, this job has {world.size}",
            hints=[f"start {needed} ranks, or leave the degrees open"],
        )


def _from_rank_zero(decide: Callable[[], Decision], world: World) -> Decision:
    """Rank 0's decision, or its error, on every rank; through the store, with a bound."""
    if world.size == 1:
        return decide()
    store = default_store()
    turn = store.add(f"advisor/decision/calls/{world.rank}", 1)
    key = f"advisor/decision/{turn}"
    if world.rank == 0:
        try:
            decision = decide()
        except BaseException as error:
            store.set(key, f"error {type(error).__name__}: {error}")
            raise
        store.set(key, f"plan {decision.to_json()}")
        return decision
    try:
        store.wait([key], timedelta(seconds=world.timeout_s))
    except (dist.DistError, RuntimeError):
        raise RankError(
            f"rank 0 did not decide within {world.timeout_s:.0f} s",
            where=f"rank {world.rank} of {world.size}",
            hints=["look at the output of rank 0"],
        ) from None
    kind, _, text = store.get(key).decode().partition(" ")
    if kind == "error":
        first, *rest = text.splitlines()
        raise InputError(f"rank 0 found no plan: {first}", where="\n".join(rest) or None)
    return Decision.from_json(text)


def _policy(objective: str) -> Policy:
    return Policy.build({"objective": objective}, where="objective")


def _dtype(model: nn.Module) -> str:
    """The dtype of most parameter elements, as torch names it."""
    elements: dict[str, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            name = str(parameter.dtype).removeprefix("torch.")
            elements[name] = elements.get(name, 0) + parameter.numel()
    return max(elements, key=lambda name: elements[name], default="float32")
