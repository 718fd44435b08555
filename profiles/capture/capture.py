"""Profile any module from a trace of one step; nothing is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from profiles.capture.batch.call import Batch, LossFn
from profiles.capture.batch.dims import Dim, SaidDims
from profiles.capture.batch.rows import batch_size, split_rows
from profiles.capture.batch.tree import batch_items, batch_tensors, describe
from profiles.capture.ladder import trace
from profiles.capture.module.experts import experts_of
from profiles.capture.module.whole_parameters import shapes_of, whole_parameters, with_whole
from profiles.capture.subject import TracedModel, dtype_name, require_module
from profiles.capture.trace_step import StepTrace
from profiles.capture.traces.copy_trace import crossings
from profiles.capture.two_sizes import first_that_runs, sample_dims
from profiles.errors import BatchError, ModelError
from profiles.model.flow import Flow, Value
from profiles.model.profile import (
    GLUE,
    LOSS,
    Affine,
    ModelProfile,
    Numerics,
    UnitCost,
    UnitProfile,
)
from profiles.torch_compat import is_batch_norm
from profiles.trace.tally import affine, fitted


def capture(
    model: nn.Module,
    sample: Batch,
    *,
    loss_fn: LossFn | None = None,
    numerics: Sequence[Numerics] = (Numerics.AS_BUILT,),
    name: str | None = None,
    every_block: bool = False,
    batch_dims: SaidDims = None,
    on_processor: bool = True,
) -> ModelProfile:
    """Profile one forward and backward of `model`, without running it where that is possible.

    Eager code is followed with tensors that have shapes and no memory, on a stand-in for the CPU;
    the model's own device plays no part, meta included. Code that acts on values is followed as
    `profiles.capture.ladder` says, along the path of the sample; `source` and `reads` of the
    profile tell. Afterwards the model is as it was:
    parameters, gradients, buffers, hooks, mode, and the random state too. It is looked at in the
    mode it is in: call `model.train()` first. Two looks, at the sample's batch and at twice it,
    tell what is fixed from what grows per sample.

    Kernels are those that torch has on a CPU: attention with dropout counts unfused, recurrent
    layers count step by step, an LSTM as oneDNN runs it. Models of transformers have the attention
    masks of a real run (see `profiles.capture.fakes.transformers_compat`); one given in the sample
    counts as if it hid something.

    Args:
        sample: one local batch: a tensor, (inputs..., target) or a mapping of keyword arguments.
        loss_fn: `loss_fn(output, target)`; with a mapping `loss_fn(output, batch)`; None where the
            model returns its loss. Without any loss, backward starts at the sum of the outputs.
        numerics: how numbers are held; one set of costs for each.
        name: of the profile; the class name if None.
        every_block: run each block. Else two of those that are equal run, and the rest are taken to
            be as the second.
        batch_dims: dimensions of the batch that are known, see `profiles.capture.batch.dims`.
        on_processor: the model trains there; else see `AcceleratorOperators`.

    Raises:
        BatchError: tensors of the sample have no number of rows in common, or a target is missing.
        ModelError: the model does not run on the sample, or is not initialised; or its loss has no
            gradient.
    """
    require_module(model)
    _require_plain_tensors(sample)
    subject = TracedModel(
        model,
        sample,
        loss_fn,
        sample_dims(model, sample, loss_fn, said=batch_dims),
        on_processor=on_processor,
    )
    if not batch_size(sample, subject.dims):
        raise BatchError(
            "the sample has no rows: a model is looked at on a batch with some",
            where=describe(sample),
        )
    every_block = every_block or bool(subject.devices)  # equal ones may be on different devices
    traced = trace(subject, numerics, every_block=every_block)
    if traced.is_at_one_size and batch_dims is None:
        other_dims = _with_a_shared_tensor(subject)
        if other_dims is not None:
            subject.dims = other_dims
            traced = trace(subject, numerics, every_block=every_block)
    subject, looks, sample = traced.subject, traced.looks, traced.subject.sample
    samples = batch_size(sample, subject.dims)
    one, two = next(iter(looks.values()))
    costs = {
        kind: fitted(first.costs, second.costs if second else None, samples)
        for kind, (first, second) in looks.items()
    }
    shared = subject.holders_of_tied().union(*(first.shared for first, _ in looks.values()))
    _require_gradient(subject, one)
    profile = ModelProfile(
        name=name or type(model).__name__,
        units=tuple(_unit_profiles(subject, costs, shared, has_loss=one.has_loss)),
        dtype=subject.dtype(),
        samples=samples,
        tokens_per_sample=_tokens_per_sample(sample),
        batch_bytes=_batch_bytes(subject, samples),
        batch_dims=dict(subject.dims),
        tied=subject.tied(),
        unused=one.unused,
        sparse_gradients=one.sparse_gradients,
        batch_norms=tuple(path for path, module in model.named_modules() if is_batch_norm(module)),
        has_loss=one.has_loss,
        loss_terms=one.loss_terms,
        logits_read_by=one.logits_read_by,
        is_proportional=any(second is None for _, second in looks.values()),
        flow=_flow(one.flow, two.flow if two is not None else None, samples),
        experts_per_token=_experts_per_token(model),
        devices=subject.devices,
        glue={
            kind: fitted(first.glue, second.glue if second else None, samples)
            for kind, (first, second) in looks.items()
            if first.glue
        },
        crossings={
            kind: crossings(first.copies, second.copies if second else None, samples)
            for kind, (first, second) in looks.items()
            if first.copies
        },
        source=traced.source,
        reads=traced.reads,
        on_processor=on_processor,
    )
    own = {unit.name: subject.parameters_of(unit.name) for unit in profile.units}
    return with_whole(profile, whole_parameters(subject.model, profile), own)


def _require_plain_tensors(sample: Batch) -> None:
    """Raises ModelError: fake tensors have no stand-in for one of the sample's."""
    nested = (n for n, v in batch_items(sample) if isinstance(v, Tensor) and v.is_nested)
    name = next(nested, None)
    if name is not None:
        raise ModelError(
            f"`{name}` is a nested tensor, which fake tensors of this torch cannot follow",
            where=describe(sample),
            hints=[
                "give its rows as a list of tensors, an element a sample, and nest them in the"
                " forward",
                "or give the padded tensor and the lengths",
            ],
        )


def _with_a_shared_tensor(subject: TracedModel) -> dict[str, Dim] | None:
    """Other dimensions with which the model runs on twice the rows: one of its tensors is as long
    as the batch by chance, and shared by all samples."""
    dims = dict(subject.dims)
    choices = ({**dims, name: None} for name, dim in dims.items() if dim == 0 and len(dims) > 1)
    return first_that_runs(subject.model, subject.sample, subject.loss_fn, choices)


def _batch_bytes(subject: TracedModel, samples: int) -> Affine:
    without_rows, whole = split_rows(subject.sample, [0, samples], subject.dims)
    fixed, total = (sum(t.nbytes for t in batch_tensors(b)) for b in (without_rows, whole))
    return Affine(fixed=fixed, per_sample=(total - fixed) / samples)


def _require_gradient(subject: TracedModel, seen: StepTrace) -> None:
    """Raises ModelError: no parameter that is trained gets a gradient from the loss."""
    trained = sum(parameter.requires_grad for parameter in subject.parameters.values())
    if seen.has_loss and trained and len(seen.unused) == trained:
        raise ModelError(
            f"the loss has no gradient for any of the {trained} trained parameters",
            where=f"`{type(subject.model).__name__}`, sample: {describe(subject.sample)}",
            hints=["leave out `detach()`, `no_grad()` and rounding between parameters and loss"],
        )


# As transformers name it: Mixtral, Qwen, DeepSeek, OLMoE and others; GPT-OSS.
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "experts_per_token")


def _experts_per_token(model: nn.Module) -> int | None:
    """As the configuration that the module carries says; nothing else of it is looked at."""
    config = getattr(model, "config", None)
    counts = (getattr(config, name, None) for name in _EXPERTS_PER_TOKEN)
    return next((n for n in counts if type(n) is int and n > 0), None)


def _flow(one: Flow, two: Flow | None, samples: int) -> Flow:
    """With the sizes of values at all batch sizes, from two of them."""
    if two is not None and (one.edges, _units(one)) != (two.edges, _units(two)):
        two = None
    calls = []
    for number, call in enumerate(one.calls):
        twice = two.calls[number].values if two is not None else (None,) * len(call.values)
        values = [
            value.model_copy(update={"bytes": _line(value, other, samples)})
            for value, other in zip(call.values, twice, strict=True)
        ]
        calls.append(call.model_copy(update={"values": tuple(values)}))
    return one.model_copy(update={"calls": tuple(calls)})


def _line(one: Value, two: Value | None, samples: int) -> Affine:
    return affine(int(one.bytes.fixed), int(two.bytes.fixed) if two else None, samples)


def _units(flow: Flow) -> list[tuple[str, int]]:
    return [(call.unit, len(call.values)) for call in flow.calls]


def _unit_profiles(
    subject: TracedModel,
    costs: Mapping[Numerics, Mapping[str, UnitCost]],
    shared: frozenset[str],
    *,
    has_loss: bool,
) -> Iterator[UnitProfile]:
    """In the order of first calls, then those never called; the loss last."""
    units = {unit.name: unit for unit in subject.units}
    called = next(iter(costs.values()))
    names = [name for name in called if name != LOSS]
    names += [name for name in (*units, GLUE) if name not in called]
    if has_loss:
        names.append(LOSS)
    for name in names:
        parameters = subject.parameters_of(name)
        trainable = [p for p in parameters if p.requires_grad]
        dtypes, trained = (
            tuple(sorted({dtype_name(p) for p in some})) for some in (parameters, trainable)
        )
        unit = units.get(name)
        profile = UnitProfile(
            name=name,
            kind=type(unit.module).__name__ if unit else _kind(subject, name),
            is_block=unit is not None and unit.is_block,
            parameters=sum(p.numel() for p in parameters),
            trainable_parameters=sum(p.numel() for p in trainable),
            parameter_bytes=sum(p.nbytes for p in parameters),
            gradient_bytes=sum(p.nbytes for p in trainable),
            buffer_bytes=subject.buffer_bytes_of(name),
            dtypes=dtypes,
            trained_dtypes=trained if trained != dtypes else (),
            shapes=tuple(shapes_of(trainable)),
            experts=_experts(unit.module) if unit else (),
            is_shared=name in shared,
            costs={kind: by_name.get(name, UnitCost()) for kind, by_name in costs.items()},
        )
        is_empty = not profile.parameters and not profile.buffer_bytes
        if name != GLUE or not is_empty or any(c != UnitCost() for c in profile.costs.values()):
            yield profile


def _experts(module: nn.Module) -> tuple[int, ...]:
    return tuple(sorted({experts_of(part) for part in module.modules()} - {0}))


def _kind(subject: TracedModel, name: str) -> str:
    if name == GLUE:
        return type(subject.model).__name__
    loss_fn = subject.loss_fn
    return getattr(loss_fn, "__name__", type(loss_fn).__name__) if loss_fn else "loss"


def _tokens_per_sample(sample: Batch) -> int | None:
    """Sequence length, if the first tensor of integers with two dimensions is token ids."""
    return next((t.shape[1] for t in batch_tensors(sample) if t.dim() == 2 and _counts(t)), None)


def _counts(tensor: Tensor) -> bool:
    is_number = tensor.is_floating_point() or tensor.is_complex() or tensor.dtype.itemsize < 2
    return not (is_number or tensor.is_nested)
