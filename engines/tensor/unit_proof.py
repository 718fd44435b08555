"""Prove that a split unit computes what it computed whole, rank by rank in one process.

The split unit runs once for each rank. Where ranks would communicate, a rank gets the result
for the whole unit's values, and its contribution is recorded. If all contributions together are
those values, if every rank returns the outputs of the whole unit, and if the gradients of its
parameters are the whole ones, their parts, or add up to them, then by induction over the
collectives the ranks together compute the same. Numbers are random, so two
different functions agree with probability zero.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engines.state.slices import Slice
from engines.state.token_shares import padded, require_tokens
from engines.tensor.collectives import SEQUENCE
from engines.tensor.own_hooks import hooked_part
from engines.tensor.split import split
from engines.tensor.styles import Kind, Style
from engines.tensor.unit_copy import SEED, UnitCopy, first_line
from profiles.errors import AdvisorError
from profiles.torch_compat import is_fake

TOLERANCE = 1e-4
"""Relative; rounding stays below 1e-6 also in float32, mistakes are of the order of 1."""
FLOOR = 1e-2
"""Gradients that are zero but for rounding (a key's bias) are compared with the largest one."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`why_not` is empty if the split is right. `partial`: see `TensorSplit`."""

    why_not: str = ""
    partial: frozenset[str] = frozenset()


@dataclass(slots=True)
class CallResult:
    """The outputs of a call, and the gradients after its backward."""

    outputs: list[Tensor]
    of_inputs: list[Tensor | None]
    of_parameters: dict[str, Tensor]


def run_whole(copy: UnitCopy) -> CallResult:
    """Run the whole unit once: every split of it must give the same."""
    return _run(copy.fresh(), copy)


def prove_unit(
    copy: UnitCopy,
    styles: Mapping[str, Sequence[Style]],
    *,
    size: int,
    whole: CallResult | None = None,
) -> Verdict:
    """Prove that `copy`, split over `size` ranks by `styles` (paths in it), is the whole unit.

    Args:
        whole: `run_whole(copy)`, where several splits of it are tried.
    """
    hooked = hooked_part(copy.unit, styles)
    if hooked is not None:
        return Verdict(
            f"`{hooked or copy.paths[0]}` has a hook, which would see a rank's part alone"
        )
    whole = whole or run_whole(copy)
    record = _Record()
    # Trainable: an exchange may lie between parameters and outputs alone, as after an embedding.
    observed = copy.fresh()
    cuts: dict[str, Slice] = {}
    runs: list[CallResult] = []
    try:
        split(observed, styles, record)
        _run(observed, copy)
        for rank in range(size):
            unit = copy.fresh()
            ranks = _SimulatedRank(record, rank=rank, size=size)
            cuts = split(unit, styles, ranks)
            runs.append(_run(unit, copy))
            ranks.require_end()
    except _UnitDiffers as difference:
        return Verdict(str(difference))
    except AdvisorError as error:
        return Verdict(error.what)
    except Exception as error:  # of any code: a subclass of a layer may return no tensor
        return Verdict(f"the split unit does not run: {first_line(error)}")
    try:
        record.require_sums()
        for run in runs:
            _require_equal(run, whole)
        return Verdict(partial=_partial(runs, whole, cuts, _of_few_heads(copy.unit, styles)))
    except _UnitDiffers as difference:
        return Verdict(str(difference))


class _UnitDiffers(Exception):
    """A difference from the whole unit."""


@dataclass(slots=True)
class _RecordedExchange:
    """One collective in the whole unit, and the contributions of the ranks to it."""

    value: Tensor
    gradient: Tensor | None = None
    values_sum: Tensor | None = None
    gradients_sum: Tensor | None = None

    def observe(self, gradient: Tensor) -> Tensor:
        self.gradient = gradient.clone()
        return gradient

    def contribute_gradient(self, gradient: Tensor) -> Tensor:
        """Record a rank's share of the gradient; returns the whole one."""
        before = self.gradients_sum
        self.gradients_sum = gradient.clone() if before is None else before + gradient
        return gradient if self.gradient is None else self.gradient

    def contribute(self, partial: Tensor) -> Tensor:
        """Record a rank's share of the value; returns the whole one."""
        if partial.shape != self.value.shape:
            raise _UnitDiffers(
                f"a partial output is {tuple(partial.shape)}, the whole {tuple(self.value.shape)}"
            )
        before = self.values_sum
        self.values_sum = partial.clone() if before is None else before + partial
        return self.value


class _Record:
    """Collectives of one rank: everything is whole, and is recorded in order."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.events: list[_RecordedExchange] = []

    def copy(self, whole: Tensor) -> Tensor:
        return _through(whole, whole, self._note(whole).observe)

    def reduce(self, partial: Tensor) -> Tensor:
        self._note(partial)
        return partial

    def gather(self, part: Tensor, cut: Slice, *, length: int) -> Tensor:
        self._note(part)
        return part

    def scatter(self, whole: Tensor, cut: Slice) -> Tensor:
        return self.copy(whole)

    def split_tokens(self, whole: Tensor) -> Tensor:
        return self.copy(whole)

    def gather_tokens(self, part: Tensor) -> Tensor:
        return self.gather(part, SEQUENCE, length=part.shape[1])

    def join_tokens(self, part: Tensor) -> Tensor:
        return self.copy(part)

    def reduce_tokens(self, partial: Tensor) -> Tensor:
        return self.copy(partial)

    def _note(self, value: Tensor) -> _RecordedExchange:
        self.events.append(_RecordedExchange(value.detach().clone()))
        return self.events[-1]

    def require_sums(self) -> None:
        """Require that the ranks' contributions to each exchange add up to the whole."""
        floor = _largest(event.gradient for event in self.events)
        for event in self.events:
            if event.values_sum is not None and not _close(event.values_sum, event.value):
                raise _UnitDiffers("partial outputs do not add up to the whole output")
            if event.gradient is None:
                continue
            if event.gradients_sum is None or not _close(
                event.gradients_sum, event.gradient, floor=floor
            ):
                raise _UnitDiffers(
                    "gradients of a shared input do not add up to the whole gradient"
                )


class _SimulatedRank:
    """Collectives of one rank among others that are not there."""

    def __init__(self, record: _Record, *, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._events = iter(record.events)

    def copy(self, whole: Tensor) -> Tensor:
        event = self._take()
        if not _close(whole, event.value):
            raise _UnitDiffers("an input that should be whole is not")
        return _through(whole, whole, event.contribute_gradient)

    def reduce(self, partial: Tensor) -> Tensor:
        event = self._take()
        return _through(partial, event.contribute(partial.detach()), _same)

    def gather(self, part: Tensor, cut: Slice, *, length: int) -> Tensor:
        event = self._take()
        if not _close(part, cut.part(event.value, rank=self.rank, size=self.size)):
            raise _UnitDiffers("an output is not a part of the whole output")
        return _through(part, event.value, lambda g: cut.part(g, rank=self.rank, size=self.size))

    def scatter(self, whole: Tensor, cut: Slice) -> Tensor:
        event = self._take()
        if not _close(whole, event.value):
            raise _UnitDiffers("an input that should be whole is not")
        parts = [cut.part(whole, rank=rank, size=self.size) for rank in range(self.size)]

        def placed(gradient: Tensor) -> Tensor:
            """This rank's gradient at its place, zeros elsewhere."""
            others = [torch.zeros_like(part) for part in parts]
            return cut.whole([*others[: self.rank], gradient, *others[self.rank + 1 :]])

        return _through(whole, parts[self.rank], lambda g: event.contribute_gradient(placed(g)))

    def split_tokens(self, whole: Tensor) -> Tensor:
        event = self._take()
        require_tokens(whole, self.size)
        if not _close(whole, event.value):
            raise _UnitDiffers("an input that should be whole is not")
        return _through(
            whole, self._mine(whole), lambda g: event.contribute_gradient(self._placed(g, whole))
        )

    def gather_tokens(self, part: Tensor) -> Tensor:
        event = self._take()
        if not _close(part, self._mine(event.value)):
            raise _UnitDiffers("an output is not a part of the whole output")
        return _through(part, event.value, self._gradient_of_mine)

    def join_tokens(self, part: Tensor) -> Tensor:
        event = self._take()
        if not _close(part, self._mine(event.value)):
            raise _UnitDiffers("tokens that are joined are not a part of the whole sequence")
        return _through(
            part, event.value, lambda g: self._gradient_of_mine(event.contribute_gradient(g))
        )

    def reduce_tokens(self, partial: Tensor) -> Tensor:
        event = self._take()
        require_tokens(partial, self.size)
        mine = self._mine(event.contribute(partial.detach()))
        return _through(
            partial, mine, lambda g: event.contribute_gradient(self._placed(g, partial))
        )

    def _mine(self, whole: Tensor) -> Tensor:
        return SEQUENCE.part(padded(whole, self.size), rank=self.rank, size=self.size)

    def _gradient_of_mine(self, whole: Tensor) -> Tensor:
        """This rank's part of a gradient; repeated tokens have none."""
        mine = self._mine(whole).clone()
        repeated = (self.rank + 1) * mine.shape[1] - whole.shape[1]
        if repeated > 0:
            mine[:, -repeated:] = 0
        return mine

    def _placed(self, part: Tensor, whole: Tensor) -> Tensor:
        """`part`, a gradient, at its place, zeros elsewhere; that of repeated tokens is the last
        one's."""
        placed = torch.zeros_like(padded(whole, self.size))
        SEQUENCE.part(placed, rank=self.rank, size=self.size).copy_(part)
        own = placed[:, : whole.shape[1]]
        own[:, -1] += placed[:, whole.shape[1] :].sum(1)
        return own

    def require_end(self) -> None:
        if next(self._events, None) is not None:
            raise _UnitDiffers("it makes fewer collectives than the whole unit")

    def _take(self) -> _RecordedExchange:
        event = next(self._events, None)
        if event is None:
            raise _UnitDiffers("it makes more collectives than the whole unit")
        return event


class _Through(torch.autograd.Function):
    """`value` in place of a tensor, and another gradient in place of its own."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, value: Tensor, back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


def _through(tensor: Tensor, value: Tensor, back: Callable[[Tensor], Tensor]) -> Tensor:
    result: Tensor = _Through.apply(tensor, value.detach(), back)  # type: ignore[no-untyped-call]
    return result


def _same(gradient: Tensor) -> Tensor:
    return gradient


def _run(unit: nn.Module, copy: UnitCopy) -> CallResult:
    """One call and its backward from random gradients of the outputs."""
    with copy.running():
        return _result(unit, copy)


def _result(unit: nn.Module, copy: UnitCopy) -> CallResult:
    args, kwargs, given = copy.inputs()
    outputs = copy.call(unit, args, kwargs)
    generator = torch.Generator().manual_seed(SEED)
    starts = [t for t in outputs if t.requires_grad]
    seeds = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in starts]
    torch.autograd.backward(starts, seeds)
    args, kwargs, _ = copy.inputs()
    with torch.no_grad():
        again = copy.call(unit, args, kwargs)  # some modules take another path then
    gradients = {
        n: p.grad.to_dense() if p.grad.is_sparse else p.grad
        for n, p in unit.named_parameters()
        if p.grad is not None
    }
    return CallResult([t.detach() for t in [*outputs, *again]], [t.grad for t in given], gradients)


def _require_equal(run: CallResult, whole: CallResult) -> None:
    if len(run.outputs) != len(whole.outputs) or not all(map(_close, run.outputs, whole.outputs)):
        raise _UnitDiffers("an output differs from that of the whole unit")
    floor = _largest(whole.of_inputs)
    for got, wanted in zip(run.of_inputs, whole.of_inputs, strict=True):
        if (got is None) != (wanted is None) or (
            got is not None and wanted is not None and not _close(got, wanted, floor=floor)
        ):
            raise _UnitDiffers("the gradient of an input differs from that of the whole unit")


def _of_few_heads(unit: nn.Module, styles: Mapping[str, Sequence[Style]]) -> set[str]:
    """Parameters of which a rank uses one head: their gradients are parts, also where the whole is
    zero but for rounding, as of a key's bias. Ranks that kept their own would drift apart."""
    few = [path for path, wanted in styles.items() if any(s.kind is Kind.HEADS for s in wanted)]
    own = {p for path in few for p in unit.get_submodule(path).parameters(recurse=False)}
    return {name for name, parameter in unit.named_parameters() if parameter in own}


def _partial(
    runs: Sequence[CallResult],
    whole: CallResult,
    cuts: Mapping[str, Slice],
    parts: Container[str],
) -> frozenset[str]:
    """The whole parameters whose gradients are parts of a sum; `parts` are among them."""
    if cuts and whole.of_parameters.keys().isdisjoint(cuts):
        # Its forward was replaced by a function that calls the module that was copied, say.
        raise _UnitDiffers("a copy of it computes nothing with its own parameters")
    floor = _largest(whole.of_parameters.values())
    partial = set()
    for name, wanted in whole.of_parameters.items():
        gradients_of = [run.of_parameters.get(name) for run in runs]
        if any(gradient is None for gradient in gradients_of):
            raise _UnitDiffers(f"`{name}` has no gradient on some rank")
        gradients = [gradient for gradient in gradients_of if gradient is not None]
        cut = cuts.get(name)
        if cut is not None:
            if wanted.dim() > 1 and not is_fake(wanted) and not wanted.any():
                raise _UnitDiffers(f"no numbers were found on which `{name}` does anything")
            sizes = range(len(runs))
            wanted_parts = [cut.part(wanted, rank=rank, size=len(runs)) for rank in sizes]
            fits = all(
                _close(g, part, floor=floor)
                for g, part in zip(gradients, wanted_parts, strict=True)
            )
        elif name not in parts and all(_close(g, wanted, floor=floor) for g in gradients):
            fits = True
        else:
            fits = _close(torch.stack(gradients).sum(0), wanted, floor=floor)
            partial.add(name)
        if not fits:
            raise _UnitDiffers(f"the gradient of `{name}` is wrong")
    return frozenset(partial)


def _close(got: Tensor, wanted: Tensor, *, floor: float = 0.0) -> bool:
    """Equal up to rounding relative to the largest number, at least `floor`.

    Fake tensors have no numbers: there shapes are all that is compared.
    """
    if got.shape != wanted.shape:
        return False
    if is_fake(got) or is_fake(wanted):
        return True
    if not got.is_floating_point():
        return torch.equal(got, wanted)
    if not got.numel():
        return True
    bound = TOLERANCE * max(wanted.abs().max().item(), FLOOR * floor)
    return bool((got - wanted).abs().max().item() <= bound)


def _largest(tensors: Iterable[Tensor | None]) -> float:
    there = [t for t in tensors if t is not None and t.numel() and not is_fake(t)]
    return max((t.abs().max().item() for t in there), default=0.0)
