"""Attributes operations and calls of one forward and backward to units."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from profiles.capture.fakes.known_values import KnownValues
from profiles.capture.fakes.mode import KEPT, FakeRunMode
from profiles.capture.frames import model_line
from profiles.capture.module.units import Unit
from profiles.capture.operators.core_cycles import core_cycles
from profiles.capture.operators.kernel_charges import kernel_charge
from profiles.capture.operators.table import (
    attended,
    flop_formulas,
    fusing_of,
    kept_operators,
    launches,
    noted,
    occupied_bytes,
    read_bytes,
)
from profiles.capture.traces.copy_trace import CopyTrace
from profiles.capture.traces.flow_trace import FlowTrace, Trail
from profiles.capture.traces.layer_trace import LayerTrace, Shapes
from profiles.capture.traces.saved_tensors import SavedTensors
from profiles.capture.traces.storages import Storages
from profiles.capture.traces.sum_trace import is_addition
from profiles.model.kernel_cycles import Charge
from profiles.model.profile import GLUE
from profiles.model.source import BACKWARD, ValueRead
from profiles.model.work import FusibleKind
from profiles.torch_compat import (
    Operator,
    differentiates,
    is_leaf_node,
    is_mutable,
    map_tensors,
    next_sequence_number,
    node_notes,
    sequence_number,
    tensors_in,
    tensors_written,
)
from profiles.trace.chains import Chains, kind_of_module
from profiles.trace.scopes import Chain, Scope

_SCOPE = "scope"  # key among the notes of autograd nodes


class TraceMode(FakeRunMode):
    """Watches operations below autograd, calls of units, and what autograd saves.

    A forward operation belongs to the unit that is being called; a backward operation to the unit
    whose forward made its autograd node. Everything else is glue, one `Scope` per stretch.

    Args:
        storages: memory that was there before.
        low_precision: dtype that floating inputs of units are cast to, as FSDP's mixed precision
            does.
        gradient_bytes: of the trainable parameters as built, by their first names.
        placed: where the tensors of a module were put that was split by hand; see `CopyTrace`.
        values, draw: see `FakeRunMode`.
        limit: called after each operation with the bytes that are live; it may raise.
        hooks: note what autograd saves by hooks; else all that is alive after the forward counts as
            saved by the scope that made it (`torch.func.grad` works under no hooks).

    Attributes:
        reads: code that read values of the batch.
    """

    def __init__(
        self,
        storages: Storages,
        *,
        low_precision: torch.dtype | None,
        on_processor: bool,
        gradient_bytes: Mapping[str, int],
        placed: Mapping[int, str],
        values: KnownValues | None = None,
        draw: float = KEPT,
        limit: Callable[[int], None] | None = None,
        hooks: bool = True,
    ) -> None:
        super().__init__(values, draw=draw)
        self.reads: dict[ValueRead, None] = {}
        self._limit = limit
        self._hooks = hooks
        self.storages = storages
        self.flow = FlowTrace(storages)
        self.copies = CopyTrace(storages, placed) if placed else None
        self.scope = Scope(GLUE)
        self._glue_began = next_sequence_number()
        self.scopes = [self.scope]
        self.shared: set[str] = set()
        self.outside_leaves: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._timeline = storages.timeline
        self._timeline.open((self.scope, False))
        self._low_precision = low_precision
        self._on_processor = on_processor
        self._gradient_bytes = gradient_bytes
        self._in_backward = False
        self._callers: list[Scope] = []
        self._chain = self.scope.chain  # of the backward
        self._chains = Chains()
        self._kinds: list[FusibleKind] = []  # of the modules that are being called
        self._layers = LayerTrace(
            storages,
            lambda: None if self._in_backward else self.scope,
            lambda node: _SCOPE in node_notes(node),
        )
        self._formulas = flop_formulas()
        self._kept_operators = frozenset(kept_operators())

        self._saved = SavedTensors(self._save)

    # Calls of units

    def watch(self, model: nn.Module, units: Sequence[Unit], layers: Mapping[str, Shapes]) -> None:
        """Hook the modules. Their attributes are copies that go, so the hooks go too."""
        model.register_forward_pre_hook(self._lower, with_kwargs=True)
        for unit in units:
            unit.module.register_forward_pre_hook(self._before(unit), with_kwargs=True)
            # Also after one that raises: a model may catch that and go on.
            unit.module.register_forward_hook(self._after, with_kwargs=True, always_call=True)
            self._layers.watch(unit, layers[unit.name])
        for module in model.modules():
            kind = kind_of_module(type(module).__name__)
            if kind is not None:
                module.register_forward_pre_hook(self._inside(kind))
                module.register_forward_hook(self._outside, always_call=True, prepend=True)

    def _inside(self, kind: FusibleKind) -> Callable[..., None]:
        # No partial: `profiles.capture.module.state` knows the hooks of this package by their
        # module.
        def inside(*_: object) -> None:
            if not self._in_backward:
                self._kinds.append(kind)
                self._begin_chain()

        return inside

    def _outside(self, *_: object) -> None:
        if not self._in_backward:
            self._kinds.pop()
            self._begin_chain()

    def _begin_chain(self) -> None:
        self.scope.begin_chain(next_sequence_number(), self._kinds[-1] if self._kinds else None)

    def enter(self, scope: Scope, inputs: object) -> None:
        """Begin a call with these inputs."""
        self._share(tensors_in(inputs))
        self._mark(inputs)
        self._chains.hand_on(map(self.storages.memory_of, tensors_in(inputs)))
        is_outermost = not self._callers
        if is_outermost:
            if next_sequence_number() > self._glue_began:
                self.scope.before = scope.name
            self._timeline.close((self.scope, False))
            self.scope.call = scope.call = self.flow.begin(scope.name, inputs)
        else:
            scope.call = self.scope.call
            self.flow.begin_inside(scope.name)
        scope.is_block = scope.is_block or self.scope.is_block
        self._callers.append(self.scope)
        self._go_to(scope)
        scope.input_bytes = self.storages.take(
            inputs, scope, is_recomputed=scope.is_block and is_outermost
        )

    def leave(self, output: object) -> None:
        """End the call; what follows belongs to the caller, or to a new stretch of glue."""
        self._layers.leave(self.scope, output, is_outermost=len(self._callers) == 1)
        self._mark(output)
        self._chains.hand_on(map(self.storages.memory_of, tensors_in(output)))
        self.scope.output_bytes += sum({id(t): t.nbytes for t in tensors_in(output)}.values())
        self._timeline.close((self.scope, False))
        caller = self._callers.pop()
        if self._callers:
            self.scope = caller
            self._begin_chain()
        else:
            self.flow.end(output)
            self._go_to(Scope(GLUE))
            self._glue_began = next_sequence_number()

    def note_taken(self) -> None:
        """The forward is over, and its loss took what it needs."""
        self._layers.note_taken(self.flow.taken)

    def stand_for(self, scope: Scope, trail: Trail) -> None:
        """The call that is going on does what an earlier one did."""
        self.scope.stands_for = scope
        assert self.flow.current is not None
        self.flow.current.uses_parameters = trail.uses_parameters

    @property
    def in_backward(self) -> bool:
        """True during backward: calls of units are recomputation then."""
        return self._in_backward

    @property
    def is_saving(self) -> bool:
        """True while saved tensors are noted here, and not handled by a hook of the model's own
        (checkpoints, offloading)."""
        return self._saved.is_noting

    def as_float32(self, output: object) -> object:
        """A model's output as the loss gets it: in float32 again if inputs were cast."""
        dtype = self._low_precision
        if dtype is None:
            return output
        return map_tensors(lambda t: t.float() if t.dtype == dtype else t, output)

    def _before(self, unit: Unit) -> Callable[..., tuple[Any, dict[str, Any]]]:
        def before(
            module: nn.Module, args: Any, kwargs: dict[str, Any]
        ) -> tuple[Any, dict[str, Any]]:
            args, kwargs = self._lower(module, args, kwargs)
            # In backward a recomputed unit is part of the call whose gradients are being computed.
            if not self._in_backward:
                self.enter(Scope(unit.name, unit.is_block), (args, kwargs))
            return args, kwargs

        return before

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: object) -> None:
        if not self._in_backward:
            self.leave(output)

    def _lower(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        dtype = self._low_precision
        if dtype is None:
            return args, kwargs
        return map_tensors(lambda t: t.to(dtype) if t.dtype == torch.float32 else t, (args, kwargs))

    def _go_to(self, scope: Scope) -> None:
        self.scope = scope
        self.scopes.append(scope)
        self._timeline.open((scope, False))

    # Autograd

    def saving(self) -> AbstractContextManager[object]:
        """A context in which what autograd saves is noted."""
        return self._saved.hooks() if self._hooks else nullcontext()

    def release(self) -> None:
        """Let go of tensors: the run is over, or has failed."""
        self._saved.release()
        self.flow.release()

    def _save(self, tensor: Tensor) -> None:
        if not self._in_backward:
            self.storages.save(tensor, self.scope)

    def begin_backward(self, roots: Sequence[Tensor]) -> None:
        """The forward is over; autograd goes back from `roots`, beginning where they were made."""
        self._mark(roots)
        self._chains.hand_on(map(self.storages.memory_of, roots))
        self._chains.settle_forward(self.storages.is_first_saved_by, self.storages.is_kept)
        self._timeline.close((self.scope, False))
        node = roots[0].grad_fn if roots else None
        self.scope = node_notes(node)[_SCOPE] if node is not None else self.scope
        self._in_backward = True
        self._timeline.open((self.scope, True))

    def end_backward(self) -> None:
        self._timeline.close((self.scope, True))
        self._chains.settle_backward(self.storages.is_alive)

    def _mark(self, tree: object) -> None:
        """Every autograd node behind these tensors that is not marked was made here."""
        pending: list[Node | None] = [tensor.grad_fn for tensor in tensors_in(tree)]
        while pending:
            node = pending.pop()
            if node is None or _SCOPE in node_notes(node):
                continue
            node_notes(node)[_SCOPE] = self.scope
            if is_leaf_node(node):
                self._remember_gradient(cast(Any, node).variable)
                continue
            chain = self.scope.chain_at(sequence_number(node))
            node.register_prehook(functools.partial(self._arrive, self.scope, chain))
            pending.extend(parent for parent, _ in node.next_functions)

    def _remember_gradient(self, leaf: Tensor) -> None:
        """Remember the gradient of a leaf that is no stand-in, to be put back."""
        if not self.storages.is_known(leaf):
            self.outside_leaves[id(leaf)] = (leaf, leaf.grad)

    def sources_of(self, output: Tensor, taken: Sequence[object]) -> tuple[int, ...]:
        """Return the positions of the arguments that an output of a call has a gradient for.

        Asked before the call is left, while the nodes that it made have no mark.
        """
        ends: dict[tuple[object, int], int] = {}
        for position, leaf in enumerate(taken):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                ends[leaf.grad_fn or id(leaf), leaf.output_nr] = position
        positions: set[int] = set()
        seen: set[Node] = set()
        nodes = [output.grad_fn]
        while nodes:
            node = nodes.pop()
            if node is None or node in seen or _SCOPE in node_notes(node):
                continue
            seen.add(node)
            for parent, number in node.next_functions:
                is_leaf = parent is not None and is_leaf_node(parent)
                end = id(cast(Any, parent).variable) if is_leaf else parent
                if (end, number) in ends:
                    positions.add(ends[end, number])
                else:
                    nodes.append(parent)
        return tuple(sorted(positions))

    def _arrive(self, scope: Scope, chain: Chain, gradients: object) -> None:
        # A gradient may also be asked for in the forward: then it is work of whoever asks.
        if self._in_backward and chain is not self._chain:
            # Gradients may also go to a call that another stands for, where nothing runs.
            self._chains.pause(self.storages.is_alive)
        self._chain = chain
        if self._in_backward and scope is not self.scope:
            self._timeline.close((self.scope, True))
            self.scope = scope
            self._timeline.open((scope, True))

    # Operations

    def note(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: object
    ) -> None:
        """Put an operation down to the scope in which it was run."""
        if self._limit is not None:
            self._limit(self._timeline.live_bytes)
        inputs, outputs = _flat((args, tuple(kwargs.values()))), _flat((result,))
        chain = self._chain if self._in_backward else self.scope.chain
        part = chain.part
        makes_storage = self.storages.notice(operator, inputs, outputs, part)
        if not self._in_backward:
            if differentiates():
                self.note_read(BACKWARD)
            for tensor in () if self._hooks else outputs:
                self.storages.save(tensor, self.scope)
            self._layers.operation(inputs, outputs)
            self._share(inputs)
            if self.copies is not None:
                self.copies.operation(operator, inputs, outputs, self.asked)
        if not launches(operator, makes_storage=makes_storage):
            return
        formula = self._formulas.get(operator.overloadpacket)
        flop = formula(*args, **kwargs, out_val=result) if formula is not None else 0
        moved = self._move(operator, chain, inputs, outputs)
        if self._on_processor:
            own = Charge(cycles=core_cycles(operator, args, kwargs, inputs, outputs, moved))
        else:
            own = kernel_charge(operator, args, inputs, outputs)
        self._timeline.pass_by(own.workspace_bytes)
        for doer in (self.scope, part) if part is not None else (self.scope,):
            work = doer.backward if self._in_backward else doer.forward
            work.add(flop=flop, moved_bytes=moved, charge=own)
        call = attended(operator, args, kwargs)
        if call is not None:
            calls = (part or self.scope).attention
            (calls.backward if self._in_backward else calls.forward).append(call)
        known = noted(operator, args, outputs, on_processor=self._on_processor)
        if known is not None:
            here = part or self.scope
            (here.backward if self._in_backward else here.forward).noted.append(known)
        if self._in_backward:
            return
        written = tensors_written(operator, args, kwargs) if is_mutable(operator) else []
        draws = torch.Tag.nondeterministic_seeded in operator.tags
        adds = is_addition(operator, args, kwargs)
        self.flow.operation(inputs, outputs, written, draws=draws, adds=adds)
        for tensor in inputs:
            if part is not None and self.storages.holders_of(tensor):
                name = self.storages.parameter_name(tensor)
                part.parameters[name] = self._gradient_bytes.get(name, 0)
        if self.scope.is_block and operator in self._kept_operators:
            for tensor in outputs:
                self.storages.keep(tensor, self.scope)

    def note_read(self, operation: str) -> None:
        """Note the line of code that reads values, in the scope that is being called."""
        if not self._in_backward:
            read = ValueRead(unit=self.scope.name, line=model_line(), operation=operation)
            self.reads.setdefault(read)

    def _share(self, tensors: Iterable[Tensor]) -> None:
        """Note the parameters among `tensors` that the unit whose code runs does not hold.

        FSDP2 gathers those of a unit for its call: a view made before is a view of a shard.
        """
        for tensor in tensors:
            holders = self.storages.holders_of(tensor)
            if holders and self.scope.name not in holders:
                self.shared |= holders

    def _move(
        self, operator: Operator, chain: Chain, inputs: list[Tensor], outputs: list[Tensor]
    ) -> int:
        """Bytes that a kernel moves, noted in its chain."""
        read, written = read_bytes(operator, inputs, outputs), list(map(occupied_bytes, outputs))
        fusing = fusing_of(operator)
        memory_of = self.storages.memory_of
        self._chains.operation(
            chain,
            fusing,
            [(memory_of(t), n) for t, n in zip(inputs, read, strict=True)],
            [(memory_of(t), n) for t, n in zip(outputs, written, strict=True)],
            is_alive=self.storages.is_alive if self._in_backward else None,
        )
        if not self._in_backward and not fusing.is_fusible:
            self._begin_chain()
        return sum(read) + sum(written)


def _flat(values: Iterable[object]) -> list[Tensor]:
    """Tensors in nested tuples and lists; several times faster than a general tree walk."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, tuple | list):
            tensors.extend(_flat(value))
    return tensors
