"""State of an optimizer beyond parameters and gradients, and the cost of its step.

Most optimizers keep so many bytes for every element. Some look at shapes: Adafactor keeps a number
for every row and column of a matrix, Muon steps the matrices of blocks alone, 8-bit Adam keeps
scales for blocks of elements and leaves small tensors in fp32. Named ones are described here, from
torch's own source and that of the libraries; any other is measured by
`engines.state.optimizer_footprint`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from profiles.errors import InputError, UnknownNameError
from profiles.model.profile import ParameterShape, UnitProfile
from profiles.workload.new_memory import mapped
from profiles.workload.optimizer_states import DIVISIBLE as DIVISIBLE
from profiles.workload.optimizer_states import FP32_BYTES, TensorStep, plain_step, step_of
from profiles.workload.optimizer_states import Indivisible as Indivisible
from profiles.workload.optimizer_states import Law as Law
from profiles.workload.optimizer_states import OptimizerProfile as OptimizerProfile
from profiles.workload.optimizer_states import UnitUpkeep as UnitUpkeep


@dataclass(frozen=True, slots=True)
class Upkeep:
    """Of some units: what is kept, and what one step moves, computes and holds for a moment.

    Attributes:
        name: of the optimizer.
        flop: matrix products, in bf16.
        operations: of a step tensor by tensor, as on CPUs; a shard of a tensor takes as many.
        loop_bytes: temporaries of such a step.
        new_bytes: all temporaries of such a step that are mapped anew.
        read_back: operations of tensors stepped by numbers that the host reads, on every device.
        list_bytes: of the step that torch takes on accelerators: foreach where there is one.
    """

    name: str
    state_bytes: float
    moved_bytes: float
    flop: float
    operations: float
    loop_bytes: float
    list_bytes: float
    new_bytes: float = 0.0
    read_back: float = 0.0

    def part(self, share: float) -> Upkeep:
        """Of a share of the parameters, where all goes by elements."""
        return Upkeep(
            name=self.name,
            state_bytes=share * self.state_bytes,
            moved_bytes=share * self.moved_bytes,
            flop=share * self.flop,
            operations=self.operations,
            loop_bytes=share * self.loop_bytes,
            list_bytes=share * self.list_bytes,
            new_bytes=share * self.new_bytes,
            read_back=self.read_back,
        )


# Bytes that an operation of an optimizer moves per element: most read two fp32 numbers, or write
# one of them. AdamW's 84 bytes are 9 operations.
PASS_BYTES = 9
# torch's elementwise optimizers, in lower case, and the table's names for them: of shards they step
# a rank's own tensors, as plain ones (`engines.state.local_step`).
STEPS_OWN_PARTS = frozenset(
    {
        "adadelta",
        "adagrad",
        "adam",
        "adamax",
        "adamw",
        "adamw-compensated",
        "asgd",
        "compensatedadamw",
        "nadam",
        "radam",
        "rmsprop",
        "rprop",
        "sgd",
        "sgd-momentum",
    }
)
_ADAM = {"loop_copies": 2.0, "lingering_copies": 1.0, "list_copies": 1.0}
_WHOLE = "{} looks at a whole matrix at a time, and a shard holds some of its rows"

# State: as torch documents it (exp_avg and exp_avg_sq, momentum_buffer). Moved: what torch's
# default implementations read and write, pass by pass, nothing fused. Copies: the temporaries of
# the same code. `engines.state.optimizer_footprint` counts all of them, and a test compares.
# `fused=True` moves 32
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
        # Of parameters in bf16: `engines.state.compensated_adamw`, tensor by tensor everywhere.
        OptimizerProfile(
            name="adamw-compensated",
            state_bytes_per_element=16,
            moved_bytes_per_element=364,
            loop_copies=10.0,
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
    """Return the optimizer's state for the trainable parameters of `units`, and the cost of its
    step.

    With `shards` ranks: of one of them. FSDP2 cuts every parameter along its first dimension.

    Raises:
        InputError: the state follows shapes, and the profile of the model has none.
    """
    units = list(units)
    # Equal units of a model share an object: each is looked at once.
    alike = Counter(map(id, units))
    trained = {id(unit): unit for unit in units if unit.trainable_parameters}
    units = [unit for unit in units if id(unit) in trained]
    sizes: Counter[float] = Counter()
    for number, unit in trained.items():
        for size_bytes, count in _tensor_bytes(unit):
            sizes[size_bytes] += count * alike[number]
    tensors = sizes.total()
    operations = tensors * optimizer.moved_bytes_per_element / PASS_BYTES
    if optimizer.units is not None:
        measured = [optimizer.units[unit.name] for unit in units if unit.name in optimizer.units]
        working = (optimizer.working_bytes or 0.0) / shards
        return Upkeep(
            name=optimizer.name,
            state_bytes=sum(unit.state_bytes for unit in measured) / shards,
            moved_bytes=sum(unit.moved_bytes for unit in measured) / shards,
            flop=sum(unit.flop for unit in measured) / shards,
            operations=operations,
            loop_bytes=working,
            list_bytes=working,
        )
    if optimizer.law is Law.ELEMENTWISE:
        total = sum(unit.gradient_bytes for unit in units) / shards
        return _elementwise(optimizer, total, sizes, shards, operations)
    steps = [
        (step, shape.count)
        for unit in units
        for shape in _shapes(optimizer, unit)
        for step in [step_of(optimizer, _cut(shape, shards), is_hidden=unit.is_block)]
    ]
    listed = [(step, count) for step, count in steps if step.list_bytes is not None]
    looped = [(step, count) for step, count in steps if step.list_bytes is None]
    return Upkeep(
        name=optimizer.name,
        state_bytes=sum(count * step.state_bytes for step, count in steps),
        moved_bytes=sum(count * step.moved_bytes for step, count in steps),
        flop=sum(count * step.flop for step, count in steps),
        operations=operations,
        read_back=operations if optimizer.law is Law.FACTORED else 0.0,
        loop_bytes=_loop_bytes(steps),
        list_bytes=max(
            _loop_bytes(looped), sum(count * (step.list_bytes or 0.0) for step, count in listed)
        ),
    )


def _elementwise(
    optimizer: OptimizerProfile,
    total: float,
    sizes: Mapping[float, int],
    shards: int,
    operations: float,
) -> Upkeep:
    """Bytes of the parameters are all that counts: gradients have as many."""
    loop = _loop_bytes([(plain_step(optimizer, n / shards), count) for n, count in sizes.items()])
    new = sum(count * mapped(n / shards) for n, count in sizes.items())
    copies = optimizer.list_copies
    return Upkeep(
        name=optimizer.name,
        state_bytes=total / FP32_BYTES * optimizer.state_bytes_per_element,
        moved_bytes=total / FP32_BYTES * optimizer.moved_bytes_per_element,
        flop=0.0,
        operations=operations,
        loop_bytes=loop,
        list_bytes=loop if copies is None else copies * total,
        new_bytes=optimizer.loop_copies * new,
    )


def _tensor_bytes(unit: UnitProfile) -> Iterator[tuple[float, int]]:
    """Sizes of a unit's tensors; where shapes are not known it is taken as one."""
    if unit.shapes:
        yield from ((float(shape.nbytes), shape.count) for shape in unit.shapes)
    else:
        yield float(unit.gradient_bytes), 1


def _loop_bytes(steps: Sequence[tuple[TensorStep, int]]) -> float:
    """The tensor that takes most, after another one that left most: the order is not known."""
    if not steps:
        return 0.0
    largest, count = max(steps, key=lambda step: step[0].loop_bytes)
    others = [step.lingering_bytes for step, _ in steps if step is not largest]
    if count > 1:
        others.append(largest.lingering_bytes)
    return largest.loop_bytes + max(others, default=0.0)


def _shapes(optimizer: OptimizerProfile, unit: UnitProfile) -> tuple[ParameterShape, ...]:
    if not unit.shapes:
        raise InputError(
            f"what {optimizer.name} keeps follows the shapes of parameters, and the profile has"
            f" none for `{unit.name}`",
            hints=["profile the model again: `advise profile MODEL -o model.json`"],
        )
    return unit.shapes


def _cut(shape: ParameterShape, shards: int) -> ParameterShape:
    """The first rank's part, which is the largest."""
    if shards == 1 or not shape.sizes:
        return shape
    first, *rest = shape.sizes
    return shape.model_copy(update={"sizes": (-(-first // shards), *rest)})
