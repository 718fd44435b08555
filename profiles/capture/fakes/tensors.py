"""Stand-ins for the tensors of a model, fake ones or copies, put in place and taken out again."""

from __future__ import annotations

import copy
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from profiles.capture.fakes.code_states import unchanged_code
from profiles.capture.fakes.iterators import is_iterator, iterator_like
from profiles.capture.fakes.object_states import object_states
from profiles.torch_compat.fakes import FakeMaker, as_parameter, fake_tensors

# Standard deviation of random parameters in place of those on the meta device: small, so that
# numbers stay finite; as BERT and GPT-2 initialise.
_NOISE = 0.02
_PLAIN = frozenset({bool, int, float, str, type(None)})
"""Kinds of most attributes of a module, that hold no tensor."""


class Fakes:
    """One fake CPU tensor for each real tensor, whatever device that is on.

    Ties stay ties. With `cast`, float32 parameters become that dtype. Without `fake` the stand-ins
    are copies; of tensors without values small random numbers, or zeros.
    """

    def __init__(self, *, cast: torch.dtype | None = None, fake: FakeMaker | None = None) -> None:
        self._cast = cast
        self._fake = fake
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

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each real tensor and its stand-in."""
        return list(zip(self._real, self._made.values(), strict=True))

    def _make(self, tensor: Tensor) -> Tensor:
        is_parameter = isinstance(tensor, nn.Parameter)
        cast = self._cast if is_parameter and tensor.dtype == torch.float32 else None
        dtype = cast or tensor.dtype
        if self._fake is None:
            copy_ = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device="cpu")
            _give_values(copy_, tensor)
            if is_parameter:
                return nn.Parameter(copy_, requires_grad=tensor.requires_grad)
            return copy_.requires_grad_(tensor.requires_grad)
        fake = self._fake(tensor, dtype)
        if is_parameter:
            return as_parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)


@torch.no_grad()
def _give_values(stand_in: Tensor, tensor: Tensor) -> None:
    once = elements_once(tensor)
    if not tensor.is_meta:
        stand_in[once].copy_(tensor.detach()[once])
    elif stand_in.is_floating_point():
        stand_in[once].normal_(std=_NOISE)
    else:
        stand_in[once].zero_()


def elements_once(tensor: Tensor) -> tuple[slice, ...]:
    """The index of a tensor that leaves out the repetitions of expanded dimensions."""
    return tuple(
        slice(1) if step == 0 and size > 1 else slice(None)
        for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )


@contextmanager
def stand_ins(
    runs: Sequence[object], *, cast: torch.dtype | None = None, copies: bool = False
) -> Iterator[Fakes]:
    """Inside, the modules hold fake tensors, and operations compute shapes alone; or, with
    `copies`, they hold copies on the CPU, and compute.

    Every module gets a copy of its attributes with the tensors in them replaced, also those in
    plain lists and dicts, and so do objects of the user's own classes that it keeps. Whatever a
    forward does to its module (buffers, caches, hooks) it does to the copy: at the end the modules
    are as they were, and so are the random number generators, also those that modules keep, and
    what the modules' code remembers.

    What `torch.compile` made runs as it was written: compiled for stand-ins, modes and trial sizes
    it would reach the limit of dynamo, beyond which the training itself runs uncompiled.

    Args:
        runs: modules, and functions that run with them: a loss.
    """
    with (
        unchanged_code(runs),  # before tensors that are made are fake
        torch.compiler.set_stance("force_eager"),
        nullcontext() if copies else fake_tensors() as fake,
        preserved_random_state(),
    ):
        fakes = Fakes(cast=cast, fake=fake)
        with replaced(runs, fakes.of):
            yield fakes


@contextmanager
def replaced(runs: Sequence[object], of: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside, modules have copies of their attributes, with `of` each tensor in its place."""
    modules = (each for each in runs if isinstance(each, nn.Module))
    every = {id(part): part for module in modules for part in module.modules()}
    originals = [(module, module.__dict__) for module in every.values()]
    own = object_states(names for _, names in originals)
    try:
        made: dict[int, object] = {}
        for module, attributes in originals:
            _set_attributes(module, {name: copied(v, of, made) for name, v in attributes.items()})
        for state in own:
            if state.has_items:
                state.put(copied(state.part, of, made))
        yield
    finally:
        for module, attributes in originals:
            _set_attributes(module, attributes)
        for state in own:
            state.put(state.part)


def _set_attributes(module: nn.Module, attributes: Mapping[str, object]) -> None:
    object.__setattr__(module, "__dict__", attributes)


def copied(value: object, of: Callable[[Tensor], Tensor], copies: dict[int, object]) -> object:
    """`value` with tensors replaced; containers are copied once, so that aliases stay aliases.

    Args:
        of: what a tensor is replaced by.
        copies: what was copied before, by id.
    """
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return of(value) if value.layout is torch.strided else value
    if id(value) in copies:
        return copies[id(value)]
    if type(value) in (dict, OrderedDict, defaultdict, Counter):
        assert isinstance(value, dict)
        copies[id(value)] = mapping = _emptied(value)
        for key, item in value.items():
            mapping[key] = copied(item, of, copies)
        return mapping
    if type(value) in (list, deque):
        assert isinstance(value, list | deque)
        copies[id(value)] = sequence = _emptied(value)
        sequence.extend(copied(item, of, copies) for item in value)
        return sequence
    if type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return tuple.__new__(type(value), [copied(item, of, copies) for item in value])
    if type(value) is set:
        return set(value)
    if is_iterator(value):
        copies[id(value)] = iterator_like(value)
        return copies[id(value)]
    return value


def _emptied(container: Any) -> Any:
    """Another one of its settings: the factory of a defaultdict, the length of a deque."""
    if type(container) in (OrderedDict, dict, list):  # a module has many
        return type(container)()
    other = copy.copy(container)
    other.clear()
    return other


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
