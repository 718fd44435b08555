"""Split the layers of a module over the ranks of the tp axis, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from engines.blocks.wrap import wrap_forward
from engines.state.slices import Slice, share
from engines.tensor.collectives import Collectives, GroupCollectives
from engines.tensor.head_bias import take_heads
from engines.tensor.layers import feature_dim, features, slices_of, with_bias, without_bias
from engines.tensor.logits import VocabLogits
from engines.tensor.sequence_parallel import exchange_tokens
from engines.tensor.styles import CUTTING, LOCAL, Kind, Style, cutting
from profiles.capture.fakes.transformers_compat import is_transposed_linear
from profiles.errors import PlanError

_LAST = Slice(-1)


@dataclass(frozen=True, slots=True)
class TensorSplit:
    """A model split over the tp axis.

    Attributes:
        slices: how the parameters that were split lie on the ranks, by their first names; all
            others are whole on every rank.
        partial: first names of whole parameters whose gradients are parts of a sum over the ranks
            (norms of split heads); equal everywhere once they are summed.
        styles: by module path.
        group: the tp axis; None for all ranks.
    """

    slices: Mapping[str, Slice]
    partial: frozenset[str]
    styles: Mapping[str, Sequence[Style]]
    group: dist.ProcessGroup | None
    rank: int
    size: int


def split_over(
    model: nn.Module,
    styles: Mapping[str, Sequence[Style]],
    partial: Iterable[str],
    *,
    group: dist.ProcessGroup | None,
    lengths: dict[int, int] | None = None,
) -> TensorSplit:
    """`split` among the ranks of a process group.

    Args:
        styles, partial: of a `SplitProof`; nothing is proved here.
        lengths: see `GroupCollectives`; a pipeline's stage has shares of sequences that an earlier
            one split.
    """
    ranks = GroupCollectives(group, lengths=lengths)
    if lengths is None:
        model.register_forward_pre_hook(lambda *_: ranks.begin_forward())
    cuts = split(model, styles, ranks)
    return TensorSplit(cuts, frozenset(partial), styles, group, ranks.rank, ranks.size)


def split(
    model: nn.Module, styles: Mapping[str, Sequence[Style]], collectives: Collectives
) -> dict[str, Slice]:
    """Keep this rank's part of every layer that `styles` names, by module path, in place.

    Parameters stay the same objects with less in them. Returns the slices by first names of
    parameters; those that another stage holds (one element, expanded) only change their shape.

    Raises:
        PlanError: a style that does not fit the module, or styles of a tied weight that disagree.
    """
    first = {parameter: name for name, parameter in model.named_parameters()}
    cuts: dict[str, Slice] = {}
    again, join = _Shared(collectives.copy), _Shared(collectives.join_tokens)
    blocks = [path for path, wanted in styles.items() if Style(kind=Kind.SEQUENCE) in wanted]
    for path, wanted in styles.items():
        module = model.get_submodule(path)
        by_tokens = any(_lies_in(path, block) for block in blocks)
        for style in wanted:
            if style.kind is Kind.SIZES:
                _count_local(module, style, collectives, path=path)
                continue
            if style.kind in (Kind.ENTRY, Kind.EXIT, Kind.JOINED):
                exchange_tokens(module, style.kind, collectives, join)
            if style.kind not in CUTTING:
                continue
            for own, cut in slices_of(module, style).items():
                name = first[module.get_parameter(own)]
                if cuts.setdefault(name, cut) != cut:
                    raise PlanError(
                        f"`{name}` is tied, and its places are split in different ways",
                        where=f"tensor style {path}:{style}",
                        hints=["give them one style, or leave the weight whole"],
                    )
            if style.kind is Kind.BIAS:
                take_heads(module, style, collectives, path=path)
                continue
            _add_collectives(module, style, collectives, again, by_tokens=by_tokens)
    for path in _above(path for path, wanted in styles.items() if cutting(wanted)):
        _run_within(model.get_submodule(path), again.forward)
        _run_within(model.get_submodule(path), join.forward)
    parameters = dict(model.named_parameters())
    for name, cut in cuts.items():
        _keep_slice(parameters[name], cut, collectives)
    return cuts


@torch.no_grad()
def _keep_slice(parameter: nn.Parameter, cut: Slice, collectives: Collectives) -> None:
    part = cut.part(parameter.detach(), rank=collectives.rank, size=collectives.size)
    if parameter.numel() > 1 and not any(parameter.stride()):  # of another stage: shape alone
        part = parameter.data[(0,) * parameter.dim()].expand(part.shape)
    else:
        part = part.clone(memory_format=torch.contiguous_format)
    # While the graph of an earlier forward lives, its node that adds up gradients does too, which
    # wants those of the whole shape. Torch makes another one where the dtype changes.
    other = torch.float32 if part.dtype is torch.float16 else torch.float16
    parameter.data = torch.empty(0, dtype=other, device=parameter.device)
    parameter.data = part


def _above(paths: Iterable[str]) -> list[str]:
    """All modules in which those of `paths` lie."""
    above: dict[str, None] = {}
    for path in paths:
        while path:
            path = path.rpartition(".")[0]
            above[path] = None
    return list(above)


def _lies_in(path: str, block: str) -> bool:
    return not block or f"{path}.".startswith(f"{block}.")


def _add_collectives(
    module: nn.Module,
    style: Style,
    collectives: Collectives,
    again: Callable[[Tensor], Tensor],
    *,
    by_tokens: bool,
) -> None:
    """Add the collectives of a style to a layer; `by_tokens`: in a block split by tokens."""
    outputs = features(module)[1]
    if isinstance(module, nn.Embedding):
        if style.kind is Kind.COLUMN:
            return  # of whole ids it looks up rows that are this rank's share
        _replace_forward(module, _embedding(module, collectives))
        return
    if is_transposed_linear(module):
        # The one layer whose forward reads its number of output features.
        cut, whole = slices_of(module, style)["weight"], module.get_parameter("weight")
        local = cut.part(whole, rank=collectives.rank, size=collectives.size).shape[1]
        vars(module)["nf"] = local
    if style.kind is Kind.ROW:
        summed = collectives.reduce_tokens if by_tokens else collectives.reduce
        _replace_forward(module, _row(module, summed))
        return
    if style.kind is Kind.HEADS:
        _replace_forward(module, _own_head(module, style.packs, collectives))
    if by_tokens and style.kind in LOCAL:
        return  # joining the tokens reduced its gradients

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (again(args[0]), *args[1:]), kwargs
        return args, {name: again(value) for name, value in kwargs.items()}

    module.register_forward_pre_hook(enter, with_kwargs=True)
    if style.kind is Kind.GATHER:
        cut = Slice(feature_dim(module), style.packs)
        module.register_forward_hook(
            lambda module, args, output: collectives.gather(output, cut, length=outputs)
        )
    elif style.kind is Kind.VOCAB:
        module.register_forward_hook(
            lambda module, args, output: VocabLogits.of(output, collectives, length=outputs)
        )


def _row(module: nn.Module, summed: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    product = _product(module)

    def forward(module: nn.Module, input: Tensor) -> Tensor:
        return with_bias(module, summed(product(module, input)))

    return forward


def _own_head(module: nn.Module, heads: int, collectives: Collectives) -> Callable[..., Tensor]:
    """A forward that computes the one of few heads which this rank's share of the others reads.

    Several ranks compute each head, in order. The weight stays whole, and its gradient is a part of
    a sum over the ranks: zero but for this head.
    """
    outputs = features(module)[1]
    is_split = collectives.size > 1
    if is_split and (outputs % heads or collectives.size % heads):
        raise PlanError(
            f"{heads} heads of {outputs} features for {collectives.size} ranks: each is computed by"
            " as many ranks as the others",
            hints=["take a tp that the heads divide, or leave the layer whole"],
        )
    width = outputs // heads
    start = collectives.rank * heads // collectives.size * width
    rows = slice(start, start + width if is_split else outputs)

    def forward(module: nn.Module, input: Tensor) -> Tensor:
        bias = module._parameters.get("bias")
        weight = module.get_parameter("weight")[rows]
        return F.linear(input, weight, None if bias is None else bias[rows])

    return forward


def _product(module: nn.Module) -> Callable[[nn.Module, Tensor], Tensor]:
    """The layer's own forward without its bias."""
    if type(module).forward is nn.Linear.forward:
        return lambda module, input: F.linear(input, module.get_parameter("weight"))
    if is_transposed_linear(module):
        return lambda module, input: input @ module.get_parameter("weight")
    own = type(module).forward

    def product(module: nn.Module, input: Tensor) -> Tensor:
        with without_bias(module):
            result: Tensor = own(module, input)
        return result

    return product


def _embedding(module: nn.Embedding, collectives: Collectives) -> Callable[..., object]:
    """A forward that looks up the rows of this rank, and has zeros for the others."""
    start, count = share(features(module)[0], collectives.rank, collectives.size)

    def lookup(module: nn.Embedding, ids: Tensor) -> Tensor:
        here = ids - start
        is_mine = (here >= 0) & (here < count)
        if not count:
            nothing = module.weight.new_zeros(*ids.shape, module.weight.shape[1])
            return collectives.reduce(nothing + module.weight.sum())
        with _padding_at(module, module.padding_idx, start, count):
            rows = nn.Embedding.forward(module, torch.where(is_mine, here, 0))
        return collectives.reduce(torch.where(is_mine[..., None], rows, 0.0))

    own = type(module).forward
    if own is nn.Embedding.forward:
        return lookup

    def forward(module: nn.Embedding, *args: Any, **kwargs: Any) -> object:
        # A scaled one, or one that makes ids of positions: its own code, with another lookup.
        with _Lookup(module, lookup):
            return own(module, *args, **kwargs)

    return forward


class _Lookup(TorchFunctionMode):
    """Inside, rows of the weight of `module` are looked up by `lookup`."""

    def __init__(
        self, module: nn.Embedding, lookup: Callable[[nn.Embedding, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self._module, self._lookup = module, lookup

    def __torch_function__(
        self, func: object, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        given = dict(zip(("input", "weight"), args, strict=False)) | (kwargs or {})
        if func is F.embedding and given.get("weight") is self._module.weight:
            with torch._C.DisableTorchFunction():
                return self._lookup(self._module, given["input"])
        return func(*args, **(kwargs or {}))  # type: ignore[operator]


@contextmanager
def _padding_at(
    module: nn.Embedding, padding: int | None, start: int, count: int
) -> Iterator[None]:
    """Inside, the row without a gradient is counted from this rank's first row."""
    is_here = padding is not None and 0 <= padding - start < count
    module.padding_idx = padding - start if padding is not None and is_here else None
    try:
        yield
    finally:
        module.padding_idx = padding


def _replace_forward(module: nn.Module, forward: Callable[..., object]) -> None:
    """Replace the forward of this module; bound, so that a copy uses the copy's parameters."""
    vars(module)["forward"] = MethodType(forward, module)


def _run_within(
    module: nn.Module, context: Callable[[nn.Module], AbstractContextManager[None]]
) -> None:
    """Every forward of `module`, or of a copy of it, runs inside `context(it)`."""

    def run(forward: Callable[..., object], module: nn.Module, *args: Any, **kwargs: Any) -> object:
        with context(module):
            return forward(*args, **kwargs)

    wrap_forward(module, run)


class _Shared:
    """One exchange for all layers that take the same tensor: query, key and value say.

    It remembers the last tensor only, which those layers save for their backward anyway, and
    nothing outside of a `forward`, however that ends: a stage of a pipeline ends the model's early,
    and of a recomputed block only its own runs a second time.
    """

    def __init__(self, exchange: Callable[[Tensor], Tensor]) -> None:
        self._exchange = exchange
        self._depth = 0
        self._last: tuple[Tensor, Tensor, bool] | None = None

    def __call__(self, taken: Tensor) -> Tensor:
        is_grad = torch.is_grad_enabled()
        if self._last is not None and self._last[0] is taken and self._last[2] == is_grad:
            return self._last[1]
        made = self._exchange(taken)
        if self._depth:
            self._last = (taken, made, is_grad)
        return made

    @contextmanager
    def forward(self, module: nn.Module) -> Iterator[None]:
        """While the forward of `module` runs, in which the layers lie."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._last = None


def _count_local(module: nn.Module, style: Style, collectives: Collectives, *, path: str) -> None:
    """While the forward of `module` runs, its attributes `style.sizes` say this rank's share."""
    size, shares = collectives.size, style.packs if collectives.size > 1 else 1
    for name in style.sizes:
        value = getattr(module, name, None)
        if type(value) is not int or value * shares % size:
            raise PlanError(
                f"`{path}.{name}` is {value}: it has no equal share for each of {size} ranks",
                where=f"tensor style {path}:{style}",
            )
    _run_within(module, lambda module: _counting(module, style.sizes, shares, size))


@contextmanager
def _counting(module: nn.Module, names: Sequence[str], shares: int, size: int) -> Iterator[None]:
    before = {name: getattr(module, name) for name in names}
    try:
        for name, value in before.items():
            setattr(module, name, value * shares // size)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
