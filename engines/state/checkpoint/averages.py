"""Tensors of registered objects that lie as the model's parameters do, as moving averages of them.

A rank has the part of them that it has of the parameter. They are saved as parameters are, whole
and once, so that any plan can load them; what else an object has is each rank's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engines.state.checkpoint.agreement import Peers
from engines.state.checkpoint.load import SavedStates
from engines.state.checkpoint.objects import Stateful
from engines.state.layout import Layout
from engines.state.shard_spec import PlacedTensor, placed
from profiles.errors import FileError

OBJECT, INSIDE = "object.", "\x1f"
"""A name in a checkpoint: the object, and the keys on the way to the tensor, one inside another."""
State = dict[str, Any]
Path = tuple[str, ...]


class Averages:
    """Finds, in states of registered objects, tensors under names of the model's parameters.

    A name may follow others, as in "module.blocks.0.weight" of a wrapper.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._layout = layout

    def take_from(
        self,
        states: Mapping[str, State],
        *,
        peers: Peers,
        checksums: Callable[[list[Tensor]], list[int]],
    ) -> tuple[dict[str, State], dict[str, PlacedTensor]]:
        """The states without such tensors, and the tensors by their names in a checkpoint.

        Those of which ranks that have the same part have different values are no averages, and
        stay where they were. All `peers` call it.
        """
        tensors = {
            _name(path): (path, name, value)
            for title, state in states.items()
            for path, name, value in self._of((title,), state)
        }
        placed_ = {key: self._layout.placed(n, value) for key, (_, n, value) in tensors.items()}
        chunks = [(key, chunk) for key, each in placed_.items() for chunk in each.chunks]
        sums = checksums([chunk.part for _, chunk in chunks])
        boxes = [
            [key, [str(chunk.part.dtype), *chunk.offsets, *chunk.part.shape], total]
            for (key, chunk), total in zip(chunks, sums, strict=True)
            if self._layout.holds(tensors[key][1])
        ]
        every = peers.gather(boxes)
        differing = set(peers.broadcast(None if every is None else sorted(_differing(every))))
        taken = {key: each for key, each in tensors.items() if key not in differing}
        rest = {
            name: _without((name,), s, {p for p, *_ in taken.values()})
            for name, s in states.items()
        }
        return rest, {
            key: placed_[key] for key, each in taken.items() if self._layout.owns(each[1])
        }

    def put_into(self, objects: Mapping[str, tuple[Stateful, State]], saved: SavedStates) -> None:
        """Read this rank's parts of what `take_from` took out, into the states of `objects`.

        A tensor that the object has in that place now says how it lies; else the parameter does.

        Raises:
            FileError: a tensor has another shape here.
        """
        now: dict[str, State] = {}
        for key in saved.tensors:
            if not key.startswith(OBJECT):
                continue
            path: Path = tuple(key.removeprefix(OBJECT).split(INSIDE))
            name = self._parameter_of(path[-1])
            if name is None or path[0] not in objects:
                continue
            value, state = objects[path[0]]
            if path[0] not in now:
                now[path[0]] = value.state_dict()
            target = self._target(now[path[0]], path[1:], name)
            if target is None:
                continue
            lies = self._lies_as(name, target)
            into = self._layout.placed(name, target) if lies else placed(target)
            if tuple(into.whole) != tuple(saved.tensors[key].shape):
                raise FileError(
                    f"`{saved.path}` belongs to another model: `{'.'.join(path)}` is"
                    f" {tuple(saved.tensors[key].shape)} there, {tuple(into.whole)} here"
                )
            for chunk in into.chunks:
                saved.reader.read(key, chunk.part, offsets=chunk.offsets)
            for part in path[1:-1]:
                state = state.setdefault(part, {})
            state[path[-1]] = target

    def _target(self, state: object, path: Path, name: str) -> Tensor | None:
        """A tensor to fill; None of a parameter that this rank does not hold, nor the object."""
        for part in path:
            state = state.get(part) if isinstance(state, dict) else None
        if not isinstance(state, Tensor):
            if not self._layout.holds(name):
                return None
            state = self._parameters[name]
        return torch.empty_like(state, requires_grad=False, memory_format=torch.contiguous_format)

    def _of(self, path: Path, state: State) -> Iterator[tuple[Path, str, Tensor]]:
        """(path, parameter, tensor) of every one."""
        for key, value in state.items():
            if not isinstance(key, str) or INSIDE in key:
                continue  # no name of a parameter
            if isinstance(value, dict):
                yield from self._of((*path, key), value)
            elif isinstance(value, Tensor):
                name = self._parameter_of(key)
                if name is not None and self._lies_as(name, value):
                    yield (*path, key), name, value

    def _parameter_of(self, key: object) -> str | None:
        """The parameter that `key` ends with, by its longest name; no other key names one."""
        words = key.split(".") if isinstance(key, str) else []
        endings = (".".join(words[number:]) for number in range(len(words)))
        return next((ending for ending in endings if ending in self._parameters), None)

    def _lies_as(self, name: str, value: Tensor) -> bool:
        parameter = self._parameters[name]
        same = isinstance(value, DTensor) == isinstance(parameter, DTensor)
        return same and value.shape == parameter.shape


def _name(path: Path) -> str:
    return OBJECT + INSIDE.join(path)


def _differing(every: list[list[Any]]) -> set[str]:
    """Names of which two ranks have the same box with different sums."""
    sums: dict[str, int] = {}
    return {
        key
        for boxes in every
        for key, box, total in boxes
        if sums.setdefault(f"{key}{box}", total) != total
    }


def _without(path: Path, state: State, taken: Collection[Path]) -> State:
    return {
        key: _without((*path, key), value, taken) if isinstance(value, dict) else value
        for key, value in state.items()
        if (*path, key) not in taken
    }
