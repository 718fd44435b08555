"""What an optimizer keeps beside a parameter and its gradient, and what its step takes.

Most optimizers keep so many bytes for every element. Some look at shapes: Adafactor keeps a number
for every row and column of a matrix, Muon steps the matrices of blocks alone, 8-bit Adam keeps
scales for blocks of elements and leaves small tensors in fp32. Named ones are described here, from
torch's own source and that of the libraries; any other is measured by `engines.footprint`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from pydantic import NonNegativeFloat

from profiles.errors import InputError, UnknownNameError
from profiles.model import Shape, UnitProfile
from profiles.record import Record

FP32_BYTES = 4
# bitsandbytes, optim/optimizer.py (`init_state`) and torchao, optim/adam.py (`_new_buffer`): one
# fp32 scale for 256 elements of each moment; tensors under 4,096 elements keep fp32 moments.
BLOCK_ELEMENTS, SMALLEST_8BIT = 256, 4096
# torchao keeps both 256-entry fp32 tables of codes with every tensor (optim/subclass_8bit.py);
# bitsandbytes shares them among all.
TABLE_BYTES = 2 * 256 * FP32_BYTES
# torch/optim/_muon.py: five Newton-Schulz iterations in bf16.
NEWTON_SCHULZ_STEPS = 5


class Law(StrEnum):
    """How the state follows from a parameter's shape."""

    ELEMENTWISE = "elementwise"  # so many bytes an element, in the parameter's dtype
    FACTORED = "factored"  # torch.optim.Adafactor: rows and columns of a matrix
    ORTHOGONAL = "orthogonal"  # torch.optim.Muon for matrices of blocks, AdamW for all else
    BLOCKS = "blocks"  # bitsandbytes: 8-bit moments with scales
    WHOLE_BLOCKS = "whole_blocks"  # torchao: the same where blocks divide the tensor


class UnitUpkeep(Record):
    """What was measured of one unit's parameters."""

    state_bytes: NonNegativeFloat
    moved_bytes: NonNegativeFloat
    flop: NonNegativeFloat = 0.0


class OptimizerProfile(Record):
    """What an optimizer keeps and moves.

    AdamW on fp32 parameters keeps two fp32 moments: 8 bytes an element beside the parameter and its
    gradient. Parameters of another dtype count in proportion, as torch makes states in the dtype of
    the parameter.

    Attributes:
        state_bytes_per_element: of fp32 parameters that `law` does not treat apart.
        moved_bytes_per_element: read and written in device memory by one step, of the same.
        law: what the state follows.
        loop_copies, lingering_copies: temporaries of a step that goes tensor by tensor, in copies
            of the tensor in work, and of the one before it, whose last temporary a Python loop
            holds until the next takes its name.
        list_copies: temporaries of torch's foreach steps, in copies of all parameters; None where
            there is no such step, or not by default.
        units: measured, by unit; they take precedence over the law.
        working_bytes: measured temporaries of a step over all parameters, likewise.
        whole_because: why the step on shards is not the step on whole matrices; empty if it is.
    """

    name: str
    state_bytes_per_element: NonNegativeFloat
    moved_bytes_per_element: NonNegativeFloat
    law: Law = Law.ELEMENTWISE
    loop_copies: NonNegativeFloat = 0.0
    lingering_copies: NonNegativeFloat = 0.0
    list_copies: NonNegativeFloat | None = None
    units: dict[str, UnitUpkeep] | None = None
    working_bytes: NonNegativeFloat | None = None
    whole_because: str = ""


@dataclass(frozen=True, slots=True)
class Upkeep:
    """Of some units: what is kept, and what one step moves, computes and holds for a moment.

    Attributes:
        name: of the optimizer.
        flop: matrix products, in bf16.
        loop_bytes: temporaries of a step tensor by tensor, as on CPUs.
        list_bytes: of the step that torch takes on accelerators: foreach where there is one.
    """

    name: str
    state_bytes: float
    moved_bytes: float
    flop: float
    loop_bytes: float
    list_bytes: float


_ADAM = {"loop_copies": 2.0, "lingering_copies": 1.0, "list_copies": 1.0}
_WHOLE = "{} looks at a whole matrix at a time, and a shard holds some of its rows"

# State: as torch documents it (exp_avg and exp_avg_sq, momentum_buffer). Moved: what torch's
# default implementations read and write, pass by pass, nothing fused. Copies: the temporaries of
# the same code. `engines.footprint` counts all of them, and a test compares. `fused=True` moves 32
# for AdamW and has no temporaries. 8-bit: parameter, gradient and moments once each, in one kernel;
# torchao's compiled step holds the moment that it quantises in fp32 (`single_param_adam`).
OPTIMIZERS = {
    profile.name: profile
    for profile in (
        OptimizerProfile(
            name="sgd", state_bytes_per_element=0, moved_bytes_per_element=12, list_copies=0.0
        ),
        OptimizerProfile(
            name="sgd-momentum",
            state_bytes_per_element=4,
            moved_bytes_per_element=32,
            list_copies=0.0,
        ),
        OptimizerProfile(
            name="adam", state_bytes_per_element=8, moved_bytes_per_element=76, **_ADAM
        ),
        OptimizerProfile(
            name="adamw", state_bytes_per_element=8, moved_bytes_per_element=84, **_ADAM
        ),
        OptimizerProfile(
            name="adafactor",
            state_bytes_per_element=4,
            moved_bytes_per_element=84,
            law=Law.FACTORED,
            loop_copies=2.0,
            lingering_copies=2.0,
            whole_because=_WHOLE.format("Adafactor"),
        ),
        OptimizerProfile(
            name="muon",
            state_bytes_per_element=8,
            moved_bytes_per_element=84,
            law=Law.ORTHOGONAL,
            whole_because=_WHOLE.format("Muon"),
            **_ADAM,
        ),
        OptimizerProfile(
            name="adamw-8bit",
            state_bytes_per_element=8,
            moved_bytes_per_element=28,
            law=Law.BLOCKS,
        ),
        OptimizerProfile(
            name="adamw-8bit-torchao",
            state_bytes_per_element=8,
            moved_bytes_per_element=28,
            law=Law.WHOLE_BLOCKS,
            loop_copies=2.0,
        ),
    )
}


def optimizer_profile(name: str) -> OptimizerProfile:
    """Look an optimizer up by name.

    Raises:
        UnknownNameError: not in the table; the near miss is named.
    """
    try:
        return OPTIMIZERS[name.lower()]
    except KeyError:
        raise UnknownNameError("optimizer", name, OPTIMIZERS) from None


def upkeep(optimizer: OptimizerProfile, units: Iterable[UnitProfile], *, shards: int = 1) -> Upkeep:
    """What `optimizer` keeps for the trainable parameters of `units`, and what its step takes.

    With `shards` ranks: of one of them. FSDP2 cuts every parameter along its first dimension.

    Raises:
        InputError: the state follows shapes, and the profile of the model has none.
    """
    units = [unit for unit in units if unit.trainable_parameters]
    if optimizer.units is not None:
        found = [optimizer.units[unit.name] for unit in units if unit.name in optimizer.units]
        working = (optimizer.working_bytes or 0.0) / shards
        return Upkeep(
            name=optimizer.name,
            state_bytes=sum(unit.state_bytes for unit in found) / shards,
            moved_bytes=sum(unit.moved_bytes for unit in found) / shards,
            flop=sum(unit.flop for unit in found) / shards,
            loop_bytes=working,
            list_bytes=working,
        )
    if optimizer.law is Law.ELEMENTWISE:
        return _elementwise(optimizer, units, shards)
    steps = [
        (step, shape.count)
        for unit in units
        for shape in _shapes(optimizer, unit)
        for step in [_step(optimizer, _cut(shape, shards), is_hidden=unit.is_block)]
    ]
    listed = [(step, count) for step, count in steps if step.list_bytes is not None]
    looped = [(step, count) for step, count in steps if step.list_bytes is None]
    return Upkeep(
        name=optimizer.name,
        state_bytes=sum(count * step.state_bytes for step, count in steps),
        moved_bytes=sum(count * step.moved_bytes for step, count in steps),
        flop=sum(count * step.flop for step, count in steps),
        loop_bytes=_loop_bytes(steps),
        list_bytes=max(
            _loop_bytes(looped), sum(count * (step.list_bytes or 0.0) for step, count in listed)
        ),
    )


@dataclass(frozen=True, slots=True)
class _Step:
    """Of one tensor. `list_bytes` None: stepped by itself everywhere."""

    state_bytes: float
    moved_bytes: float
    flop: float = 0.0
    loop_bytes: float = 0.0
    lingering_bytes: float = 0.0
    list_bytes: float | None = None


def _elementwise(optimizer: OptimizerProfile, units: Sequence[UnitProfile], shards: int) -> Upkeep:
    """Bytes of the parameters are all that counts: gradients have as many."""
    total = sum(unit.gradient_bytes for unit in units) / shards
    steps = [
        (_plain(optimizer, largest / shards), count)
        for unit in units
        for largest, count in _tensor_bytes(unit)
    ]
    loop = _loop_bytes(steps)
    copies = optimizer.list_copies
    return Upkeep(
        name=optimizer.name,
        state_bytes=total / FP32_BYTES * optimizer.state_bytes_per_element,
        moved_bytes=total / FP32_BYTES * optimizer.moved_bytes_per_element,
        flop=0.0,
        loop_bytes=loop,
        list_bytes=loop if copies is None else copies * total,
    )


def _tensor_bytes(unit: UnitProfile) -> Iterator[tuple[float, int]]:
    """Sizes of a unit's tensors; where shapes are not known it is taken as one."""
    if unit.shapes:
        yield from ((float(shape.nbytes), shape.count) for shape in unit.shapes)
    else:
        yield float(unit.gradient_bytes), 1


def _loop_bytes(steps: Sequence[tuple[_Step, int]]) -> float:
    """The tensor that takes most, after another one that left most: the order is not known."""
    if not steps:
        return 0.0
    largest, count = max(steps, key=lambda step: step[0].loop_bytes)
    others = [step.lingering_bytes for step, _ in steps if step is not largest]
    if count > 1:
        others.append(largest.lingering_bytes)
    return largest.loop_bytes + max(others, default=0.0)


def _shapes(optimizer: OptimizerProfile, unit: UnitProfile) -> tuple[Shape, ...]:
    if not unit.shapes:
        raise InputError(
            f"what {optimizer.name} keeps follows the shapes of parameters, and the profile has"
            f" none for `{unit.name}`",
            hints=["profile the model again: `advise profile MODEL -o model.json`"],
        )
    return unit.shapes


def _cut(shape: Shape, shards: int) -> Shape:
    """The first rank's part, which is the largest."""
    if shards == 1 or not shape.sizes:
        return shape
    first, *rest = shape.sizes
    return shape.model_copy(update={"sizes": (-(-first // shards), *rest)})


def _step(optimizer: OptimizerProfile, shape: Shape, *, is_hidden: bool) -> _Step:
    is_matrix = len(shape.sizes) >= 2
    match optimizer.law:
        case Law.FACTORED if is_matrix:
            return _factored(shape)
        case Law.ORTHOGONAL if is_hidden and len(shape.sizes) == 2:
            return _orthogonal(shape)
        case Law.BLOCKS if shape.elements >= SMALLEST_8BIT:
            return _blocks(optimizer, shape, table_bytes=0)
        case Law.WHOLE_BLOCKS if (
            shape.elements >= SMALLEST_8BIT and shape.elements % BLOCK_ELEMENTS == 0
        ):
            return _blocks(optimizer, shape, table_bytes=TABLE_BYTES)
    plain = _plain(optimizer, shape.nbytes)
    if optimizer.law is not Law.BLOCKS:
        return plain
    # bitsandbytes keeps fp32 moments whatever the parameter is (`get_state_buffer`).
    whole = shape.elements * optimizer.state_bytes_per_element
    return _Step(state_bytes=whole, moved_bytes=plain.moved_bytes)


def _plain(optimizer: OptimizerProfile, size_bytes: float) -> _Step:
    elements = size_bytes / FP32_BYTES
    copies = optimizer.list_copies
    return _Step(
        state_bytes=elements * optimizer.state_bytes_per_element,
        moved_bytes=elements * optimizer.moved_bytes_per_element,
        loop_bytes=size_bytes * optimizer.loop_copies,
        lingering_bytes=size_bytes * optimizer.lingering_copies,
        list_bytes=None if copies is None else size_bytes * copies,
    )


def _factored(shape: Shape) -> _Step:
    """torch/optim/_adafactor.py: a row and a column of variances for every matrix of the last two
    dimensions; the estimate that they make is as large as the parameter."""
    *leading, rows, columns = shape.sizes
    lines = prod(leading) * (rows + columns) * shape.element_bytes
    return _Step(
        state_bytes=lines,
        # Norm of the parameter, of rows, of columns: 3 reads. Product: a write; its division, clamp
        # and root: 6; times the gradient: 3; its norm: 1; into the parameter: 3. Lines: 8 passes
        # over each, means of the rows and the product's inputs.
        moved_bytes=17 * shape.nbytes,
        loop_bytes=shape.nbytes + lines,
        lingering_bytes=shape.nbytes,
    )


def _orthogonal(shape: Shape) -> _Step:
    """torch/optim/_muon.py: one momentum; the update in bf16 from its products with itself.

    With n elements and a smaller side m, each Newton-Schulz step multiplies (m x m) out of n, m x m
    by itself, and m x m by n.
    """
    n, m = shape.elements, min(shape.sizes)
    size, half = shape.element_bytes, 2
    # Momentum and its look-ahead: 3 passes each. Cast, norm, division. Then the steps; at the end
    # decay (2 passes) and the update, added to the parameter.
    moved = 6 * size * n + (size + half) * n + 3 * half * n
    moved += NEWTON_SCHULZ_STEPS * half * (5 * n + 6 * m * m)
    moved += 2 * size * n + (2 * size + half) * n
    return _Step(
        state_bytes=shape.nbytes,
        moved_bytes=moved,
        flop=NEWTON_SCHULZ_STEPS * (4.0 * m * n + 2.0 * m**3),
        # The look-ahead, the update before and after a step, and two m x m.
        loop_bytes=size * n + 2 * half * n + 2 * half * m * m,
    )


def _blocks(optimizer: OptimizerProfile, shape: Shape, *, table_bytes: int) -> _Step:
    """Two moments of a byte an element, and a scale for every block of each."""
    scales = 2 * FP32_BYTES * -(-shape.elements // BLOCK_ELEMENTS)
    return _Step(
        state_bytes=2 * shape.elements + scales + table_bytes,
        moved_bytes=3 * shape.nbytes + 2 * (2 * shape.elements + scales) + table_bytes,
        loop_bytes=optimizer.loop_copies * FP32_BYTES * shape.elements,
    )
