"""Facts of a model and its workload, from the module."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

from advisor.inputs.facts import Facts
from advisor.inputs.manual_placement import with_parts
from advisor.inputs.precision import AUTO, MIXED, NARROW, default_precision, reduced_precision
from advisor.learning.anchor import Anchor
from advisor.learning.run_log import pace_of, with_anchor, with_runs
from engines.plan import PartialPlan, Precision
from engines.state.optimizer import OptimizerFactory
from engines.state.optimizer_footprint import optimizer_footprint
from profiles.allocator.process_peak import release_freed_memory
from profiles.capture.batch.call import Batch
from profiles.capture.batch.dims import SaidDims
from profiles.capture.capture import capture
from profiles.errors import InputError, ModelError
from profiles.machine import catalogue
from profiles.machine.cluster import ClusterProfile
from profiles.machine.host import resident_bytes
from profiles.machine.probe import probe
from profiles.model.profile import ModelProfile, Numerics
from profiles.model.source import CaptureSource
from profiles.provenance import Source
from profiles.timing.stopwatch import with_times
from profiles.units import MIB
from profiles.workload.stack import TORCH, Stack
from profiles.workload.workload import Workload

log = logging.getLogger(__name__)

# Kernels, threads and their heaps are allocated at first use, after profiling: 9 to 28 MiB on top
# of 350 to 420 (`python -m tests.benchmarks.heap`).
FIRST_USE_BYTES, FIRST_USE_ERROR = 18 * MIB, 0.08

LossFn = Callable[..., Tensor]
Optimizer = torch.optim.Optimizer | OptimizerFactory
_ALL_OPEN = PartialPlan()


def facts_from_module(
    model: nn.Module,
    sample: Batch,
    *,
    loss_fn: LossFn | None,
    cluster: ClusterProfile,
    global_batch_size: int | None = None,
    optimizer: Optimizer | None = None,
    precision: str | None = None,
    samples: int | None = None,
    critical_batch_size: float | None = None,
    host_overhead_s: float = 0.0,
    partial: PartialPlan = _ALL_OPEN,
    timed: bool = False,
    imbalance: float | None = None,
    learns: bool = False,
    anchor: Anchor | None = None,
    stack: Stack = TORCH,
    may_reduce: bool = False,
    batch_dims: SaidDims = None,
) -> Facts:
    """Collect the facts of a decision.

    Args:
        global_batch_size: by default a sample for each rank of the cluster, whatever the plan.
        batch_dims: of the sample, see `profiles.capture.batch.dims`.
        learns: correct constants by runs and by a step of such a model measured on this machine.
        anchor: such a step, read from a file.
        may_reduce: if no precision is named, plan for bf16 on devices that have units for it;
            otherwise for the model's.
    """
    dtype = _dtype(model)
    wanted = partial.precision if precision is None else precision
    is_open = wanted in (None, AUTO)
    is_asked = is_open and (may_reduce or wanted == AUTO)
    may_reduce = is_asked and reduced_precision(cluster.device) is not None
    is_reduced = (wanted in NARROW or may_reduce) and dtype == "float32"
    look = functools.partial(
        capture,
        model,
        sample,
        loss_fn=loss_fn,
        name=type(model).__name__,
        batch_dims=batch_dims,
        on_processor=cluster.device.kind == "cpu",
    )
    profile = _profile(look, is_reduced=is_reduced, may_leave_out=may_reduce)
    if wanted is None or wanted == AUTO:
        device = cluster.device if may_reduce else None
        wanted = (default_precision(profile, device, asked=wanted) or Precision.FP32).value
    if timed:
        profile = _with_times(model, sample, loss_fn, profile, cluster)
    cluster = with_parts(_with_context(cluster, model), profile)
    if learns:
        cluster = with_runs(cluster, dtype=Precision(wanted).product_dtype)
    batch = global_batch_size
    if batch is None:
        batch = profile.samples * max(1, cluster.world_size - partial.extra_ranks)
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
            "dataset_samples": samples,
            "critical_batch_size": critical_batch_size,
            "host_overhead_s": host_overhead_s,
            **pace_of(imbalance, cluster, profile, learns=learns),
            "given": _given(
                global_batch_size=global_batch_size,
                optimizer=optimizer,
                precision=precision,
                host_overhead_s=host_overhead_s or None,
                dataset_samples=samples,
                critical_batch_size=critical_batch_size,
                imbalance=imbalance,
            ),
        }
    )
    facts = Facts(model=profile, cluster=cluster, workload=workload, stack=stack)
    return with_anchor(facts, anchor) if learns or anchor else facts


def _profile(
    look: Callable[..., ModelProfile], *, is_reduced: bool, may_leave_out: bool
) -> ModelProfile:
    """Profile the model as built and, with `is_reduced`, in 16 bits; without them if the model does
    not support them and `may_leave_out`."""
    if is_reduced:
        try:
            return look(numerics=(Numerics.AS_BUILT, *MIXED))
        except ModelError as error:
            if not may_leave_out:
                raise
            log.info("planned as built, the model does not run in 16 bits: %s", error.what)
    return look(numerics=(Numerics.AS_BUILT,))


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
    if profile.source not in (CaptureSource.FAKE, CaptureSource.KNOWN_VALUES):
        log.warning("blocks are not timed: the model was not followed on fake tensors")
        return profile
    return with_times(model, sample, profile, device_name=wanted, loss_fn=loss_fn)


def _given(**arguments: object) -> tuple[str, ...]:
    """Workload fields named by the caller."""
    return tuple(name for name, value in arguments.items() if value is not None)


def _with_context(cluster: ClusterProfile, model: nn.Module) -> ClusterProfile:
    """Set the context to this process's memory besides the model, after all imports.

    CPU ranks only: a GPU's context is not in main memory. Weights that were never written are in no
    memory, so that what is left may be less than any process has.
    """
    context = cluster.device.context_bytes
    if cluster.device.kind != "cpu" or context.source is not Source.MEASURED:
        return cluster
    model_bytes = sum(
        t.nbytes for t in (*model.parameters(), *model.buffers()) if t.device.type == "cpu"
    )
    release_freed_memory()
    least = min(context.value, catalogue.CPU_CONTEXT.low)
    now = context.model_copy(
        update={
            "value": max(least, resident_bytes() - model_bytes) + FIRST_USE_BYTES,
            "relative_error": FIRST_USE_ERROR,
            "origin": "this process before its first step",
        }
    )
    device = cluster.device.model_copy(update={"context_bytes": now})
    return cluster.model_copy(update={"device": device})


def _dtype(model: nn.Module) -> str:
    """Dtype of most parameter elements, as torch names it."""
    elements: dict[str, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            name = str(parameter.dtype).removeprefix("torch.")
            elements[name] = elements.get(name, 0) + parameter.numel()
    return max(elements, key=lambda name: elements[name], default="float32")
