"""Equal blocks: run twice, stood in for from then on.

Two calls are equal if the blocks are (classes, settings, shapes of parameters, state at that
moment) and so are their arguments and the modes of torch. The ends of a list differ in cost from
its middle (the first block keeps what several blocks take, the last is the first to give it a
gradient), so the second stands for all but the ends. Where calls that are equal turn out to differ,
or do more than they hand on, every block has to run: `is_sound`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from profiles.capture.module.state import PLAIN, Position, State, state_of
from profiles.capture.module.units import Unit
from profiles.capture.traces.block_substitute import BlockRun, Gradients, run_of, substitute_outputs
from profiles.capture.traces.dispatch_modes import TraceMode
from profiles.capture.traces.flow_trace import Trail
from profiles.torch_compat import flatten, storage_of, tensors_in

RUNS = 2  # of equal blocks that run in full
_SETTINGS = PLAIN | torch.dtype | torch.device


@dataclass(frozen=True, slots=True)
class _Call:
    """Identity of a call: `key` decides what it does, `standing` what it is charged for."""

    key: Hashable
    standing: Hashable


class Repeats:
    """Stands in for blocks that are equal to blocks which ran."""

    def __init__(self, trace: TraceMode, units: Sequence[Unit]) -> None:
        self._trace = trace
        self._count: Counter[Hashable] = Counter()
        self._work: dict[Hashable, tuple[int, int]] = {}
        self._runs: dict[_Call, BlockRun] = {}
        self._substitutes: list[tuple[BlockRun, Gradients]] = []
        self._involved: set[str] = set()
        self._is_even = True  # calls that are equal did the same work
        # Whether the latest call ran in full: of each list, and of those that take a memory.
        self._latest_ran: dict[str, bool] = {}
        self._takers: dict[int, tuple[int, bool]] = {}
        lists: dict[str, list[Unit]] = {}
        for unit in units:
            if unit.is_block:
                lists.setdefault(_list_of(unit), []).append(unit)
        for blocks in lists.values():
            numbered = _numbered(blocks)
            for block in blocks:
                attributes = block.module.__dict__  # a copy that goes
                attributes["forward"] = self._instead(
                    block, block.module.forward, numbered, is_last=block is blocks[-1]
                )

    def is_sound(self) -> bool:
        """True if the calls that ran represent those that did not; valid after backward."""
        calls = Counter(call.unit for call in self._trace.flow.flow().calls)
        return (
            self._is_even
            and not self._trace.flow.has_escaped
            and all(self._latest_ran.values())
            # The last to take a tensor is the first to give it a gradient, others add to that;
            # so it is with the parameters of a block that is called again.
            and all(ran for count, ran in self._takers.values() if count > 1)
            and all(calls[unit] == 1 for unit in self._involved)
            and not self._involved & self._trace.shared
            and all(run.given == given for run, given in self._substitutes)
        )

    def _instead(
        self,
        unit: Unit,
        forward: Callable[..., object],
        numbered: Iterable[tuple[str, str]],
        *,
        is_last: bool,
    ) -> Callable[..., object]:
        def instead(*args: Any, **kwargs: Any) -> object:
            trail = self._trace.flow.current
            # Recomputation, and calls within another unit, are part of calls that run.
            if self._trace.in_backward or trail is None or trail.unit != unit.name:
                return forward(*args, **kwargs)
            taken, structure = flatten((args, kwargs))
            with _without_number(unit, numbered) as number:
                call = self._call(unit, forward, taken, structure)
                run = self._runs.get(call) if call is not None and not is_last else None
                self._note_call(unit, taken, ran=run is None)
                if run is not None:
                    return self._stand_in(run, unit, taken)
                if call is None or is_last:
                    number.put_back()
                state, draws = state_of(unit.module, forward), drawn_state()
                output = forward(*args, **kwargs)
                if call is None:
                    return output
                self._compare(call.key)
                is_repeatable = (
                    trail.is_closed
                    and state is not None
                    and state.is_still(unit.module, forward)
                    and draws == drawn_state()
                )
                if is_repeatable and not is_last:
                    self._remember(call, trail, taken, output)
                return output

        return instead

    def _call(
        self, unit: Unit, forward: Callable[..., object], taken: Sequence[object], structure: object
    ) -> _Call | None:
        """Identify the call in progress; None if no other call may be like it."""
        state, arguments = state_of(unit.module, forward), _describe(taken)
        if state is None or arguments is None or not self._trace.is_saving:
            return None
        if self._holds_shared(unit.module):
            return None
        key = state.kind, str(structure), arguments, _modes()
        return _Call(key, self._standing(state, taken))

    def _note_call(self, unit: Unit, taken: Sequence[object], *, ran: bool) -> None:
        self._latest_ran[_list_of(unit)] = ran
        memories = {
            self._trace.storages.memory_of(leaf)
            for leaf in taken
            if isinstance(leaf, Tensor) and leaf.requires_grad
        }
        for memory in memories:
            if memory is not None:
                self._takers[memory] = self._takers.get(memory, (0, True))[0] + 1, ran

    def _holds_shared(self, module: nn.Module) -> bool:
        holders = self._trace.storages.holders_of
        return any(len(holders(parameter)) > 1 for parameter in module.parameters())

    def _standing(self, state: State, taken: Sequence[object]) -> Hashable:
        """Memory state of the inputs: what is saved already, and which arguments are the same
        tensor."""
        leaves = [leaf for leaf in taken if isinstance(leaf, Tensor)]
        tensors = [tensor for reference in state.tensors if (tensor := reference()) is not None]
        first: dict[int, int] = {}
        same = tuple(first.setdefault(id(storage_of(t)), n) for n, t in enumerate(leaves))
        standing = self._trace.storages.standing
        own = tuple(None if isinstance(t, nn.Parameter) else standing(t) for t in tensors)
        trail = self._trace.flow.current
        depends = trail is not None and trail.uses_parameters
        return same, own, tuple(map(standing, leaves)), depends

    def _compare(self, key: Hashable) -> None:
        """Blocks that look at what cannot be seen from here (globals) do work of their own."""
        work = self._trace.scope.forward.flop, self._trace.scope.forward.kernels
        self._is_even &= self._work.setdefault(key, work) == work

    def _remember(self, call: _Call, trail: Trail, taken: Sequence[object], output: object) -> None:
        run = run_of(self._trace, trail, taken, output)
        if run is None:
            return
        self._trace.flow.close(trail, tensors_in(output))
        self._count[call.key] += 1
        if self._count[call.key] >= RUNS:
            self._runs[call] = run
            self._involved.add(run.scope.name)

    def _stand_in(self, run: BlockRun, unit: Unit, taken: Sequence[object]) -> object:
        self._involved.add(unit.name)
        self._trace.stand_for(run.scope, run.trail)
        parameter = next((p for p in unit.module.parameters() if p.requires_grad), None)
        output, given = substitute_outputs(run, self._trace, taken, parameter)
        self._substitutes.append((run, given))
        return output


def _numbered(blocks: Sequence[Unit]) -> set[tuple[str, str]]:
    """Attributes, with the path of their module, in which each block has its number in the list."""
    names = [
        {
            (path, name)
            for path, part in unit.module.named_modules()
            for name, value in vars(part).items()
            if type(value) is int and str(value) == unit.name.rpartition(".")[2]
        }
        for unit in blocks
    ]
    return set.intersection(*names) if len(names) > RUNS else set()


class _without_number:
    """Inside, the attributes of a block that are its number are a `Position`."""

    def __init__(self, unit: Unit, numbered: Iterable[tuple[str, str]]) -> None:
        attributes = [(vars(unit.module.get_submodule(path)), name) for path, name in numbered]
        self._numbers = [(part, name, part[name]) for part, name in attributes]

    def __enter__(self) -> _without_number:
        for part, name, _ in self._numbers:
            part[name] = Position()
        return self

    def put_back(self) -> None:
        for part, name, number in self._numbers:
            part[name] = number

    def __exit__(self, *_: object) -> None:
        self.put_back()


def _list_of(unit: Unit) -> str:
    return unit.name.rpartition(".")[0]


def _describe(leaves: Sequence[object]) -> Hashable | None:
    """Key of the arguments as far as they decide shapes; None if one of them may be more than a
    value.

    Tensors that are one and the same are told from those that are only alike.
    """
    key: list[Hashable] = []
    first: dict[int, int] = {}
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if leaf.layout is not torch.strided:
                return None
            same = first.setdefault(id(leaf), position)
            form = tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad
            key.append((same, type(leaf), *form))
        elif isinstance(leaf, _SETTINGS):
            key.append((type(leaf), repr(leaf)))
        else:
            return None
    return tuple(key)


def _modes() -> Hashable:
    """Modes of torch that change what a call does."""
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
    )


def drawn_state() -> Hashable:
    """States of the random generators that code can read."""
    state: dict[str, Any] = np.random.get_state(legacy=False)
    return random.getstate(), state["state"]["key"].tobytes(), state["state"]["pos"]
