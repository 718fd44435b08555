"""Scopes of a trace: the calls of units and layers that work is attributed to."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from profiles.model.kernel_cycles import Charge
from profiles.model.layers import LayerKind
from profiles.model.work import FusibleKind

ALONE = Charge()
LOOPED = 0.2
"""Host time of an operation that a loop in C++ launches, over one that Python does: 0.16 to 0.21 in
the forward of a GRU and an RNN, 0.24 to 0.27 in the backward, on idle cores (`python -m
tests.benchmarks.recurrent`)."""
CAST = 0.45
"""Host time of a cast, over that of an operation with its module and its backward: 14 to 20 us
beside 41 to 45 in layers of a small model under autocast (H200, torch 2.11; `make gpu`, part b,
host work)."""


class Grouped(NamedTuple):
    """A product of `rows` by the weights of their experts, (k, n) each, in one kernel."""

    rows: int
    experts: int
    n: int
    k: int
    element_bytes: int
    needs_input_gradient: bool = True


class Normed(NamedTuple):
    """A batch norm of `rows` elements in training: a block of threads for each channel, or, of
    maps in channels last (`is_by_rows`), many for all of them."""

    rows: int
    channels: int
    element_bytes: int
    is_by_rows: bool = False


class Scored(NamedTuple):
    """Products of activations by activations, of (height, k) by (k, n) each; `rows` of all."""

    rows: int
    height: int
    n: int
    k: int
    element_bytes: int
    needs_input_gradient: bool = True


class Convolved(NamedTuple):
    """A convolution by groups of channels: `rows` positions, n outputs and k products of each;
    `maps_per_row`: elements of both maps."""

    rows: int
    groups: int
    n: int
    k: int
    maps_per_row: float
    element_bytes: int
    needs_input_gradient: bool = True


Noted = Grouped | Normed | Scored | Convolved
"""Work whose time follows from sizes, in the trace's counts."""


@dataclass(slots=True)
class Work:
    """Work of a scope or segment: see `UnitCost`. `noted` is of what lies outside segments.

    `turned_bytes`, `turned_cycles`: of `moved_bytes` and `cycles`, those of maps that are laid out
    anew around convolutions, which matrix units need. `casts`: of `kernels`, those that change a
    dtype on accelerators.
    """

    flop: int = 0
    moved_bytes: int = 0
    cycles: int = 0
    kernels: int = 0
    turned_bytes: int = 0
    turned_cycles: int = 0
    casts: int = 0
    noted: list[Noted] = field(default_factory=list)

    def add(self, *, flop: int, moved_bytes: int, charge: Charge = ALONE) -> None:
        """Add one operation, with its charge beside its operands."""
        self.flop += flop
        self.moved_bytes += moved_bytes + charge.moved_bytes + charge.turned_bytes
        self.cycles += charge.cycles
        self.kernels += charge.kernels
        self.turned_bytes += charge.turned_bytes
        self.turned_cycles += charge.turned_cycles
        self.casts += charge.casts


class Attended(NamedTuple):
    """A call of fused attention over `rows` samples: see `AttentionCall`."""

    rows: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    width: int
    value_width: int
    is_causal: bool
    element_bytes: int
    dropout: bool = False


@dataclass(slots=True)
class AttentionCalls:
    """Calls of attention in the order of the forward; `backward`: those that gradients passed."""

    forward: list[Attended] = field(default_factory=list)
    backward: list[Attended] = field(default_factory=list)

    def trained(self) -> tuple[Attended, ...]:
        """Calls with a forward and a backward, which does not say whether scores were dropped."""
        left = Counter(call._replace(dropout=False) for call in self.backward)
        calls = []
        for call in self.forward:
            plain = call._replace(dropout=False)
            if left[plain]:
                left[plain] -= 1
                calls.append(call)
        return tuple(calls)


class Saving(NamedTuple):
    """Savings of one fused kernel at one batch size; the fields of `Fusible`."""

    forward_moved_bytes: int = 0
    backward_moved_bytes: int = 0
    forward_kernels: int = 0
    backward_kernels: int = 0
    activation_bytes: int = 0
    transient_bytes: int = 0
    forward_cycles: int = 0
    backward_cycles: int = 0

    def plus(self, other: Saving) -> Saving:
        return Saving(*(a + b for a, b in zip(self, other, strict=True)))


Savings = dict[FusibleKind, Saving]


@dataclass(slots=True, eq=False)
class ChainTraffic:
    """Traffic of the operations of a chain in one direction; memory is known by its number.

    Attributes:
        read: bytes of memory that other code made.
        written: bytes of it that were overwritten.
        made: bytes of memory that these operations made, and by `sources` of what.
        drawn: memory that random numbers were written to, which cannot be made again.
        readers: who reads what was made, besides these operations; None is no chain.
        handed_on: what was made and lives on beyond these operations.
    """

    chain: Chain
    kernels: int = 0
    moved_bytes: int = 0
    read: dict[int, int] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)
    made: dict[int, int] = field(default_factory=dict)
    sources: dict[int, set[int]] = field(default_factory=dict)
    drawn: set[int] = field(default_factory=set)
    readers: dict[int, set[ChainTraffic | None]] = field(default_factory=dict)
    handed_on: set[int] = field(default_factory=set)


class Chain:
    """Operations that may be one kernel.

    Attributes:
        part: of the scope, that runs them; None before its first layer.
        kind: of all operations within a module; None where each operation says.
        hints: kinds of characteristic operations.
        unmade: memory that one kernel never makes.
    """

    __slots__ = (
        "backward",
        "forward",
        "hints",
        "ingredients",
        "is_scores",
        "kind",
        "part",
        "remade",
        "saving",
        "scope",
        "unmade",
    )  # fmt: skip

    def __init__(self, scope: Scope, part: LayerSegment | None, kind: FusibleKind | None) -> None:
        self.scope, self.part, self.kind = scope, part, kind
        self.forward, self.backward = ChainTraffic(self), ChainTraffic(self)
        self.hints: set[FusibleKind] = set()
        self.is_scores = False  # softmax of scores: attention written out
        self.saving = Saving()
        self.unmade: set[int] = set()
        self.remade: set[int] = set()  # memory that is made again in the backward
        self.ingredients: dict[int, int] = {}  # bytes of what that is made of, by memory

    def named(self, *, is_loss: bool) -> FusibleKind | None:
        """Its kind; None for what belongs to attention."""
        if is_loss:
            return FusibleKind.LOSS
        if self.kind is not None or self.is_scores:
            return self.kind
        order = (FusibleKind.ROUTER, FusibleKind.GATE, FusibleKind.ROTARY)
        return next((kind for kind in order if kind in self.hints), FusibleKind.RESIDUAL)


@dataclass(slots=True, eq=False)
class Scope:
    """One call of a unit, or a stretch of code between two calls.

    Attributes:
        is_block: true inside a block, also for units that it calls.
        call: number of the outermost call in the flow; of a stretch between calls, of the next one.
        before: of a stretch between calls that gradients go back through, the unit called next.
        stands_for: an equal call that ran in full; what was run here is what was run there.
        looped_kernels: of the forward, launched by a loop in C++.
        layers: those that were called here, by their paths in the unit.
        part: what runs now in the forward; None before the first layer.
        attention: calls of it outside the parts.
        chains: of elementwise operations, in the order of the forward.
    """

    name: str
    is_block: bool = False
    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)
    input_bytes: int = 0
    output_bytes: int = 0
    call: int | None = None
    before: str = ""
    stands_for: Scope | None = None
    looped_kernels: int = 0
    layers: dict[str, LayerCall] = field(default_factory=dict)
    part: LayerSegment | None = None
    attention: AttentionCalls = field(default_factory=AttentionCalls)
    chains: list[Chain] = field(default_factory=list)
    _starts: list[float] = field(default_factory=lambda: [-1])

    @property
    def launches(self) -> tuple[int, int]:
        """Operations of the forward and of the backward, by what they take of the host."""
        kernels = self.forward.kernels
        share = 1 - (1 - LOOPED) * self.looped_kernels / kernels if kernels else 1.0
        forward, backward = (
            work.kernels - (1 - CAST) * work.casts for work in (self.forward, self.backward)
        )
        return round(share * forward), round(share * backward)

    def __post_init__(self) -> None:
        self.chains.append(Chain(self, None, None))

    @property
    def chain(self) -> Chain:
        """The chain that runs now in the forward."""
        return self.chains[-1]

    def begin_part(self, part: LayerSegment, sequence: float) -> None:
        """From now on this part runs; autograd's nodes are numbered from `sequence` on."""
        self.part = part
        self.begin_chain(sequence, self.chain.kind)

    def begin_chain(self, sequence: float, kind: FusibleKind | None) -> None:
        """A new chain of operations begins, in the part that runs."""
        self.chains.append(Chain(self, self.part, kind))
        self._starts.append(sequence)

    def chain_at(self, sequence: float) -> Chain:
        """The chain whose forward made the autograd node of this number."""
        return self.chains[bisect.bisect_right(self._starts, sequence) - 1]


@dataclass(slots=True, eq=False)
class LayerSegment:
    """A layer's own code, or what follows it up to the next layer: see `profiles.model.layers`.

    `parameters`: gradient bytes of those that it uses, by what they are known by.
    """

    scope: Scope
    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)
    parameters: dict[Hashable, int] = field(default_factory=dict)
    attention: AttentionCalls = field(default_factory=AttentionCalls)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of a weight layer before it is called: see `LayerCost`."""

    path: str
    kind: LayerKind
    inputs: int
    outputs: int
    weight_bytes: int
    bias_bytes: int
    weight_gradient_bytes: int
    bias_gradient_bytes: int


@dataclass(slots=True, eq=False)
class LayerCall:
    """A weight layer that was called in a scope: see `LayerCost`. `number`: its position there."""

    shape: LayerShape
    number: int
    own: LayerSegment
    after: LayerSegment
    same_input: int
    sources: tuple[int, ...]
    needs_input_gradient: bool
    reaches_output: bool = False
    calls: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    pieces: list[int] = field(default_factory=list)
    heads: int = 1
    some_heads: list[int] = field(default_factory=list)

    @property
    def parts(self) -> tuple[tuple[int, ...], int]:
        """`LayerCost.pieces` and the heads of each, or of the first of unequal ones."""
        whole = self.shape.outputs
        if self.some_heads and not self.pieces:
            each = whole // self.heads
            rest = self.heads - sum(self.some_heads)
            counts = [*self.some_heads, rest] if rest > 0 else self.some_heads
            if sum(counts) == self.heads:
                return tuple(count * each for count in counts), counts[0]
        is_whole = sum(self.pieces) == whole and len(self.pieces) > 1
        return tuple(self.pieces) if is_whole else (), self.heads

    def note_view(self, before: Sequence[int], after: Sequence[int]) -> None:
        """Its outputs, of shape `before`, are seen in another shape."""
        width, whole = before[-1], self.shape.outputs
        if self._takes_heads(before, after):
            self.some_heads.append(after[-2])
            return
        if width == whole and before[:-1] == after[:-1] and after[-1]:  # none is no piece
            self.pieces.append(after[-1])
        if width != whole and width not in self.pieces:
            return
        inner: list[int] = []
        for size in reversed(after):
            inner.insert(0, size)
            if math.prod(inner) >= width:
                break
        if self.heads > 1 or math.prod(inner) != width or len(inner) < 2:
            return
        # (tensors, heads, features): two or three lie side by side, heads are more
        if len(inner) == 3 and inner[0] in _FUSED and not self.pieces:
            self.pieces = [width // inner[0]] * inner[0]
            inner.pop(0)
        self.heads = inner[0]

    def _takes_heads(self, before: Sequence[int], after: Sequence[int]) -> bool:
        """True if some of the heads are taken: queries out of a fused query, key and value, say."""
        if self.heads < 2 or len(before) < 2 or tuple(before[-2:]) != self._of_heads:
            return False
        same = before[:-2] == after[:-2] and before[-1] == after[-1]
        return same and len(after) == len(before) and 0 < after[-2] < self.heads

    @property
    def _of_heads(self) -> tuple[int, int]:
        return self.heads, self.shape.outputs // self.heads


def trained_products(forward: Work, backward: Work) -> tuple[Noted, ...]:
    """Products of experts and of activations in the forward; factors without a gradient leave one
    product back of each. Norms and convolutions that gradients passed, after them."""
    products: list[Noted] = []
    for kind in (Grouped, Scored):
        there = [each for each in forward.noted if isinstance(each, kind)]
        back = sum(isinstance(each, kind) for each in backward.noted)
        if back or kind is Grouped:
            both = back >= 2 * len(there)
            products += [each._replace(needs_input_gradient=both) for each in there]
    passed = Counter(backward.noted)
    for each in forward.noted:
        if isinstance(each, Normed) and passed[each]:
            products.append(each)
        elif isinstance(each, Convolved):
            alone = each._replace(needs_input_gradient=False)
            products += [kind for kind in (each, alone) if passed[kind]][:1]
    return tuple(products)


_FUSED = (2, 3)


class Features:
    """In which memory the outputs of layers lie, and how later code sees their features.

    Memory is known by its number. What has the shape of a layer's outputs and is made of them
    (scaled, normed) stands for them.
    """

    def __init__(self) -> None:
        self._layers: dict[int, LayerCall] = {}

    def put(self, number: int | None, layer: LayerCall) -> None:
        """The layer's outputs are in this memory."""
        if number is not None:
            self._layers[number] = layer

    def operation(
        self,
        inputs: Iterable[tuple[int | None, Sequence[int]]],
        outputs: Sequence[tuple[int | None, Sequence[int]]],
    ) -> None:
        """An operation of the forward: memories and shapes of what it takes and gives."""
        for number, shape in inputs:
            layer = self._layers.get(number) if number is not None else None
            if layer is None or not shape:
                continue
            for other, seen in outputs:
                if tuple(seen) == tuple(shape):
                    if other is not None:
                        self._layers.setdefault(other, layer)
                elif other == number:
                    layer.note_view(shape, seen)
