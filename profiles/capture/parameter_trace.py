"""A step as far as parameters alone tell it, where the model cannot be run to look at it."""

from __future__ import annotations

from math import prod

from torch import nn

from profiles.capture.batch.tree import batch_tensors
from profiles.capture.subject import TracedModel
from profiles.capture.trace_step import StepTrace
from profiles.model.flow import Flow
from profiles.model.profile import LOSS
from profiles.trace.tally import Cost
from profiles.trace.timeline import Timeline

_SPARSE = (nn.Embedding, nn.EmbeddingBag)


def trace_parameters(subject: TracedModel) -> StepTrace:
    """Guess a step from the shapes of parameters and batch; states follow from them exactly.

    Every matrix is taken to multiply all positions of the batch (tokens, or pixels of its largest
    tensor but for its last dimension), once, and to save what it takes and gives. That is right for
    a chain of dense layers; it leaves out attention's scores and counts convolutions that shrink
    their images too high.
    """
    rows = max((_positions(tuple(t.shape)) for t in batch_tensors(subject.sample)), default=1)
    costs = {unit.name: Cost() for unit in subject.units}
    for name, cost in costs.items():
        for parameter in subject.parameters_of(name):
            if parameter.ndim < 2:
                continue
            out, width = parameter.shape[0], prod(parameter.shape[1:])
            saved = rows * (out + width) * parameter.element_size()
            flop = 2 * rows * parameter.numel()
            cost.forward_flop += flop
            cost.backward_flop += 2 * flop
            cost.forward_moved_bytes += parameter.nbytes + saved
            cost.backward_moved_bytes += 2 * (parameter.nbytes + saved)
            cost.forward_kernels += 1
            cost.backward_kernels += 2
            cost.activation_bytes += saved
            cost.selective_activation_bytes += saved
            cost.forward_transient_bytes = max(cost.forward_transient_bytes, saved)
            cost.backward_transient_bytes = max(cost.backward_transient_bytes, saved)
            cost.input_bytes = max(cost.input_bytes, rows * width * parameter.element_size())
            cost.output_bytes = rows * out * parameter.element_size()
    has_loss = subject.loss_fn is not None
    if has_loss:
        costs[LOSS] = Cost()
    return StepTrace(
        costs=costs,
        glue={},
        shared=frozenset(costs),  # it is not known who uses whose parameters
        unused=(),
        sparse_gradients=tuple(_sparse_weights(subject.model)),
        has_loss=has_loss,
        loss_terms=None,
        logits_read_by="",
        peak_bytes=0,
        flow=Flow(),
        copies=(),
        timeline=Timeline(),
        gradients=frozenset(),
        is_sound=True,
    )


def _positions(shape: tuple[int, ...]) -> int:
    """Rows of features in a tensor: (B, T) of ids, (B, T, C), (B, C, H, W)."""
    if len(shape) == 4:
        return shape[0] * shape[2] * shape[3]
    return prod(shape) if len(shape) < 3 else prod(shape[:-1])


def _sparse_weights(model: nn.Module) -> list[str]:
    return [
        f"{path}.weight".removeprefix(".")
        for path, module in model.named_modules()
        if isinstance(module, _SPARSE) and module.sparse and module.weight.requires_grad
    ]
