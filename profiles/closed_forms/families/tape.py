"""One forward and backward on arrays without values: torch's autograd in small.

It does what `dispatch_modes` and `storages` of `profiles.capture.traces` watch torch do: operations
read, write and launch, nodes save what their backward needs, gradients flow in
autograd's order, memory is released when the last reference goes.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from profiles.closed_forms.families.fusing import FUSIBLE
from profiles.closed_forms.families.layouts import Shape, contiguous, fits
from profiles.closed_forms.families.memory import DType, Made, Storage
from profiles.model.kernel_cycles import COPY, NOTHING, POINTWISE, Charge, Operand, charge
from profiles.model.profile import GLUE, Numerics
from profiles.model.work import FusibleKind
from profiles.trace.chains import Chains, Fusing, kind_of_module
from profiles.trace.scopes import Attended, Chain, Features, Noted, Scope
from profiles.trace.timeline import Timeline


class Array:
    """A shape and strides over a storage; `node` is what made it, None outside the graph.

    `index` says which of the node's outputs it is.
    """

    __slots__ = ("__weakref__", "dtype", "index", "node", "shape", "storage", "strides", "tape")

    def __init__(
        self, tape: Tape, shape: Shape, strides: Shape, dtype: DType, storage: Storage
    ) -> None:
        self.tape = tape
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.storage = storage
        self.node: Node | None = None
        self.index = 0

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.size_bytes

    @property
    def occupied_bytes(self) -> int:
        """Memory behind the elements; an expanded array occupies what it was expanded from."""
        return min(self.size_bytes, self.storage.made.size_bytes)

    @property
    def needs_gradient(self) -> bool:
        return self.node is not None

    @property
    def is_contiguous(self) -> bool:
        return fits(self.shape, self.strides, contiguous(self.shape))

    def detached(self) -> Array:
        """The same memory outside the graph."""
        return Array(self.tape, self.shape, self.strides, self.dtype, self.storage)


Gradient = Array | None
Backward = Callable[..., Sequence[Gradient]]
"""Gradients of a node's outputs to gradients of its inputs."""


@dataclass(slots=True, eq=False)
class Node:
    """An operation of the forward that gradients pass, or a parameter where they end.

    Attributes:
        sequence: of two nodes whose gradients are complete the later goes first.
        backward: None for a parameter.
        parents: for each input the node and output it came from.
        outputs: shape and dtype that gradients have to have.
        gradients: what has arrived, by output.
        waiting: how many gradients are yet to come.
        chain: that made it; None for a parameter.
        layer: number of the layer whose output this is.
    """

    sequence: float
    scope: Scope
    backward: Backward | None
    parents: list[tuple[Node, int] | None]
    outputs: list[tuple[Shape, DType]]
    gradients: list[Gradient] = field(default_factory=list)
    waiting: int = 0
    chain: Chain | None = None
    layer: int | None = None


class Tape:
    """Records a run by scopes: see `profiles.capture.traces.dispatch_modes.TraceMode`.

    `on_processor`: kernels are those for processors, else for accelerators, see
    `profiles.capture.operators.accelerators`.
    """

    def __init__(self, numerics: Numerics, *, on_processor: bool = True) -> None:
        self.numerics = numerics
        self.on_processor = on_processor
        self.timeline = Timeline()
        self.scope = Scope(GLUE)
        self._nodes_before = 0  # of the autograd graph, when the scope began
        self.scopes = [self.scope]
        self.shared: set[str] = set()
        self.features = Features()  # of the unit that is being called
        self._chain = self.scope.chain  # of the backward
        self._chains = Chains()
        self._kinds: list[FusibleKind] = []  # of the modules that are being called
        self._is_chain_over = False
        self.made: list[Made] = []
        self._gradient_bytes: dict[Made, int] = {}  # of trainable parameters
        self._in_backward, self._nodes = False, 0
        self._known = itertools.count(-1, -1)
        self._casts: dict[Node, Array] = {}
        self.timeline.open((self.scope, False))

    # Memory

    def empty(self, shape: Shape, dtype: DType, strides: Shape | None = None) -> Array:
        """Memory for an array."""
        size_bytes = math.prod(shape) * dtype.size_bytes
        number = self.timeline.make(size_bytes)
        made = Made(number, size_bytes, number, part=self._doing.part)
        self.made.append(made)
        storage = Storage(made, self.timeline)
        return Array(self, shape, strides or contiguous(shape), dtype, storage)

    def known(
        self, shape: Shape, dtype: DType, *, holders: Iterable[str] = (), trainable: bool = False
    ) -> Array:
        """An array that is there before the run: a parameter, a buffer, the batch."""
        size_bytes = math.prod(shape) * dtype.size_bytes
        made = Made(None, size_bytes, next(self._known), holders=frozenset(holders))
        array = Array(self, shape, contiguous(shape), dtype, Storage(made, self.timeline))
        if trainable:
            self._gradient_bytes[made] = array.elements * DType.FLOAT32.size_bytes  # as built
            array.node = Node(float("inf"), self.scope, None, [], [(shape, dtype)])
        return array

    def save(self, array: Array) -> Array:
        """Save an array for backward; outside blocks recompute saves it too."""
        made = array.storage.made
        if made.number is not None and not self._in_backward:
            made.saved_by = made.saved_by or self.scope
            if not self.scope.is_block:
                made.kept_by = made.kept_by or self.scope
        return array.detached()

    @property
    def _doing(self) -> Chain:
        return self._chain if self._in_backward else self.scope.chain

    def _is_alive(self, memory: int) -> bool:
        return memory < 0 or self.made[memory].is_alive

    def _is_kept(self, memory: int) -> bool:
        return self._is_alive(memory) and (memory < 0 or self.made[memory].saved_by is not None)

    def _is_saved(self, memory: int, scope: Scope) -> bool:
        return self.made[memory].is_alive and self.made[memory].saved_by is scope

    # Operations

    def run(
        self,
        inputs: Sequence[Array],
        shape: Shape,
        dtype: DType,
        strides: Shape | None = None,
        **options: Any,
    ) -> Array:
        """One kernel with one output, outside the graph; `options` as of `launch`."""
        out = self.empty(shape, dtype, strides)
        self.launch(inputs, [out], **options)
        return out

    def launch(
        self,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        *,
        flop: int = 0,
        gathers: bool = False,
        is_kept: bool = False,
        kernel: str = "",
        extra: Charge = NOTHING,
        fusing: Fusing = FUSIBLE,
    ) -> None:
        """One kernel: reads its inputs and writes its outputs.

        Args:
            flop: of a product, which is a kernel of its own.
            gathers: of the first input only the rows that are asked for are read.
            is_kept: an operation whose outputs selective recompute keeps.
            kernel: that accelerators charge for, see `profiles.model.kernel_cycles`; `extra`: of
                a convolution.
        """
        self._go_on()
        read = [array.occupied_bytes for array in inputs]
        written = [array.occupied_bytes for array in outputs]
        if gathers:
            read[0] = min(read[0], sum(written))
        own = self._charge(kernel, inputs, outputs).plus(extra)
        self.timeline.pass_by(own.workspace_bytes)
        moved = sum(read) + sum(written)
        chain = self._doing
        part = chain.part
        fusing = fusing._replace(is_fusible=fusing.is_fusible and not flop)
        self._chains.operation(
            chain,
            fusing,
            [(array.storage.made.memory, n) for array, n in zip(inputs, read, strict=True)],
            [(array.storage.made.memory, n) for array, n in zip(outputs, written, strict=True)],
            is_alive=self._is_alive if self._in_backward else None,
        )
        self._is_chain_over = not fusing.is_fusible and not self._in_backward
        for doer in (self.scope, part) if part is not None else (self.scope,):
            work = doer.backward if self._in_backward else doer.forward
            work.add(flop=flop, moved_bytes=moved, charge=own)
        if self._in_backward:
            return
        for array in inputs:
            made, holders = array.storage.made, array.storage.made.holders
            if part is not None and made in self._gradient_bytes:
                part.parameters[made] = self._gradient_bytes[made]
            if holders and self.scope.name not in holders:
                self.shared |= holders
        if is_kept and self.scope.is_block:
            for array in outputs:
                array.storage.made.kept_by = array.storage.made.kept_by or self.scope

    def _charge(self, kernel: str, inputs: Sequence[Array], outputs: Sequence[Array]) -> Charge:
        if self.on_processor or not kernel:
            return Charge()
        pair = (
            [Operand(x.shape, x.strides, x.dtype.value) for x in xs] for xs in (inputs, outputs)
        )
        return charge(kernel, *pair)

    def attended(self, call: Attended) -> None:
        """The kernel that was launched is fused attention, forward or backward."""
        calls = (self._doing.part or self.scope).attention
        (calls.backward if self._in_backward else calls.forward).append(call)

    def noted(self, work: Noted) -> None:
        """The kernel that was launched is such work, or a gradient of it."""
        here = self._doing.part or self.scope
        (here.backward if self._in_backward else here.forward).noted.append(work)

    def record(self, outputs: Sequence[Array], inputs: Sequence[Array], backward: Backward) -> None:
        """Put an operation into the graph, if a gradient can pass it."""
        chain = self.scope.chain
        self._go_on()
        if self._in_backward or all(array.node is None for array in inputs):
            return
        self._nodes += 1
        node = Node(
            self._nodes,
            self.scope,
            backward,
            [(array.node, array.index) if array.node else None for array in inputs],
            [(array.shape, array.dtype) for array in outputs],
            chain=chain,
        )
        self.features.operation(
            ((x.storage.made.number, x.shape) for x in inputs),
            [(x.storage.made.number, x.shape) for x in outputs],
        )
        for index, array in enumerate(outputs):
            array.node, array.index = node, index

    def lowered(self, array: Array, cast: Callable[[Array, DType], Array]) -> Array:
        """`array` as autocast gives it to a matrix product; parameters are cast once."""
        if self.numerics is not Numerics.BF16_AUTOCAST or array.dtype is not DType.FLOAT32:
            return array
        node = array.node
        if node is None or node.backward is not None:
            return cast(array, DType.BFLOAT16)
        if node not in self._casts:
            self._casts[node] = cast(array, DType.BFLOAT16)
        return self._casts[node]

    # Calls

    def enter(self, name: str, inputs: Sequence[Array], *, is_block: bool) -> None:
        """A unit is called with these inputs."""
        self._hand_on(inputs)
        if self._nodes > self._nodes_before:
            self.scope.before = name
        self.timeline.close((self.scope, False))
        self._go_to(Scope(name, is_block))
        self.scope.input_bytes = self._take(inputs)

    def leave(self, outputs: Sequence[Array]) -> None:
        """The unit returns."""
        self._hand_on(outputs)
        self.scope.output_bytes += sum({id(a): a.size_bytes for a in outputs}.values())
        self.timeline.close((self.scope, False))
        self._go_to(Scope(GLUE))
        self._nodes_before = self._nodes

    @contextmanager
    def module(self, name: str) -> Iterator[None]:
        """Attribute operations within to a module of this class: a norm is a chain of its own."""
        kind = kind_of_module(name)
        if kind is None:
            yield
            return
        self._kinds.append(kind)
        self._begin_chain()
        yield
        self._kinds.pop()
        self._begin_chain()

    def _begin_chain(self) -> None:
        self._is_chain_over = False
        self.scope.begin_chain(0, self._kinds[-1] if self._kinds else None)

    def _go_on(self) -> None:
        """The node of a kernel that is no part of a chain goes with the chain before it."""
        if self._is_chain_over:
            self._begin_chain()

    def _hand_on(self, arrays: Iterable[Array]) -> None:
        self._chains.hand_on(array.storage.made.memory for array in arrays)

    def _go_to(self, scope: Scope) -> None:
        self.scope = scope
        self.features = Features()
        self.scopes.append(scope)
        self.timeline.open((scope, False))

    def _take(self, inputs: Sequence[Array]) -> int:
        """Bytes of a call's inputs; what several blocks take is counted in the first."""
        total = 0
        for array in {id(array.storage): array for array in inputs}.values():
            made = array.storage.made
            if made.number is None:
                total += array.size_bytes * (array.dtype.is_floating and not made.holders)
            elif not (self.scope.is_block and made.is_taken):
                total += made.size_bytes
            if made.number is not None and self.scope.is_block:
                made.is_taken = True
                made.kept_by = made.kept_by or self.scope
        return total

    # Backward

    def backward(self, root: Array, adapt: Callable[[Array, Shape, DType], Array]) -> None:
        """Gradients of the scalar `root`, down to the parameters.

        `adapt` brings a gradient to the shape and dtype of what it belongs to.
        """
        assert root.node is not None
        self._hand_on([root])
        self._chains.settle_forward(self._is_saved, self._is_kept)
        self.timeline.close((self.scope, False))
        self.scope = root.node.scope
        self._is_chain_over, self._in_backward = False, True
        self.timeline.open((self.scope, True))
        one = self.run([], (), root.dtype)
        node = root.node
        _prepare(node)
        node.gradients[root.index] = one
        del root
        ready = [(-node.sequence, node)]
        while ready:
            node = heapq.heappop(ready)[1]
            self._run(node, ready, adapt)
        self.timeline.close((self.scope, True))
        self._chains.settle_backward(self._is_alive)

    def _run(
        self,
        node: Node,
        ready: list[tuple[float, Node]],
        adapt: Callable[[Array, Shape, DType], Array],
    ) -> None:
        assert node.backward is not None
        assert node.chain is not None
        if node.chain is not self._chain:
            self._chains.pause(self._is_alive)
        self._chain = node.chain
        if node.scope is not self.scope:
            self.timeline.close((self.scope, True))
            self.scope = node.scope
            self.timeline.open((self.scope, True))
        arrived, node.gradients = node.gradients, []
        gradients = list(node.backward(*arrived))
        for index, (gradient, parent) in enumerate(zip(gradients, node.parents, strict=True)):
            if gradient is not None and parent is not None:
                gradients[index] = adapt(gradient, *parent[0].outputs[parent[1]])
        gradient = None
        arrived.clear()
        node.backward = None  # what it saved goes
        twice = {id(g) for g in gradients if gradients.count(g) > 1}
        for index, parent in enumerate(node.parents):
            if parent is None:
                continue
            (target, output), gradient = parent, gradients[index]
            gradients[index] = None
            if gradient is not None and target.backward is None and id(gradient) in twice:
                # A parameter's gradient is its own: what another node holds is copied.
                gradient = self.run([gradient], gradient.shape, gradient.dtype, kernel=COPY)
            if gradient is not None:
                self._add(target, output, gradient)
            gradient = None
            target.waiting -= 1
            if not target.waiting and target.backward is not None:
                heapq.heappush(ready, (-target.sequence, target))
        node.parents = []

    def _add(self, node: Node, output: int, gradient: Array) -> None:
        before = node.gradients[output]
        if before is not None:
            pair, strides = [before, gradient], before.strides
            gradient = self.run(pair, before.shape, before.dtype, strides, kernel=POINTWISE)
        node.gradients[output] = gradient


def _prepare(root: Node) -> None:
    """Make room for gradients and count those to come, in every node behind `root`."""
    root.gradients = [None] * len(root.outputs)
    seen, pending = {root}, [root]
    while pending:
        for parent in pending.pop().parents:
            if parent is None:
                continue
            node = parent[0]
            if node not in seen:
                seen.add(node)
                pending.append(node)
                node.gradients = [None] * len(node.outputs)
            node.waiting += 1
