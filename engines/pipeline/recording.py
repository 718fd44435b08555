"""Outputs of the calls of one microbatch, for stages that do not run them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from engines.pipeline.segments import unit_calls
from engines.state.token_shares import note_length
from profiles.capture.batch.call import Batch, call_model
from profiles.capture.batch.tree import describe, map_batch
from profiles.capture.fakes.known_values import ArrayReads, KnownValues
from profiles.capture.fakes.mode import FakeRunMode
from profiles.capture.fakes.tensors import stand_ins
from profiles.capture.frames import model_line
from profiles.errors import ModelError
from profiles.model.flow import Flow, Key, Terms
from profiles.model.profile import Numerics
from profiles.torch_compat import (
    CALL,
    Operator,
    data_dependent_errors,
    flatten,
    is_mutable,
    map_tensors,
    storage_of,
    tensors_written,
    whole_call,
    without_onednn,
)
from profiles.torch_compat.checkpoint import checkpoints_only

PART = "part of the batch or of a buffer"
_PLAIN = int | float | str | bool | torch.dtype | torch.device | None


@dataclass(frozen=True, slots=True)
class ReturnedTensor:
    """A tensor that a call returns.

    Attributes:
        value: its number among the tensors of the output.
        argument: the number of the argument that is returned, if it is one.
    """

    value: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool
    argument: int | None = None

    def blank(self, device: torch.device) -> Tensor:
        """Zeros, laid out as the tensor was."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device).zero_()


@dataclass(frozen=True, slots=True)
class ReturnedParameter:
    """A parameter that a call returns, or a view of one: a stage that uses it holds it."""

    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, parameter: Tensor) -> Tensor:
        """The same view of a live parameter; the parameter itself where that is returned."""
        given = self.shape, self.stride, self.offset
        if given == (parameter.shape, parameter.stride(), parameter.storage_offset()):
            return parameter
        return parameter.as_strided(self.shape, self.stride, self.offset)

    def blank(self, parameter: Tensor, device: torch.device) -> Tensor:
        """Zeros in its place."""
        return torch.zeros((), dtype=parameter.dtype, device=device).expand(self.shape)


@dataclass(frozen=True, slots=True)
class ReturnedObject:
    """An object among the leaves: `argument` if one is returned, else it cannot be made without
    running the unit."""

    kind: str
    argument: int | None = None


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call of a unit.

    Attributes:
        number: of the call in the flow.
        leaves: `ReturnedTensor`, `ReturnedParameter`, `ReturnedObject` or a plain value;
            `structure`: their tree.
    """

    unit: str
    number: int
    leaves: tuple[object, ...]
    structure: object


@dataclass(frozen=True, slots=True)
class Shares:
    """Units whose first floating-point tensor is, on a rank, one of `size` equal parts along
    `dim`, padded: sequence parallelism.

    Attributes:
        lengths: of the whole by that of a part, in the forwards under way; see `begin`.
    """

    units: frozenset[str] = frozenset()
    dim: int = 1
    size: int = 1
    lengths: dict[int, int] = field(default_factory=dict)

    def begin(self, recording: Recording) -> None:
        """Set `lengths` for forwards that are as recorded."""
        self.lengths.clear()
        self.lengths.update(recording.lengths)

    def of(self, call: RecordedCall, lengths: dict[int, int]) -> RecordedCall:
        """The call as a rank makes it; the length of its whole is noted.

        Raises:
            BatchError: see `note_length`.
        """
        leaves = list(call.leaves)
        for number, leaf in enumerate(leaves if call.unit in self.units else ()):
            if not (isinstance(leaf, ReturnedTensor) and leaf.dtype.is_floating_point):
                continue
            shape = list(leaf.shape)
            shape[self.dim] = note_length(lengths, shape[self.dim], self.size)
            stride = torch.empty(shape, device="meta").stride()
            leaves[number] = replace(leaf, shape=torch.Size(shape), stride=stride)
            break
        return replace(call, leaves=tuple(leaves))


@dataclass(frozen=True, slots=True)
class Recording:
    """The calls of one forward, in order, and the `lengths` of its `Shares`."""

    calls: tuple[RecordedCall, ...]
    lengths: Mapping[int, int] = field(default_factory=dict)

    def made(self, key: Key) -> ReturnedTensor:
        """Layout of value `key` of the flow."""
        call = next(call for call in self.calls if call.number == key[0])
        return next(
            leaf
            for leaf in call.leaves
            if isinstance(leaf, ReturnedTensor) and leaf.value == key[1]
        )

    def sum_of(self, terms: Terms) -> ReturnedTensor:
        """Layout of the sum of these values, in place of the last of them. Autocast leaves some in
        fp32 and makes others in bf16; their sum is in fp32."""
        dtypes = (self.made(key).dtype for key in terms)
        return replace(self.made(terms[-1]), dtype=reduce(torch.promote_types, dtypes))


def record(
    model: nn.Module,
    flow: Flow,
    batch: Batch,
    *,
    has_target: bool,
    numerics: Numerics = Numerics.AS_BUILT,
    mixed: torch.dtype = torch.bfloat16,
    cast: Sequence[str] = (),
    shares: Shares = Shares(),
) -> Recording:
    """Follow one forward over `batch` on fake tensors; nothing is allocated, computed or changed.

    Args:
        model: as it was before the plan, see `ModelSnapshot`.
        numerics: of the forward, so that values at cuts are recorded in their dtype.
        mixed: the dtype that is computed in, where not as built.
        cast: names of the units whose inputs FSDP2 casts to it, under `Numerics.BF16`.
        shares: units that return a part on every rank.

    Code may read values that every batch has, as capture let it.

    Raises:
        ModelError: the model looks at other values, changes parameters, or calls other units than
            the flow says.
    """
    for values in (None, KnownValues()):
        try:
            return _recorded(model, flow, batch, values, has_target, numerics, mixed, cast, shares)
        except ModelError as error:
            if values is not None or not isinstance(error.__cause__, data_dependent_errors()):
                raise
    raise AssertionError


def _recorded(
    model: nn.Module,
    flow: Flow,
    batch: Batch,
    values: KnownValues | None,
    has_target: bool,
    numerics: Numerics,
    mixed: torch.dtype,
    cast: Sequence[str],
    shares: Shares,
) -> Recording:
    """`values`: none yet; those that follow from constants are put there. None is the faster."""
    numbers = unit_calls(flow)
    names = tuple(dict.fromkeys(flow.calls[number].unit for number in numbers))
    calls: list[RecordedCall] = []

    def note(unit: str, run: Callable[..., object], args: Any, kwargs: Any) -> object:
        output = run(*args, **kwargs)
        number = numbers[len(calls)] if len(calls) < len(numbers) else -1
        leaves, structure = flatten(output)
        arguments, _ = flatten((args, kwargs))
        called = tuple(_leaves(leaves, arguments, known, names_of))
        calls.append(RecordedCall(unit, number, called, structure))
        return output

    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        stand_ins([model], cast=mixed if numerics is Numerics.BF16 else None) as fakes,
    ):
        if numerics is Numerics.BF16:
            for name in ("", *cast):
                unit = model.get_submodule(name)
                unit.register_forward_pre_hook(_caster(mixed), with_kwargs=True)
        fake = map_batch(lambda tensor: fakes.of(tensor.detach()), batch)
        known = {id(storage_of(tensor)) for tensor in fakes.all()}
        names_of = {id(storage_of(p)): name for name, p in model.named_parameters()}
        with (
            _WriteGuard(names_of, values).on(fake),
            ArrayReads(values, lambda _: None) if values is not None else nullcontext(),
            without_onednn(),
            checkpoints_only(lambda: False),
            intercepted(model, names, note),
            torch.autocast("cpu", mixed, enabled=numerics is Numerics.BF16_AUTOCAST),
            _explained(batch),
        ):
            call_model(model, fake, has_target=has_target)
    called, expected = [c.unit for c in calls], [flow.calls[number].unit for number in numbers]
    if called != expected:
        raise ModelError(
            f"on this batch the model makes {len(called)} calls of its units, on the captured"
            f" sample it made {len(expected)}",
            where=f"{_first_difference(called, expected)}\nbatch: {describe(batch)}",
            hints=["a pipeline needs a forward that takes the same path for every batch"],
        )
    lengths: dict[int, int] = {}
    return Recording(tuple(shares.of(call, lengths) for call in calls), lengths)


@contextmanager
def intercepted(
    model: nn.Module,
    units: Sequence[str],
    replacement: Callable[[str, Callable[..., object], Any, Any], object],
) -> Iterator[None]:
    """Inside, a call of a unit is `replacement(name, its own call, args, kwargs)`.

    Its own call runs its hooks: those of FSDP2 gather parameters, and may replace the output. A
    unit that is called within another one just runs, as a part of that call.
    """
    depth = 0

    def replace(name: str, own: Callable[..., object]) -> Callable[..., object]:
        def call(*args: Any, **kwargs: Any) -> object:
            nonlocal depth
            if depth:
                return own(*args, **kwargs)
            depth += 1
            try:
                return replacement(name, own, args, kwargs)
            finally:
                depth -= 1

        return call

    replaced: list[tuple[dict[str, object], object]] = []
    try:
        for name in units:
            unit = model.get_submodule(name)
            attributes: dict[str, object] = unit.__dict__
            replaced.append((attributes, attributes.get(CALL)))
            attributes[CALL] = replace(name, whole_call(unit))
        yield
    finally:
        for attributes, before in replaced:
            if before is None:
                del attributes[CALL]
            else:
                attributes[CALL] = before


def _caster(dtype: torch.dtype) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Casts inputs as FSDP2 does for the modules that it shards, under mixed precision."""

    def cast(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs))

    return cast


class _WriteGuard(FakeRunMode):
    """Refuse a forward that writes to parameters: those of other stages are freed.

    `parameters`: names by the ids of their storages.
    """

    def __init__(self, parameters: Mapping[int, str], values: KnownValues | None) -> None:
        super().__init__(values)
        self._parameters = parameters

    def note(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: object
    ) -> None:
        written = tensors_written(operator, args, kwargs) if is_mutable(operator) else []
        for tensor in written:
            name = self._parameters.get(id(storage_of(tensor)))
            if name is not None:
                raise ModelError(
                    f"the forward changes its own parameter `{name}`: in a pipeline other ranks"
                    " may have it",
                    hints=["change parameters in the optimizer's step, or set pp=1"],
                )


def _leaves(
    leaves: Sequence[object],
    arguments: Sequence[object],
    known: Container[int],
    parameters: Mapping[int, str],
) -> Iterator[object]:
    """Args:
    known: ids of storages of the batch, parameters and buffers. The flow does not follow parts of
        those; of parameters a stub returns its stage's own, of others it can return none.
    parameters: names by the ids of their storages.
    """
    positions = {id(a): n for n, a in enumerate(arguments) if not isinstance(a, _PLAIN)}
    value = -1
    for leaf in leaves:
        value += isinstance(leaf, Tensor)
        argument = positions.get(id(leaf))
        memory = id(storage_of(leaf)) if isinstance(leaf, Tensor) else 0
        if isinstance(leaf, Tensor) and (argument is not None or memory not in known):
            stride = _own_stride(leaf)
            yield ReturnedTensor(
                value, leaf.shape, stride, leaf.dtype, leaf.requires_grad, argument
            )
        elif isinstance(leaf, _PLAIN):
            yield leaf
        elif isinstance(leaf, Tensor) and memory in parameters:
            offset = int(leaf.storage_offset())
            yield ReturnedParameter(parameters[memory], leaf.shape, leaf.stride(), offset)
        elif isinstance(leaf, Tensor):
            yield ReturnedObject(PART)
        else:
            yield ReturnedObject(type(leaf).__name__, argument)


def _own_stride(tensor: Tensor) -> tuple[int, ...]:
    """The tensor; contiguous where elements share memory, so that it can be written."""
    if any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True)):
        return torch.empty(tensor.shape, device="meta").stride()
    return tensor.stride()


def _first_difference(called: Sequence[str], expected: Sequence[str]) -> str:
    number = next(
        (n for n, (a, b) in enumerate(zip(called, expected, strict=False)) if a != b),
        min(len(called), len(expected)),
    )
    here, there = (names[number : number + 1] or ["the end"] for names in (called, expected))
    return f"call {number} is `{here[0]}`, it was `{there[0]}`"


@contextmanager
def _explained(batch: Batch) -> Iterator[None]:
    try:
        yield
    except ModelError:
        raise
    except data_dependent_errors() as error:
        raise ModelError(
            "the forward depends on values of tensors, which a recording of shapes does not have",
            where=f"{model_line(error)}\n{error}\nbatch: {describe(batch)}",
            hints=["take branches and sizes from shapes, not from values"],
        ) from error
