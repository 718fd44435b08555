"""Verification: a model trained some steps under a plan and in one process, and compared.

Rank 0 keeps a copy of the model, and trains it on the whole batch with plain torch: forward, loss,
backward, SGD. All ranks train the model under the plan on their parts of that batch. Of the first
step loss and gradients are compared, then the loss of each step and the parameters after the last.

SGD and not Adam: Adam divides gradients by their size, and makes rounding of tiny ones as large as
the others. The learning rate makes the first update small, so that both stay on one path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from math import isfinite

import torch
from torch import Tensor, nn
from torch.func import functional_call

from advisor.auto.measure import fill, is_on_meta, seed_everything
from advisor.auto.parallelize import auto_parallelize
from advisor.decide.decision import Decision
from advisor.inputs.models import LoadedModel, load_model
from engines.blocks.autocast import as_fp32, autocast
from engines.blocks.eight_bits import multiply_in_eight_bits
from engines.data.loader import split_rows_evenly
from engines.legality import numerics
from engines.parallel import ParallelModel
from engines.parallel.parity import TOLERANCES, Difference, Tolerance, largest_difference
from engines.plan import Plan, Precision, read_settings
from engines.runtime.world import World, join_world, texts_of_ranks
from profiles.capture.batch.call import Batch, call_model, loss_of
from profiles.capture.batch.rows import batch_size, split_rows
from profiles.capture.batch.tree import batch_tensors, map_batch
from profiles.errors import InputError
from profiles.machine.host import machine_memory_bytes
from profiles.machine.probe import probe
from profiles.model.profile import ModelProfile, Numerics
from profiles.torch_compat import map_tensors
from profiles.torch_compat.module_copy import copy_module
from profiles.units import format_gib

STEPS = 3
ROWS_PER_RANK = 2
"""Of a sample that is made here."""
MOMENTUM = 0.9
FIRST_UPDATE = 0.1
"""Largest L2 norm of the first update of all parameters together."""
MOST_RATE = 0.05
COPIES = 5
"""Of the parameters: themselves, gradients, momentum, and both gathered to be compared."""


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """A model and a plan to compare with one process.

    Attributes:
        model: MODEL of the command line.
        settings: of the plan, "tp=2"; the rest is decided.
        precision: "fp32", or "bf16" or "fp16" (with fp32 masters); None: as the model is built.
    """

    model: str
    settings: str = ""
    sequence_length: int | None = None
    precision: str | None = None
    steps: int = STEPS


@dataclass(slots=True)
class Verified:
    """The outcome on rank 0.

    Attributes:
        plan: that was run.
        rows: of the global batch.
        loss, gradients, parameters: largest differences; parameters those after the last step.
        tolerance: of the dtype that forwards compute in.
        steps: of SGD.
        notes: on what could not be compared as it is.
    """

    plan: Plan
    rows: int
    loss: Difference
    gradients: Difference
    parameters: Difference
    tolerance: Tolerance
    steps: int
    notes: list[str] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        every = (self.loss, self.gradients, self.parameters)
        return all(difference.is_within(self.tolerance) for difference in every)


@dataclass(frozen=True, slots=True)
class _Run:
    """Loss of each step, gradients of the first, parameters after the last."""

    losses: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def verify(request: VerifyRequest) -> Verified | None:
    """Run the plan on this job's ranks; the result on rank 0, None on the others.

    Raises:
        PlanError: the plan cannot be applied.
        InputError: the sample has too few rows for the plan, or this machine too little memory.
        ModelError: the model cannot be built, or run on its sample.
    """
    world = join_world()
    seed_everything()
    loaded = load_model(
        request.model, samples=ROWS_PER_RANK * world.size, sequence_length=request.sequence_length
    )
    module = _materialised(loaded.module).to(world.device)
    batch = map_batch(lambda tensor: tensor.to(world.device), _drawn(loaded.sample, module))
    _require_memory(module, world)
    reference = copy_module(module) if world.rank == 0 else None
    draws = reference is not None and _draws(reference, loaded, batch)
    draws = texts_of_ranks("draws of the model", str(int(draws)), world)[0] == "1"
    rows = batch_size(batch)
    _require_rows(rows, request.settings)
    parallel = auto_parallelize(
        module,
        sample=batch,
        loss_fn=loaded.loss_fn,
        plan=request.settings or None,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=MOST_RATE, momentum=MOMENTUM),
        global_batch_size=rows,
        precision=request.precision,
        cluster=probe() if request.settings else None,
        learns=False,
    )
    plan = parallel.plan
    parallel.train(not draws)
    part = split_rows(batch, split_rows_evenly(rows, parallel.data_world_size))[parallel.data_rank]
    got, rate = _under_plan(parallel, part, steps=request.steps)
    if reference is None:
        return None
    assert isinstance(parallel.decision, Decision)
    profile = parallel.decision.facts.model
    dtype: torch.dtype = getattr(torch, plan.precision.dtype)
    reference.train(not draws)
    if plan.precision is Precision.FP8:
        multiply_in_eight_bits(reference, tp=plan.tp, profile=profile, device=world.device)
    run = partial(
        _alone,
        loaded=loaded,
        steps=request.steps,
        rate=rate,
        mixed=dtype if dtype != _dtype_of(module) else None,
        casts=numerics(plan, profile) is Numerics.BF16,
        scale=parallel.loss_scaler.scale,
        device=world.device,
    )
    tolerance = TOLERANCES[getattr(torch, plan.precision.product_dtype)]
    again = copy_module(reference) if plan.data_degree * plan.forwards > 1 else None
    result = _compared(got, run(reference, [batch]), plan, rows, tolerance)
    if not result.is_equal and again is not None:
        pieces = _microbatches(batch, rows, plan)
        alike = _compared(got, run(again, pieces), plan, rows, tolerance)
        if alike.is_equal:
            result = alike
            result.notes.append(_whole_batch(profile))
    if draws:
        result.notes.append(
            "the model draws random numbers (dropout): both ran in eval mode, without them"
        )
    if parallel.data_world_size > 1 and _has_equal_rows(batch, parallel.data_world_size):
        result.notes.append(
            "all replicas have the same rows: gradients that are not exchanged would not be seen;"
            " let the factory return a sample whose rows differ"
        )
    return result


def _under_plan(parallel: ParallelModel, part: Batch, *, steps: int) -> tuple[_Run, float]:
    """The steps on this rank, and the learning rate of all."""
    losses = [parallel.forward_backward(part).item()]
    while parallel.loss_scaler.is_on and not isfinite(losses[0]):  # the scale falls
        losses = [parallel.forward_backward(part).item()]
    gradients = parallel.full_gradients()
    norm = parallel.clip_grad_norm_(float("inf")).item()
    rate = min(MOST_RATE, FIRST_UPDATE / norm) if 0 < norm < float("inf") else MOST_RATE
    for group in parallel.optimizer.param_groups:
        group["lr"] = rate
    parallel.optimizer.step()
    parallel.optimizer.zero_grad()
    losses += [parallel.train_step(part).item() for _ in range(steps - 1)]
    return _Run(losses, gradients, parallel.state_dict()), rate


def _alone(
    module: nn.Module,
    pieces: Sequence[Batch],
    *,
    loaded: LoadedModel,
    steps: int,
    rate: float,
    mixed: torch.dtype | None,
    casts: bool,
    scale: float,
    device: torch.device,
) -> _Run:
    """The same steps of plain torch, on `pieces` of equal weight, with losses times `scale`.

    `mixed` is computed in by autocast, or as FSDP `casts`.
    """
    model = _cast(module, mixed) if casts and mixed is not None else module
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=rate, momentum=MOMENTUM)
    losses, gradients = [], {}
    for step in range(steps):
        total = 0.0
        for piece in pieces:
            with autocast(device, None if casts else mixed):
                loss = _loss(model, piece, loaded) / len(pieces)
            (loss * scale).backward()
            total += loss.item()
        losses.append(total)
        for parameter in trained.values():
            if parameter.grad is not None:
                parameter.grad /= scale
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in trained.items() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    return _Run(losses, gradients, {name: p.detach() for name, p in trained.items()})


def _loss(model: Callable[..., object], batch: Batch, loaded: LoadedModel) -> Tensor:
    output = call_model(model, batch, has_target=loaded.loss_fn is not None)
    return loss_of(output, batch, loaded.loss_fn)


def _cast(module: nn.Module, dtype: torch.dtype) -> Callable[..., object]:
    """The module with its parameters and inputs cast to `dtype`, and outputs to fp32, as FSDP2
    does."""

    def low(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    @wraps(module.forward)  # names of arguments say which keys of a batch are for it
    def forward(*args: object, **kwargs: object) -> object:
        weights = {name: low(p) for name, p in module.named_parameters()}
        inputs, named = map_tensors(low, (args, kwargs))
        return as_fp32(functional_call(module, weights, inputs, named), dtype)

    return forward


def _compared(got: _Run, wanted: _Run, plan: Plan, rows: int, tolerance: Tolerance) -> Verified:
    errors = {
        f"step {step + 1}": abs(one - other) / (abs(other) or 1.0)
        for step, (one, other) in enumerate(zip(got.losses, wanted.losses, strict=True))
    }
    worst = max(errors, key=lambda step: errors[step] if errors[step] >= 0 else float("inf"))
    return Verified(
        plan=plan,
        rows=rows,
        loss=Difference(errors[worst], worst),
        gradients=largest_difference(got.gradients, wanted.gradients),
        parameters=largest_difference(
            {name: got.parameters[name] for name in wanted.parameters}, wanted.parameters
        ),
        tolerance=tolerance,
        steps=len(got.losses),
    )


def _microbatches(batch: Batch, rows: int, plan: Plan) -> list[Batch]:
    """Those of all replicas, in order."""
    replicas = split_rows(batch, split_rows_evenly(rows, plan.data_degree))
    return [
        piece
        for replica in replicas
        for piece in split_rows(replica, split_rows_evenly(batch_size(replica), plan.forwards))
    ]


def _whole_batch(profile: ModelProfile) -> str:
    reason = "its loss looks at several samples at once"
    if profile.batch_norms:
        reason = f"`{profile.batch_norms[0]}` takes statistics over them"
    return (
        f"compared on the same microbatches, one after another: on the whole batch at once this"
        f" model is another one, since {reason}"
    )


def _draws(module: nn.Module, loaded: LoadedModel, batch: Batch) -> bool:
    """True if two forwards with different seeds have different losses."""
    own, losses = copy_module(module).train(), []
    states = torch.get_rng_state()
    with torch.no_grad():
        for seed in (1, 2):
            torch.manual_seed(seed)
            losses.append(_loss(own, batch, loaded).item())
    torch.set_rng_state(states)
    return losses[0] != losses[1]


def _materialised(module: nn.Module) -> nn.Module:
    """A module with values; one on the meta device gets some of usual size."""
    return module.to_empty(device="cpu").apply(fill) if is_on_meta(module) else module


def _drawn(sample: Batch, module: nn.Module) -> Batch:
    """A sample that was made of zeros, with values: rows that are equal hide what is missing."""
    if any(bool(tensor.any()) for tensor in batch_tensors(sample) if not tensor.is_meta):
        return sample
    config = getattr(module, "config", None)
    tables = (m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding))
    most = getattr(config, "vocab_size", None) or next(tables, 1)

    def drawn(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, dtype=tensor.dtype)
        return torch.randint(0, most, tensor.shape) if tensor.ndim > 1 else tensor

    shared: dict[int, Tensor] = {}  # ids that are their own labels stay so
    return map_batch(lambda tensor: shared.setdefault(id(tensor), drawn(tensor)), sample)


def _dtype_of(module: nn.Module) -> torch.dtype:
    """The narrowest dtype of its parameters."""
    dtypes = {p.dtype for p in module.parameters()} & TOLERANCES.keys()
    return max(dtypes or {torch.float32}, key=lambda dtype: TOLERANCES[dtype].value)


def _has_equal_rows(batch: Batch, replicas: int) -> bool:
    rows = batch_size(batch)
    parts = split_rows(batch, split_rows_evenly(rows, replicas))
    first = batch_tensors(parts[0])
    return all(
        all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(first, own, strict=True))
        for own in map(batch_tensors, parts[1:])
    )


def _require_rows(rows: int, settings: str) -> None:
    """A row for each replica and microbatch that is asked for, the same number for each."""
    partial = read_settings(settings)
    degree = (partial.dp_replicate or 1) * (partial.dp_shard or 1)
    needed = degree * (partial.microbatches or 1) * (partial.accumulation or 1)
    if rows % needed:
        raise InputError(
            f"the sample has {rows} row{'s' * (rows > 1)}, the plan shares a batch out in {needed}",
            where=f"plan: {settings}",
            hints=[f"let the factory return a sample of {needed} rows, or a multiple"],
        )


def _require_memory(module: nn.Module, world: World) -> None:
    """Both models on one machine, with all that is compared."""
    if world.device.type != "cpu":
        return
    nbytes = sum(p.nbytes for p in module.parameters())
    needed, memory = COPIES * nbytes * (world.size + 1), machine_memory_bytes()
    if needed > memory:
        raise InputError(
            f"{world.size} ranks and one process take about {format_gib(needed)} for parameters"
            f" of {format_gib(nbytes)}; this machine has {format_gib(memory)}",
            hints=["verify a model of fewer layers: equal ones are split in the same way"],
        )
