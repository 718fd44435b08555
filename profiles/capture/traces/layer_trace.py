"""Weight layers that a unit calls during a forward, and the producers of their inputs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from profiles.capture.fakes.transformers_compat import is_transposed_linear
from profiles.capture.module.units import Unit
from profiles.capture.traces.storages import Storages
from profiles.model.flow import Key
from profiles.model.layers import INPUT, LayerKind
from profiles.torch_compat import (
    has_gradient_hooks,
    is_leaf_node,
    next_sequence_number,
    node_notes,
    tensors_in,
)
from profiles.trace.scopes import Features, LayerCall, LayerSegment, LayerShape, Scope

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_LAYER = "layer"  # key among the notes of autograd nodes: the number of the layer that made it

Shapes = Mapping[str, LayerShape]
"""The layers of a unit, by their paths in it."""


def layer_shapes(unit: Unit, first_names: Mapping[int, str]) -> dict[str, LayerShape]:
    """The weight layers of a unit that features can be cut of.

    Args:
        first_names: of each parameter by its id; what an earlier scope holds counts there.
    """
    shapes = {}
    for path, module in unit.module.named_modules():
        kind = _kind(module)
        if kind is None:
            continue
        sizes = module.get_parameter("weight").shape
        flipped = kind in (LayerKind.EMBEDDING, LayerKind.TRANSPOSED)
        weight, bias = (
            [p] if p is not None and first_names[id(p)] == _name(unit.name, path, name) else []
            for name in ("weight", "bias")
            for p in [module._parameters.get(name)]
        )
        shapes[path] = LayerShape(
            path=path,
            kind=kind,
            inputs=sizes[0] if flipped else sizes[1],
            outputs=sizes[1] if flipped else sizes[0],
            weight_bytes=sum(p.nbytes for p in weight),
            bias_bytes=sum(p.nbytes for p in bias),
            weight_gradient_bytes=sum(p.nbytes for p in weight if p.requires_grad),
            bias_gradient_bytes=sum(p.nbytes for p in bias if p.requires_grad),
        )
    return shapes


def _kind(module: nn.Module) -> LayerKind | None:
    if isinstance(module, torch.jit.ScriptModule) or "forward" in vars(module):
        return None
    own = [p for p in module._parameters.values() if p is not None]
    if module._parameters.get("weight") is None or any(map(has_gradient_hooks, own)):
        return None
    if isinstance(module, nn.Embedding):
        is_plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
        return LayerKind.EMBEDDING if is_plain else None
    if isinstance(module, _CONVOLUTIONS):
        return LayerKind.CONVOLUTION if module.groups == 1 else None
    if isinstance(module, nn.Linear):
        return LayerKind.LINEAR
    return LayerKind.TRANSPOSED if is_transposed_linear(module) else None


def _name(*parts: str) -> str:
    return ".".join(part for part in parts if part)


class LayerTrace:
    """Notes the calls of weight layers in the scope where they happen.

    Args:
        scope: asks for the scope that is being called; None while nothing is to be noted.
        is_outside: whether an autograd node was made before the call that is going on.
    """

    def __init__(
        self,
        storages: Storages,
        scope: Callable[[], Scope | None],
        is_outside: Callable[[Node], bool],
    ) -> None:
        self._storages = storages
        self._place = scope
        self._is_outside = is_outside
        self._features = Features()
        self._reached: dict[Scope, dict[int, set[int]]] = {}  # values, by the number of a layer
        self._inputs: dict[Scope, list[weakref.ref[Tensor] | None]] = {}

    def watch(self, unit: Unit, shapes: Shapes) -> None:
        """Hook the layers of a unit; its own hooks are there already, if it is one itself."""
        for path, shape in shapes.items():
            module = unit.module.get_submodule(path)
            module.register_forward_pre_hook(self._before(unit.name, shape), with_kwargs=True)
            module.register_forward_hook(
                self._after(unit.name, path), with_kwargs=True, always_call=True, prepend=True
            )

    def operation(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """An operation of the forward, views included."""
        number = self._storages.number_of
        self._features.operation(
            ((number(t), t.shape) for t in inputs), [(number(t), t.shape) for t in outputs]
        )

    def leave(self, scope: Scope, output: object, *, is_outermost: bool) -> None:
        """A call is over, its nodes have no mark yet."""
        layers = list(scope.layers.values())
        for value, tensor in enumerate(tensors_in(output) if layers else ()):
            for number in self._sources([tensor]):
                if number == INPUT:
                    continue
                layers[number].reaches_output = True
                if is_outermost:
                    self._reached.setdefault(scope, {}).setdefault(number, set()).add(value)
        self._inputs.pop(scope, None)
        self._features = Features()

    def note_taken(self, taken: Collection[Key]) -> None:
        """The forward is over, and calls took these values: a block may return its attention's
        weights, which no code reads."""
        calls = {call for call, _ in taken}
        for scope, reached in self._reached.items():
            if scope.call not in calls:
                continue
            layers = list(scope.layers.values())
            for number, values in reached.items():
                is_taken = any((scope.call, value) in taken for value in values)
                layers[number].reaches_output = is_taken
        self._reached.clear()

    def _here(self, unit: str) -> Scope | None:
        scope = self._place()
        return scope if scope is not None and scope.name == unit else None

    def _before(self, unit: str, shape: LayerShape) -> Callable[..., None]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            scope = self._here(unit)
            if scope is None:
                return
            given = tensors_in((args, kwargs))[:1]
            layer = scope.layers.get(shape.path)
            if layer is None:
                layer = LayerCall(
                    shape=shape,
                    number=len(scope.layers),
                    own=LayerSegment(scope),
                    after=LayerSegment(scope),
                    same_input=self._same_input(scope, given),
                    sources=self._sources(given),
                    needs_input_gradient=bool(given) and given[0].requires_grad,
                )
                scope.layers[shape.path] = layer
            layer.calls += 1
            layer.input_bytes += sum(tensor.nbytes for tensor in given)
            scope.begin_part(layer.own, next_sequence_number())

        return before

    def _after(self, unit: str, path: str) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, kwargs: Any, output: object) -> None:
            scope = self._here(unit)
            if scope is None or path not in scope.layers:
                return
            layer = scope.layers[path]
            for tensor in tensors_in(output):
                layer.output_bytes += tensor.nbytes
                self._storages.hand_on(tensor, layer.own, layer.after)
                self._features.put(self._storages.number_of(tensor), layer)
                if tensor.grad_fn is not None:
                    node_notes(tensor.grad_fn)[_LAYER] = layer.number
            scope.begin_part(layer.after, next_sequence_number())

        return after

    def _same_input(self, scope: Scope, given: Sequence[Tensor]) -> int:
        """The first layer that was given the very tensor that this one is."""
        before = self._inputs.setdefault(scope, [])
        mine = given[0] if given else None
        known = enumerate(before)
        number = next((n for n, ref in known if ref is not None and ref() is mine), len(before))
        before.append(weakref.ref(mine) if mine is not None else None)
        return number

    def _sources(self, tensors: Iterable[Tensor]) -> tuple[int, ...]:
        """Numbers of the layers that gradients of these go back to first; `INPUT` for others."""
        return tuple(sorted(set(self._walk(tensors))))

    def _walk(self, tensors: Iterable[Tensor]) -> Iterator[int]:
        seen: set[Node] = set()
        left = [tensor.grad_fn for tensor in tensors]
        if any(t.grad_fn is None and t.requires_grad for t in tensors):
            yield INPUT
        while left:
            node = left.pop()
            if node is None or node in seen or is_leaf_node(node):
                continue
            seen.add(node)
            if self._is_outside(node):
                yield INPUT
            elif _LAYER in node_notes(node):
                yield node_notes(node)[_LAYER]
            else:
                left += [parent for parent, _ in node.next_functions]
