"""What each unit of a model asks of a device at one microbatch size: floats, nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from profiles.model import LOSS, ModelProfile, Numerics

# bfloat16 is 2 bytes, float32 is 4: what a cast leaves of a parameter.
BF16_SHARE = 2 / 4


@dataclass(frozen=True, slots=True)
class UnitLoad:
    """A unit at one microbatch size. `is_separate`: gathered and released on its own by FSDP."""

    name: str
    is_block: bool
    is_separate: bool
    parameter_bytes: float
    gradient_bytes: float
    forward_flop: float
    backward_flop: float
    forward_moved_bytes: float
    backward_moved_bytes: float
    forward_kernels: int
    backward_kernels: int
    activation_bytes: float
    selective_bytes: float
    input_bytes: float
    output_bytes: float
    forward_transient_bytes: float
    backward_transient_bytes: float


@dataclass(frozen=True, slots=True)
class Loads:
    """All units in call order, and the sums that several formulas need.

    `compute_share` is what a parameter's copy for computing takes of it: 1/2 where an fp32 model
    runs in bf16, else 1. `root` is everything that is not a separate unit.
    """

    units: tuple[UnitLoad, ...]
    samples: int
    compute_share: float
    parameter_bytes: float
    gradient_bytes: float
    root_parameter_bytes: float
    root_gradient_bytes: float
    buffer_bytes: float

    @property
    def separate(self) -> tuple[UnitLoad, ...]:
        return tuple(unit for unit in self.units if unit.is_separate)


def loads_of(model: ModelProfile, *, numerics: Numerics, samples: int) -> Loads:
    """Every unit of `model` at a microbatch of `samples` under `numerics`."""
    separate = {unit.name for unit in model.shard_units()}
    units = []
    for unit in model.units:
        cost = unit.cost(numerics)
        units.append(
            UnitLoad(
                name=unit.name,
                is_block=unit.is_block,
                # A model that is one unit is its own root: there is nothing to release.
                is_separate=unit.name in separate and unit.name != "",
                parameter_bytes=unit.parameter_bytes,
                gradient_bytes=unit.gradient_bytes,
                forward_flop=cost.forward_flop.at(samples),
                backward_flop=cost.backward_flop.at(samples),
                forward_moved_bytes=cost.forward_moved_bytes.at(samples),
                backward_moved_bytes=cost.backward_moved_bytes.at(samples),
                forward_kernels=cost.forward_kernels,
                backward_kernels=cost.backward_kernels,
                activation_bytes=cost.activation_bytes.at(samples),
                selective_bytes=cost.selective_activation_bytes.at(samples),
                input_bytes=cost.input_bytes.at(samples),
                output_bytes=cost.output_bytes.at(samples),
                forward_transient_bytes=cost.forward_transient_bytes.at(samples),
                backward_transient_bytes=cost.backward_transient_bytes.at(samples),
            )
        )
    root = [unit for unit in units if not unit.is_separate]
    return Loads(
        units=tuple(units),
        samples=samples,
        compute_share=1.0 if numerics is Numerics.AS_BUILT else BF16_SHARE,
        parameter_bytes=sum(unit.parameter_bytes for unit in units),
        gradient_bytes=sum(unit.gradient_bytes for unit in units),
        root_parameter_bytes=sum(unit.parameter_bytes for unit in root),
        root_gradient_bytes=sum(unit.gradient_bytes for unit in root),
        buffer_bytes=model.buffer_bytes,
    )


def describe(unit: UnitLoad) -> str:
    """The unit as a sentence names it."""
    if unit.name == LOSS:
        return "the loss"
    return f"`{unit.name}`" if unit.name else "the model"
