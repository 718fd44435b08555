"""Fake stand-ins for the tensors of a model, put in place and taken out again."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from profiles.torch_compat import fake_tensors


class Fakes:
    """One fake CPU tensor for each real tensor, whatever device that is on.

    Ties stay ties. With `cast`, float32 parameters become that dtype.
    """

    def __init__(self, *, cast: torch.dtype | None = None) -> None:
        self._cast = cast
        self._made: dict[int, Tensor] = {}
        self._real: list[Tensor] = []  # keeps their ids from being used again

    def of(self, tensor: Tensor) -> Tensor:
        """The stand-in of `tensor`: same shape and strides, no memory."""
        if id(tensor) not in self._made:
            self._real.append(tensor)
            self._made[id(tensor)] = self._make(tensor)
        return self._made[id(tensor)]

    def all(self) -> list[Tensor]:
        return list(self._made.values())

    def _make(self, tensor: Tensor) -> Tensor:
        is_parameter = isinstance(tensor, nn.Parameter)
        cast = self._cast if is_parameter and tensor.dtype == torch.float32 else None
        fake = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=cast or tensor.dtype, device="cpu"
        )
        if is_parameter:
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)


@contextmanager
def stand_ins(modules: Sequence[nn.Module], *, cast: torch.dtype | None = None) -> Iterator[Fakes]:
    """Inside, the modules hold fake tensors, and operations compute shapes alone.

    Every module gets a copy of its attributes with the tensors in them replaced, also those in
    plain lists and dicts. Whatever a forward does to its module (buffers, caches, hooks) it does to
    the copy: at the end the modules are as they were, and so are the random number generators.
    """
    every = {id(part): part for module in modules for part in module.modules()}
    originals = [(module, module.__dict__) for module in every.values()]
    with fake_tensors(), preserved_random_state():
        fakes = Fakes(cast=cast)
        try:
            copies: dict[int, object] = {}
            for module, attributes in originals:
                _set_attributes(
                    module, {name: copied(v, fakes.of, copies) for name, v in attributes.items()}
                )
            yield fakes
        finally:
            for module, attributes in originals:
                _set_attributes(module, attributes)


def _set_attributes(module: nn.Module, attributes: Mapping[str, object]) -> None:
    object.__setattr__(module, "__dict__", attributes)


def copied(value: object, of: Callable[[Tensor], Tensor], copies: dict[int, object]) -> object:
    """`value` with tensors replaced; containers are copied once, so that aliases stay aliases.

    Args:
        of: what a tensor is replaced by.
        copies: what was copied before, by id.
    """
    if isinstance(value, Tensor):
        return of(value) if value.layout is torch.strided else value
    if id(value) in copies:
        return copies[id(value)]
    if type(value) in (dict, OrderedDict):
        assert isinstance(value, dict)
        copies[id(value)] = mapping = type(value)()
        mapping.update((key, copied(item, of, copies)) for key, item in value.items())
        return mapping
    if type(value) is list:
        sequence: list[object] = []
        copies[id(value)] = sequence
        sequence.extend(copied(item, of, copies) for item in value)
        return sequence
    if type(value) is tuple:
        return tuple(copied(item, of, copies) for item in value)
    if type(value) is set:
        return set(value)
    return value


@contextmanager
def preserved_random_state(devices: Sequence[int] = ()) -> Iterator[None]:
    """Restore the random state of Python, NumPy and torch on exit.

    `devices`: numbers of the CUDA devices whose generators are drawn from.
    """
    python, array = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
