"""Profile any module from a trace of one step; nothing is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from profiles.capture.batch import Batch, LossFn, batch_size, batch_tensors
from profiles.capture.copy_trace import crossings
from profiles.capture.experts import experts_of
from profiles.capture.ladder import trace
from profiles.capture.subject import TracedModel, dtype_name
from profiles.model.flow import Flow, Value
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
    layers count step by step. Models of transformers have the attention masks of a real run (see
    `profiles.capture.transformers_compat`); one given in the sample counts as if it hid something.

    Args:
        sample: one local batch: a tensor, (inputs..., target) or a mapping of keyword arguments;
            the first dimension of every tensor is the batch.
        loss_fn: `loss_fn(output, target)`; with a mapping `loss_fn(output, batch)`; None where the
            model returns its loss. Without any loss, backward starts at the sum of the outputs.
        numerics: how numbers are held; one set of costs for each.
        name: of the profile; the class name if None.
        every_block: run each block. Else two of those that are equal run, and the rest are taken to
            be as the second.

    Raises:
        BatchError: tensors of the sample differ in their first dimension, or a target is missing.
        ModelError: the model does not run on the sample, or is not initialised.
    """
    subject = TracedModel(model, sample, loss_fn)
    batch_size(sample)
    every_block = every_block or bool(subject.devices)  # equal ones may be on different devices
    traced = trace(subject, numerics, every_block=every_block)
    subject, looks, sample = traced.subject, traced.looks, traced.subject.sample
    samples = batch_size(sample)
    one, two = next(iter(looks.values()))
    costs = {
        kind: fitted(first.costs, second.costs if second else None, samples)
        for kind, (first, second) in looks.items()
    }
    shared = subject.holders_of_tied().union(*(first.shared for first, _ in looks.values()))
    return ModelProfile(
        name=name or type(model).__name__,
        units=tuple(_unit_profiles(subject, costs, shared, has_loss=one.has_loss)),
        dtype=subject.dtype(),
        samples=samples,
        tokens_per_sample=_tokens_per_sample(sample),
        batch_bytes=Affine(per_sample=sum(t.nbytes for t in batch_tensors(sample)) / samples),
        tied=subject.tied(),
        unused=one.unused,
        sparse_gradients=one.sparse_gradients,
        batch_norms=tuple(path for path, module in model.named_modules() if is_batch_norm(module)),
        has_loss=one.has_loss,
        is_proportional=any(second is None for _, second in looks.values()),
        flow=_flow(one.flow, two.flow if two is not None else None, samples),
        experts_per_token=_experts_per_token(model),
        devices=subject.devices,
        crossings={
            kind: crossings(first.copies, second.copies if second else None, samples)
            for kind, (first, second) in looks.items()
            if first.copies
        },
        source=traced.source,
        reads=traced.reads,
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
            dtypes=tuple(sorted({dtype_name(p) for p in parameters})),
            shapes=tuple(_shapes(trainable)),
            experts=_experts(unit.module) if unit else (),
            is_shared=name in shared,
            costs={kind: by_name.get(name, UnitCost()) for kind, by_name in costs.items()},
        )
        is_empty = not profile.parameters and not profile.buffer_bytes
        if name != GLUE or not is_empty or any(c != UnitCost() for c in profile.costs.values()):
            yield profile


def _shapes(parameters: Iterable[Tensor]) -> Iterator[ParameterShape]:
    counts = Counter((tuple(p.shape), p.element_size()) for p in parameters)
    for (sizes, element_bytes), count in sorted(counts.items()):
        yield ParameterShape(sizes=sizes, element_bytes=element_bytes, count=count)


def _experts(module: nn.Module) -> tuple[int, ...]:
    return tuple(sorted({experts_of(part) for part in module.modules()} - {0}))


def _kind(subject: TracedModel, name: str) -> str:
    if name == GLUE:
        return type(subject.model).__name__
    loss_fn = subject.loss_fn
    return getattr(loss_fn, "__name__", type(loss_fn).__name__) if loss_fn else "loss"


def _tokens_per_sample(sample: Batch) -> int | None:
    """Sequence length, if the first tensor of integers with two dimensions is token ids."""
    return next((t.shape[1] for t in batch_tensors(sample) if t.ndim == 2 and _counts(t)), None)


def _counts(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype.itemsize < 2)
