"""One look at a model: a forward and a backward on stand-ins, and what each unit took."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import NoneType

import torch
from torch import Tensor, nn

from profiles.capture.batch.call import Batch, call_model, find_loss, loss_of
from profiles.capture.batch.rows import repeat_rows
from profiles.capture.batch.tree import map_batch
from profiles.capture.fakes.known_values import ArrayReads, known_values
from profiles.capture.fakes.mode import KEPT, FakeRunMode
from profiles.capture.fakes.tensors import Fakes, stand_ins
from profiles.capture.loss_watch import LossWatch
from profiles.capture.model_errors import explained
from profiles.capture.operators.accelerators import AcceleratorOperators
from profiles.capture.operators.cudnn_recurrent import CudnnRecurrent
from profiles.capture.operators.lstm_kernels import LstmKernels
from profiles.capture.operators.recurrent_loops import RecurrentLoops
from profiles.capture.subject import TracedModel
from profiles.capture.traces.copy_trace import Copy
from profiles.capture.traces.dispatch_modes import TraceMode
from profiles.capture.traces.repeats import Repeats, drawn_state
from profiles.capture.traces.storages import Storages
from profiles.errors import ModelError, a_type
from profiles.model.flow import Flow
from profiles.model.profile import LOSS, LossTerms, Numerics
from profiles.model.source import CaptureSource, ValueRead
from profiles.torch_compat import storage_of, tensors_in, without_onednn
from profiles.torch_compat.grouped import autocast_grouped_products
from profiles.trace.scopes import Scope
from profiles.trace.tally import Cost, SavedBytes, glue_costs, tally
from profiles.trace.timeline import Timeline

_REGISTERED = ("_buffers", "_modules", "_parameters")


@dataclass(slots=True)
class StepTrace:
    """Result of tracing one forward and backward.

    Attributes:
        costs: by unit, in the order of first calls.
        glue: see `ModelProfile`.
        shared: units with a parameter that code outside them uses.
        unused, sparse_gradients: names of parameters without a gradient, and with a sparse one.
        loss_terms, logits_read_by: see `ModelProfile`.
        peak_bytes: most that was live at once beside parameters, their gradients, buffers, batch;
            where every block ran.
        flow: see `ModelProfile`.
        copies: between devices, in the forward of a module that was split by hand.
        timeline: every allocation.
        gradients: those of them that are gradients of parameters.
        is_sound: else equal blocks were not what they seemed; look at every one.
        reads: code that read values of the batch.
        draws: code drew random numbers of Python or NumPy, or single ones of torch: they may decide
            what runs.
        counts: the forward changed numbers or words that its modules have as attributes: they may
            decide what runs.
    """

    costs: dict[str, Cost]
    glue: dict[str, Cost]
    shared: frozenset[str]
    unused: tuple[str, ...]
    sparse_gradients: tuple[str, ...]
    has_loss: bool
    loss_terms: LossTerms | None
    logits_read_by: str
    peak_bytes: int
    flow: Flow
    copies: tuple[Copy, ...]
    timeline: Timeline
    gradients: frozenset[int]
    is_sound: bool
    reads: tuple[ValueRead, ...] = ()
    draws: bool = False
    counts: bool = False


def trace_step(
    subject: TracedModel,
    numerics: Numerics,
    *,
    times: int = 1,
    every_block: bool = True,
    source: CaptureSource = CaptureSource.FAKE,
    draw: float = KEPT,
    limit: Callable[[int], None] | None = None,
    hooks: bool = True,
    warm: bool = False,
) -> StepTrace:
    """Follow one forward and backward over the sample's rows, `times` times over.

    Args:
        every_block: run all blocks; else two of those that are equal, see `Repeats`.
        source: what stands in for the tensors: fakes, fakes with known values, or copies.
        draw, limit, hooks: see `TraceMode`.
        warm: after another forward, which is not followed.

    Raises:
        CannotFollow: the model's code does not run on the stand-ins.
        ModelError: see `profiles.capture.capture.capture`.
    """
    model, loss_fn = subject.model, subject.loss_fn
    low_precision = torch.bfloat16 if numerics is Numerics.BF16 else None
    is_autocast = numerics is Numerics.BF16_AUTOCAST
    if is_autocast:
        autocast_grouped_products()  # as the engines do
    runs = [model] if loss_fn is None else [model, loss_fn]
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        are_copies = source is CaptureSource.RUN
        fakes = stack.enter_context(stand_ins(runs, cast=low_precision, copies=are_copies))
        stack.enter_context(RecurrentLoops(lambda: trace.scope))
        if not are_copies:
            stack.enter_context(without_onednn())  # its kernels need values
            stack.enter_context(
                LstmKernels() if subject.on_processor else CudnnRecurrent(lambda: trace.scope)
            )
        batch = repeat_rows(map_batch(fakes.of, subject.sample), times, subject.dims)
        before = (storage_of(t) for t in (*fakes.all(), *tensors_in(batch)))
        by_storage = {
            storage: key
            for key, parameter in subject.parameters.items()
            if (storage := storage_of(fakes.of(parameter))) is not None
        }
        storages = Storages(
            owned={storage: frozenset(subject.holders[key]) for storage, key in by_storage.items()},
            names={storage: subject.names[key][0] for storage, key in by_storage.items()},
            known=[storage for storage in before if storage is not None],
            casts_are_parameters=is_autocast,
        )
        values = None
        if source is CaptureSource.KNOWN_VALUES:
            values = known_values(fakes, subject.sample, batch)
        trace = TraceMode(
            storages,
            low_precision=low_precision,
            on_processor=subject.on_processor,
            gradient_bytes={
                subject.names[key][0]: parameter.nbytes
                for key, parameter in subject.parameters.items()
                if parameter.requires_grad
            },
            placed=_placed(subject, fakes, batch, storages),
            values=values,
            draw=draw,
            limit=limit,
            hooks=hooks,
        )
        stack.callback(trace.release)
        if source is not CaptureSource.FAKE:
            stack.enter_context(ArrayReads(values, trace.note_read))
        if warm:
            with nullcontext() if are_copies else FakeRunMode(values).on(batch):
                call_model(model, batch, has_target=loss_fn is not None)
        before_draws, before_counts = drawn_state(), _attributes(model)
        trace.watch(model, subject.units, subject.layers)
        repeats = None if every_block else Repeats(trace, subject.units)
        stack.enter_context(_restored_gradients(trace))
        with trace.on(batch):
            watch = LossWatch(batch)
            autocast = torch.autocast("cpu", torch.bfloat16, enabled=is_autocast)
            operators = nullcontext() if subject.on_processor else AcceleratorOperators()
            with trace.saving(), autocast, watch, operators:
                roots, has_loss = _forward(subject, batch, trace)
            _note_left(subject, trace)
            trace.flow.note_kept()
            if has_loss:  # else whatever the model returns is its result
                trace.note_taken()
            saved = SavedBytes(
                storages.saved_bytes(),
                storages.selective_bytes(),
                storages.saved_bytes_of_parts(),
                storages.selective_bytes_of_parts(),
            )
            trace.begin_backward(roots)
            with explained(subject, f"backward of `{type(model).__name__}` fails"):
                _backward(roots)
            trace.end_backward()
        parameters = {key: fakes.of(parameter) for key, parameter in subject.parameters.items()}
        substituted = _substitutes_of(subject, trace)
        ignored = _gradient_numbers(parameters.values(), storages)
        return StepTrace(
            costs=tally(trace.scopes, saved, storages.timeline, ignored=ignored),
            glue=glue_costs(trace.scopes, saved, storages.timeline, ignored=ignored),
            shared=frozenset(trace.shared),
            unused=tuple(
                subject.names[key][0]
                for key, fake in parameters.items()
                if fake.requires_grad and parameters[substituted.get(key, key)].grad is None
            ),
            sparse_gradients=tuple(
                subject.names[key][0]
                for key in parameters
                if (gradient := parameters[substituted.get(key, key)].grad) is not None
                and gradient.layout != torch.strided
            ),
            has_loss=has_loss,
            loss_terms=watch.terms,
            logits_read_by=watch.logits_read_by,
            peak_bytes=storages.timeline.highest(ignored=ignored),
            flow=trace.flow.flow(),
            copies=tuple(trace.copies.copies) if trace.copies is not None else (),
            timeline=storages.timeline,
            gradients=ignored,
            is_sound=repeats is None or repeats.is_sound(),
            reads=tuple(trace.reads),
            draws=trace.has_drawn or drawn_state() != before_draws,
            counts=_attributes(model) != before_counts,
        )


def _note_left(subject: TracedModel, trace: TraceMode) -> None:
    """Tell the flow which tensors modules outside of units have after the forward."""
    units = {unit.name for unit in subject.units}
    for path, module in subject.model.named_modules():
        around = {path.rsplit(".", count)[0] for count in range(path.count(".") + 1)}
        if path and not units.isdisjoint(around):
            continue
        own = {name: value for name, value in vars(module).items() if name not in _REGISTERED}
        for values, is_buffer in ((module._buffers, True), (own, False)):
            for name, value in values.items():
                full = f"{path}.{name}" if path else name
                trace.flow.left(full, tensors_in(value), is_buffer=is_buffer)


def _attributes(model: nn.Module) -> list[object]:
    """Numbers and words among the attributes of all modules."""
    plain = (int, float, bool, str, NoneType)
    return [
        (path, name, value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) in plain
    ]


def _placed(subject: TracedModel, fakes: Fakes, batch: Batch, storages: Storages) -> dict[int, str]:
    """Devices by memory, where the module was split over several; the batch is on the first."""
    if not subject.devices:
        return {}
    own = subject.parameters.values()
    placed = {storages.memory_of(fakes.of(p)): str(p.device) for p in own if not p.is_meta}
    placed |= {storages.memory_of(tensor): subject.devices[0] for tensor in tensors_in(batch)}
    return {memory: device for memory, device in placed.items() if memory is not None}


def _forward(subject: TracedModel, batch: Batch, trace: TraceMode) -> tuple[list[Tensor], bool]:
    """Run model and loss; the tensors that backward starts from, and whether they are a loss.

    The output itself is let go on return, as in a training step.
    """
    model, loss_fn = subject.model, subject.loss_fn
    with explained(subject, f"`{type(model).__name__}` does not run on the sample"):
        output = call_model(model, batch, has_target=loss_fn is not None)
    if loss_fn is not None:
        trace.enter(Scope(LOSS), output)
        with explained(subject, "the loss does not take what the model returns"):
            loss = loss_of(trace.as_float32(output), batch, loss_fn)
        trace.leave(loss)
        return [loss], True
    output = trace.as_float32(output)
    own_loss = find_loss(output)
    if own_loss is not None:
        trace.scope.name = LOSS  # what the model does after its last unit makes the loss
        loss = loss_of(output, batch, None)
        trace.flow.begin(LOSS, loss)
        trace.flow.end(loss)
        return [loss], True
    roots = [t for t in tensors_in(output) if t.requires_grad]
    if not roots and any(p.requires_grad for p in subject.parameters.values()):
        raise ModelError(
            f"no gradient can flow back from the output of `{type(model).__name__}`"
            f" ({a_type(output)})",
            hints=["give loss_fn, or let the model return tensors, tuples or dicts of them"],
        )
    return roots, False


def _backward(roots: list[Tensor]) -> None:
    """As from the sum of the roots: every element's gradient is 1, in no memory of its own."""
    roots = [root for root in roots if root.requires_grad]
    if roots:
        ones = [torch.ones((), dtype=root.dtype).expand_as(root) for root in roots]
        torch.autograd.backward(roots, ones)


@contextmanager
def _restored_gradients(trace: TraceMode) -> Iterator[None]:
    """Leaves that are in no module (in closures, in plain objects) are real: theirs stay theirs."""
    try:
        yield
    finally:
        for leaf, gradient in trace.outside_leaves.values():
            leaf.grad = gradient


def _gradient_numbers(parameters: Iterable[Tensor], storages: Storages) -> frozenset[int]:
    """Allocations that are gradients of parameters: the timeline ignores them, the caller counts
    them."""
    gradients = (p.grad for p in parameters)
    numbers = (storages.number_of(g) for g in gradients if g is not None)
    return frozenset(number for number in numbers if number is not None)


def _substitutes_of(subject: TracedModel, trace: TraceMode) -> dict[int, int]:
    """For parameters of blocks that others stood for, by id: the parameter in its place."""
    stood_for = {scope.name: scope.stands_for.name for scope in trace.scopes if scope.stands_for}
    keys = {name: key for key, names in subject.names.items() for name in names}
    substitutes = {}
    for block, other in stood_for.items():
        if all(scope.stands_for for scope in trace.scopes if scope.name == block):
            parts = {n.removeprefix(f"{block}.") for n in keys if n.startswith(f"{block}.")}
            substitutes.update({keys[f"{block}.{part}"]: keys[f"{other}.{part}"] for part in parts})
    return substitutes
