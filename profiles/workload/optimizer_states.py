"""Laws of optimizer states: the bytes of state of a tensor, and the cost of its step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from pydantic import NonNegativeFloat

from profiles.model.profile import ParameterShape
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
    """Relation of the state to a parameter's shape."""

    ELEMENTWISE = "elementwise"  # so many bytes an element, in the parameter's dtype
    FACTORED = "factored"  # torch.optim.Adafactor: rows and columns of a matrix
    ORTHOGONAL = "orthogonal"  # torch.optim.Muon for matrices of blocks, AdamW for all else
    BLOCKS = "blocks"  # bitsandbytes: 8-bit moments with scales
    WHOLE_BLOCKS = "whole_blocks"  # torchao: the same where blocks divide the tensor


class UnitUpkeep(Record):
    """Measured cost of stepping one unit's parameters."""

    state_bytes: NonNegativeFloat
    moved_bytes: NonNegativeFloat
    flop: NonNegativeFloat = 0.0

    def part(self, share: float) -> UnitUpkeep:
        """Cost of stepping this share of the parameters."""
        return UnitUpkeep(
            state_bytes=self.state_bytes * share,
            moved_bytes=self.moved_bytes * share,
            flop=self.flop * share,
        )


class Indivisible(Record):
    """Reasons why a step on parts is not the step on the whole; empty where it is.

    Attributes:
        rows: parts are some rows of a matrix, as in shards.
        columns: some of its columns, as in layers that are split along their inputs.
        parameters: some parameters of the model, as in stages.
    """

    rows: str = ""
    columns: str = ""
    parameters: str = ""


DIVISIBLE = Indivisible()


class OptimizerProfile(Record):
    """States and traffic of an optimizer.

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
        whole_because, columns_because, together_because: as in `Indivisible`.
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
    columns_because: str = ""
    together_because: str = ""

    @property
    def indivisible(self) -> Indivisible:
        """Return why it cannot step parts of a model."""
        return Indivisible(
            rows=self.whole_because,
            columns=self.columns_because,
            parameters=self.together_because,
        )

    @property
    def is_elementwise(self) -> bool:
        """True if its states have the size of gradients, whatever their shapes."""
        return self.law is Law.ELEMENTWISE and self.units is None

    def of_parts(self, sizes: Mapping[str, tuple[float, float]]) -> OptimizerProfile:
        """Measured units as a rank of split layers or experts steps them: states, work and
        temporaries in proportion to its parameters.

        Temporaries are those of the largest unit or of all, as the step goes one by one or not.

        Args:
            sizes: by unit, bytes of its gradients on a rank and in all.
        """
        if self.units is None:
            return self
        shares = {name: own / whole if whole else 1.0 for name, (own, whole) in sizes.items()}
        update: dict[str, object] = {
            "units": {name: unit.part(shares.get(name, 1.0)) for name, unit in self.units.items()}
        }
        if self.working_bytes and any(whole for _, whole in sizes.values()):
            own, whole = zip(*sizes.values(), strict=True)
            ratio = max(sum(own) / sum(whole), max(own) / max(whole))
            update["working_bytes"] = self.working_bytes * ratio
        return self.model_copy(update=update)


@dataclass(frozen=True, slots=True)
class TensorStep:
    """Of one tensor. `list_bytes` None: stepped by itself everywhere."""

    state_bytes: float
    moved_bytes: float
    flop: float = 0.0
    loop_bytes: float = 0.0
    lingering_bytes: float = 0.0
    list_bytes: float | None = None


def step_of(optimizer: OptimizerProfile, shape: ParameterShape, *, is_hidden: bool) -> TensorStep:
    """Of a tensor of this shape; `is_hidden`: it belongs to a block."""
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
    plain = plain_step(optimizer, shape.nbytes)
    if optimizer.law is not Law.BLOCKS:
        return plain
    # bitsandbytes keeps fp32 moments whatever the parameter is (`get_state_buffer`).
    whole = shape.elements * optimizer.state_bytes_per_element
    return TensorStep(state_bytes=whole, moved_bytes=plain.moved_bytes)


def plain_step(optimizer: OptimizerProfile, size_bytes: float) -> TensorStep:
    """Step of an optimizer that is described by bytes per element alone."""
    elements = size_bytes / FP32_BYTES
    copies = optimizer.list_copies
    return TensorStep(
        state_bytes=elements * optimizer.state_bytes_per_element,
        moved_bytes=elements * optimizer.moved_bytes_per_element,
        loop_bytes=size_bytes * optimizer.loop_copies,
        lingering_bytes=size_bytes * optimizer.lingering_copies,
        list_bytes=None if copies is None else size_bytes * copies,
    )


def _factored(shape: ParameterShape) -> TensorStep:
    """torch/optim/_adafactor.py: a row and a column of variances for every matrix of the last two
    dimensions; the estimate that they make is as large as the parameter."""
    *leading, rows, columns = shape.sizes
    lines = prod(leading) * (rows + columns) * shape.element_bytes
    return TensorStep(
        state_bytes=lines,
        # Norm of the parameter, of rows, of columns: 3 reads. Product: a write; its division, clamp
        # and root: 6; times the gradient: 3; its norm: 1; into the parameter: 3. Lines: 8 passes
        # over each, means of the rows and the product's inputs.
        moved_bytes=17 * shape.nbytes,
        loop_bytes=shape.nbytes + lines,
        lingering_bytes=shape.nbytes,
    )


def _orthogonal(shape: ParameterShape) -> TensorStep:
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
    return TensorStep(
        state_bytes=shape.nbytes,
        moved_bytes=moved,
        flop=NEWTON_SCHULZ_STEPS * (4.0 * m * n + 2.0 * m**3),
        # The look-ahead, the update before and after a step, and two m x m.
        loop_bytes=size * n + 2 * half * n + 2 * half * m * m,
    )


def _blocks(optimizer: OptimizerProfile, shape: ParameterShape, *, table_bytes: int) -> TensorStep:
    """Two moments of a byte an element, and a scale for every block of each."""
    scales = 2 * FP32_BYTES * -(-shape.elements // BLOCK_ELEMENTS)
    return TensorStep(
        state_bytes=2 * shape.elements + scales + table_bytes,
        moved_bytes=3 * shape.nbytes + 2 * (2 * shape.elements + scales) + table_bytes,
        loop_bytes=optimizer.loop_copies * FP32_BYTES * shape.elements,
    )
