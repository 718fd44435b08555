"""Profile of a model: parameters, FLOP, activations and traffic, unit by unit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import Literal, Self

from pydantic import (
    Field,
    JsonValue,
    NonNegativeInt,
    PositiveInt,
    field_validator,
    model_validator,
)

from profiles.errors import InputError
from profiles.model.affine import Affine as Affine
from profiles.model.crossings import DeviceCrossing
from profiles.model.flow import GLUE as GLUE
from profiles.model.flow import LOSS as LOSS
from profiles.model.flow import Flow
from profiles.model.layers import LayerCost, LayerKind
from profiles.model.loss_terms import LossTerms as LossTerms
from profiles.model.source import BACKWARD, CaptureSource, ValueRead
from profiles.model.times import BlockTimes
from profiles.model.work import AttentionCall, Fusible, Product, ProductKind
from profiles.record import Document, Record
from profiles.record.bounds import MOST_UNITS, Batch, Tokens

# A unit smaller than this share of the largest one is not sharded on its own: its gather would cost
# a full latency and free next to nothing. It stays with the root group.
SMALLEST_SHARD_FRACTION = 1 / 64
# Beside blocks that come and go, other units count for less: what they would free is there only as
# long as the root group is. A quarter of a block is a choice, not a measurement.
SMALLEST_BESIDE_BLOCKS = 1 / 4

MOST_TIMES = 100
"""Devices, numerics and microbatches that one profile was timed for."""


class Numerics(StrEnum):
    """Number formats of a forward pass. Those in bf16 stand for fp16 too, of the same bytes."""

    AS_BUILT = "as_built"  # parameters and inputs as the user made them
    BF16 = "bf16"  # parameters and inputs cast to bfloat16 for forward and backward (FSDP)
    BF16_AUTOCAST = "bf16_autocast"  # torch.autocast chooses per operation (DDP)


class UnitCost(Record):
    """Cost of one forward and backward of a unit on one device, for one kind of numerics.

    Bytes and FLOP are for the whole unit, all its calls of one microbatch together.

    Attributes:
        forward_flop, backward_flop: matrix multiplications, convolutions and attention; 2 FLOP per
            multiply-add, as `torch.utils.flop_counter` counts; of a convolution's weight the
            gradient by its groups.
        forward_moved_bytes, backward_moved_bytes: bytes that the operations read and write in
            device memory, one operation after another, nothing fused.
        forward_cycles, backward_cycles: beyond those in which these bytes are moved, of a
            processor's core (`profiles.capture.operators.core_cycles`; 0 if counted from a config),
            or of an accelerator's multiprocessors (`profiles.model.kernel_cycles`).
        forward_kernels, backward_kernels: operations launched; those that a loop in C++ launches
            (GRU) count for less, as they take the host less.
        activation_bytes: kept from forward to backward, parameters and the batch not counted.
        selective_activation_bytes: the same under selective recompute (matmul and attention
            outputs are kept, all else is computed again); of units that are no blocks what they
            keep then.
        input_bytes: the unit's floating inputs and masks; what full recompute keeps. A tensor that
            several blocks take is counted in the first of them.
        output_bytes: the unit's tensors handed on.
        forward_transient_bytes: highest moment of live tensors within the unit's forward, above
            what was live when it began.
        backward_transient_bytes: the same for its backward, gradients of parameters not counted.
        layers: in the order of their first calls. What the unit takes and they do not account for
            comes before the first of them, or from outside the unit: it is whole on every rank.
        products, attention, fusible: of what lies outside the stretches of `layers`; see `Stretch`.
    """

    forward_flop: Affine = Affine()
    backward_flop: Affine = Affine()
    forward_moved_bytes: Affine = Affine()
    backward_moved_bytes: Affine = Affine()
    forward_cycles: Affine = Affine()
    backward_cycles: Affine = Affine()
    forward_kernels: NonNegativeInt = 0
    backward_kernels: NonNegativeInt = 0
    activation_bytes: Affine = Affine()
    selective_activation_bytes: Affine = Affine()
    input_bytes: Affine = Affine()
    output_bytes: Affine = Affine()
    forward_transient_bytes: Affine = Affine()
    backward_transient_bytes: Affine = Affine()
    layers: tuple[LayerCost, ...] = ()
    products: tuple[Product, ...] = ()
    attention: tuple[AttentionCall, ...] = ()
    fusible: tuple[Fusible, ...] = ()

    @property
    def has_convolutions(self) -> bool:
        """True if it has a convolution, as a layer or as noted work."""
        if any(layer.kind is LayerKind.CONVOLUTION for layer in self.layers):
            return True
        outside = (p for layer in self.layers for p in (*layer.own.products, *layer.after.products))
        kinds = (product.kind for product in (*self.products, *outside))
        return any(kind is ProductKind.CONVOLUTION for kind in kinds)

    def calls(self) -> Iterator[AttentionCall]:
        """Every call of attention that was noted."""
        yield from self.attention
        for layer in self.layers:
            yield from layer.own.attention
            yield from layer.after.attention


class ParameterShape(Record):
    """Trainable parameters of one shape: what an optimizer may make its states from."""

    sizes: tuple[NonNegativeInt, ...]
    element_bytes: PositiveInt
    count: PositiveInt = 1

    @property
    def elements(self) -> int:
        """Of one of them."""
        return prod(self.sizes)

    @property
    def nbytes(self) -> int:
        """Of one of them."""
        return self.elements * self.element_bytes


class UnitProfile(Record):
    """A module treated as one piece: an element of a repeated list of blocks, or a module outside.

    Attributes:
        name: module path in the model, or `GLUE` or `LOSS`.
        kind: class name.
        is_block: element of a repeated list; recompute and sharding work on blocks.
        parameters, trainable_parameters: element counts; a tied tensor is counted in the first
            unit that holds it.
        parameter_bytes: of those parameters as built.
        gradient_bytes: of the trainable ones, as built.
        dtypes: the parameters' dtypes, sorted.
        trained_dtypes: of those that are trained; empty where they are the same, or none.
        shapes: of the trainable parameters, equal ones together; empty where they are not known.
        whole_bytes: of parameters that stay whole on every rank where the others are sharded (see
            `profiles.capture.module.whole_parameters`).
        whole_shapes: as `shapes`, of the trainable ones among these.
        experts: how many a module in it holds as weights with a dimension of their own; ascending.
        is_shared: a parameter of the unit is tied to, or used by code of, another place; the unit
            cannot be gathered and released on its own.
        costs: per kind of numerics that was captured.
    """

    name: str
    kind: str
    is_block: bool = False
    parameters: NonNegativeInt = 0
    trainable_parameters: NonNegativeInt = 0
    parameter_bytes: NonNegativeInt = 0
    gradient_bytes: NonNegativeInt = 0
    buffer_bytes: NonNegativeInt = 0
    dtypes: tuple[str, ...] = ()
    trained_dtypes: tuple[str, ...] = ()
    shapes: tuple[ParameterShape, ...] = ()
    whole_bytes: NonNegativeInt = 0
    whole_shapes: tuple[ParameterShape, ...] = ()
    experts: tuple[PositiveInt, ...] = ()
    is_shared: bool = False
    costs: dict[Numerics, UnitCost]

    def cost(self, numerics: Numerics) -> UnitCost:
        """Raises InputError where the unit was profiled in other numerics."""
        if numerics not in self.costs:
            known = ", ".join(self.costs)
            raise InputError(
                f"unit `{self.name}` has `costs` of {known}, and none of `{numerics}`",
                hints=["profile the model in this precision too"],
            )
        return self.costs[numerics]

    def flop(self, samples: float, numerics: Numerics = Numerics.AS_BUILT) -> float:
        """Model FLOP of one forward and backward over `samples`, without recompute."""
        cost = self.cost(numerics)
        return cost.forward_flop.at(samples) + cost.backward_flop.at(samples)


class ModelProfile(Document):
    """A model and one sample, looked at without changing either.

    Attributes:
        units: in the order of their first call; the loss last. Equal ones have the same object as
            `costs`, so that what follows from it is worked out once.
        dtype: of most parameters ("float32"); what `Numerics.AS_BUILT` runs in.
        samples: batch size of the sample that was looked at.
        tokens_per_sample: sequence length where the sample is token ids, else None.
        batch_bytes: the sample itself.
        batch_dims: which values of a batch have rows, and along which dimension: see
            `profiles.capture.batch.dims`.
        tied: groups of parameter names that are one tensor.
        unused: trainable parameters that got no gradient from the sample.
        sparse_gradients: parameters whose gradients are sparse.
        batch_norms: batch normalisation modules, in whatever mode they are.
        has_loss: whether the loss was part of what was looked at.
        loss_terms: the targets that the loss is a mean over; None where that was not seen.
        logits_read_by: the function that reads what the last linear layer returns, other than a
            cross-entropy over its rows; empty where none was seen.
        times: measured times of the units, by device, numerics and microbatch.
        is_proportional: the model did not run at twice the sample's batch; costs are taken to grow
            with the batch, nothing is taken to be fixed.
        flow: which calls feed which, `AS_BUILT`.
        glue: per kind of numerics, the costs of `GLUE` by the unit that its code runs before, whose
            pipeline stage runs it. What no gradient goes back through is under `GLUE`: every stage
            that needs it runs it. Empty where that is all.
        experts_per_token: of a mixture of experts, how many a token is sent to; None where there is
            no mixture, or its configuration does not say.
        devices: that the parts of the module were put on by hand; empty where it is in one place.
        crossings: between those devices, per kind of numerics.
        config: the content of the config.json that it was made from, or the shape of a bundled
            model: it can be counted again at another size (`advisor.inputs.model_sizes`); else
            None.
        factory: `pkg.module:factory` that it was captured from, which can be called again; else
            None.
        stack: the software whose kernels the costs are of, where it is not what was captured.
        source: how costs were counted.
        reads: code that acts on values of the sample; the profile is of the sample's path.
        on_processor: whether operators were counted as processors run them, or as accelerators do;
            None where that was not told apart.
    """

    name: str
    units: tuple[UnitProfile, ...] = Field(max_length=MOST_UNITS)
    dtype: str
    samples: Batch
    tokens_per_sample: Tokens | None = None
    batch_bytes: Affine = Affine()
    batch_dims: dict[str, int | Literal["elements"] | None] = Field(default_factory=dict)
    tied: tuple[tuple[str, ...], ...] = ()
    unused: tuple[str, ...] = ()
    sparse_gradients: tuple[str, ...] = ()
    batch_norms: tuple[str, ...] = ()
    has_loss: bool = False
    loss_terms: LossTerms | None = None
    logits_read_by: str = ""
    times: tuple[BlockTimes, ...] = Field((), max_length=MOST_TIMES)
    is_proportional: bool = False
    flow: Flow = Flow()
    glue: dict[Numerics, dict[str, UnitCost]] = Field(default_factory=dict)
    experts_per_token: PositiveInt | None = None
    devices: tuple[str, ...] = ()
    crossings: dict[Numerics, tuple[DeviceCrossing, ...]] = Field(default_factory=dict)
    config: dict[str, JsonValue] | None = None
    factory: str | None = None
    stack: str = ""
    source: CaptureSource = CaptureSource.FAKE
    reads: tuple[ValueRead, ...] = ()
    on_processor: bool | None = None

    def to_json(self) -> str:
        """The same bytes for the same value; without defaults, which are two thirds of it."""
        data = self.model_dump(mode="json", exclude_defaults=True)
        data = {"schema_version": self.schema_version, **data}
        return json.dumps(data, indent=2, ensure_ascii=False) + "\n"

    @field_validator("units")
    @classmethod
    def _share_costs(cls, units: tuple[UnitProfile, ...]) -> tuple[UnitProfile, ...]:
        shared: dict[tuple[tuple[Numerics, UnitCost], ...], dict[Numerics, UnitCost]] = {}
        own = [shared.setdefault(tuple(unit.costs.items()), unit.costs) for unit in units]
        return tuple(
            unit if unit.costs is costs else unit.model_copy(update={"costs": costs})
            for unit, costs in zip(units, own, strict=True)
        )

    @model_validator(mode="after")
    def _require_costs(self) -> Self:
        kinds = self.units[0].costs.keys() if self.units else ()
        for unit in self.units:
            if not unit.costs or unit.costs.keys() != kinds:
                raise InputError(
                    f"unit `{unit.name}` wants `costs` of the same numerics as every unit, and of"
                    " one at least"
                )
        return self

    @cached_property
    def parameters(self) -> int:
        return sum(unit.parameters for unit in self.units)

    @cached_property
    def trainable_parameters(self) -> int:
        return sum(unit.trainable_parameters for unit in self.units)

    @cached_property
    def parameter_bytes(self) -> int:
        return sum(unit.parameter_bytes for unit in self.units)

    @cached_property
    def gradient_bytes(self) -> int:
        return sum(unit.gradient_bytes for unit in self.units)

    @cached_property
    def buffer_bytes(self) -> int:
        return sum(unit.buffer_bytes for unit in self.units)

    @property
    def numerics(self) -> tuple[Numerics, ...]:
        """The kinds of numerics that were captured."""
        return tuple(self.units[0].costs)

    @property
    def largest_unit(self) -> UnitProfile:
        """The unit with the most parameter bytes: what must fit a device whole without TP."""
        return max(self.units, key=lambda unit: unit.parameter_bytes)

    @property
    def path_varies(self) -> bool:
        """True if another batch may take another path than the sample."""
        acting = any(read.operation != BACKWARD for read in self.reads)
        return acting or self.source is CaptureSource.PARAMETERS

    @property
    def may_skip_parameters(self) -> bool:
        """True if a step may leave trainable parameters without a gradient."""
        return bool(self.unused) or self.path_varies

    @property
    def may_skip_units(self) -> bool:
        """True if another batch may call other units: code that calls units acts on values."""
        callers = {GLUE, *(caller for _, caller in self.flow.inside)}
        return self.source is CaptureSource.PARAMETERS or any(
            read.unit in callers for read in self.reads
        )

    @cached_property
    def has_convolutions(self) -> bool:
        return any(cost.has_convolutions for unit in self.units for cost in unit.costs.values())

    @cached_property
    def trained_dtypes(self) -> frozenset[str]:
        """Dtypes of trained parameters."""
        return frozenset(d for unit in self.units for d in unit.trained_dtypes or unit.dtypes)

    def blocks(self) -> Iterator[UnitProfile]:
        """The repeated blocks, in call order."""
        return (unit for unit in self.units if unit.is_block)

    def shard_units(self) -> tuple[UnitProfile, ...]:
        """The units that are sharded, gathered and released on their own under FSDP.

        The rest of the parameters (small units, and units whose parameters are used elsewhere too)
        form the root group, which stays gathered from the first forward to the last backward. It
        is all of them where ranks may call different units: a gather needs every rank.
        """
        return self.separate_units

    @cached_property
    def separate_units(self) -> tuple[UnitProfile, ...]:
        """See `shard_units`."""
        if self.may_skip_units or not self.units:
            return ()
        smallest = self.largest_unit.parameter_bytes * SMALLEST_SHARD_FRACTION
        block = max((unit.parameter_bytes for unit in self.blocks()), default=0)
        smallest_other = max(smallest, block * SMALLEST_BESIDE_BLOCKS)
        return tuple(
            unit
            for unit in self.units
            if unit.parameter_bytes > 0
            and unit.parameter_bytes >= (smallest if unit.is_block else smallest_other)
            and not unit.is_shared
            and unit.name not in (GLUE, LOSS)
        )

    @cached_property
    def reduced_at_end(self) -> frozenset[str]:
        """Units whose gradients FSDP2 reduces, and whose parameters it releases, when the backward
        of the whole model is over: no gradient goes back through what they take (the ids of a table
        of embeddings), or they write to what others made."""
        flow = self.flow
        called = {call.unit for call in flow.calls} - {unit for unit, _ in flow.inside}
        fed = {flow.calls[e.target].unit for e in flow.edges if flow.value(e).needs_gradient}
        return frozenset(called - fed - {GLUE, LOSS}) | flow.changing_others

    def flop(self, samples: float, numerics: Numerics = Numerics.AS_BUILT) -> float:
        """Model FLOP of one forward and backward over `samples`, without recompute."""
        return sum(unit.flop(samples, numerics) for unit in self.units)
