"""A model as its forward pass declares it: units, parameters, and the layers they are used in."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeVar

from profiles.closed_forms.families import kernels
from profiles.closed_forms.families import operations as ops
from profiles.closed_forms.families.gradients import has_gradient
from profiles.closed_forms.families.layer_calls import LayerCalls
from profiles.closed_forms.families.memory import DType
from profiles.closed_forms.families.tape import Array, Tape
from profiles.closed_forms.families.wiring import Wiring
from profiles.model.layers import LayerKind
from profiles.model.profile import LOSS, Numerics
from profiles.trace.scopes import LayerShape

Output = TypeVar("Output", bound=Array | tuple[Array, ...])


class FamilyRun:
    """One run of one model over `samples` sequences of `length`; `kind` is the class name.

    Parameters are declared where they are used, so a family's code is the model's forward and
    nothing else. Of layers that are alike only some are run: see `layers`.

    Attributes:
        units: by name, those that are run.
        order: all names, in the order of first calls.
        ties: the names of each tied parameter, by its first.
        batch_bytes: of the batch as it was handed in.
        wiring: which calls feed which.
    """

    def __init__(
        self,
        kind: str,
        numerics: Numerics,
        *,
        samples: int,
        length: int,
        on_processor: bool = True,
    ) -> None:
        self.kind = kind
        self.tape = Tape(numerics, on_processor=on_processor)
        self.samples = samples
        self.length = length
        self.units: dict[str, FamilyUnit] = {}
        self.order: list[str] = []
        self.ties: dict[str, list[str]] = {}
        self.batch_bytes = 0
        self.wiring = Wiring()
        self._twins: dict[str, str] = {}

    def batch(self, *shape: int, dtype: DType = DType.INT64) -> Array:
        """A tensor of the batch, in fp32 or of integers; under mixed precision it is cast."""
        array = self.tape.known((self.samples, *shape), dtype)
        self.batch_bytes += array.size_bytes
        return self.lowered(array)

    def ids(self) -> Array:
        """Token ids, or labels of the tokens."""
        return self.batch(self.length)

    def unit(self, name: str, kind: str, *, is_block: bool = False) -> FamilyUnit:
        """The unit of that name, to be called; `kind` is its class."""
        if name not in self.units:
            self.units[name] = FamilyUnit(self, name, kind, is_block)
            self.order.append(name)
        return self.units[name]

    def layers(self, prefix: str, kinds: Sequence[Hashable]) -> Iterator[int]:
        """The layers that have to be run, by index; their units are called `prefix.index`.

        Two of each kind and the last one: the first of a kind also takes what they share (masks,
        rotary tables) into memory, the others cost what the second does.
        """
        seen: dict[Hashable, list[int]] = {}
        for index, kind in enumerate(kinds):
            alike = seen.setdefault(kind, [])
            if len(alike) < 2 or index == len(kinds) - 1:
                alike.append(index)
                yield index
            else:
                self._twins[f"{prefix}.{index}"] = f"{prefix}.{alike[1]}"
                self.order.append(f"{prefix}.{index}")

    def twin(self, name: str) -> str:
        """The unit that was run in place of this one; mostly itself."""
        return self._twins.get(name, name)

    def tied_units(self) -> frozenset[str]:
        """Units that hold a parameter together with another one."""
        parameters = (p for unit in self.units.values() for p in unit.parameters.values())
        holders = (parameter.storage.made.holders for parameter in parameters)
        return frozenset(name for names in holders if len(names) > 1 for name in names)

    def unused(self) -> tuple[str, ...]:
        """Names of parameters that got no gradient; to be asked after backward."""
        return tuple(
            name
            for unit in self.units.values()
            for name, parameter in unit.parameters.items()
            if not has_gradient(parameter)
        )

    def lowered(self, array: Array) -> Array:
        """As mixed precision hands it to the model and to each of its units."""
        is_lowered = self.tape.numerics is Numerics.BF16 and array.dtype is DType.FLOAT32
        return ops.cast(array, DType.BFLOAT16) if is_lowered else array

    def loss_of(self, output: Array, loss: Callable[[FamilyRun, Array], Array]) -> Array:
        """The loss by a function of its own, which takes the model's output; backward starts there.

        Mixed precision hands that out in fp32.
        """
        sources = self.wiring.sources([output])
        self.tape.enter(LOSS, [output], is_block=False)
        if self.tape.numerics is Numerics.BF16:
            output = ops.cast(output, DType.FLOAT32)
        made = loss(self, output)
        self.tape.leave([made])
        self.wiring.note(LOSS, sources, [made])
        return made

    def finish(self, loss: Array, *outputs: Array) -> Array:
        """The loss, from which backward starts; what came after the last unit made it.

        Mixed precision hands it out in fp32, and so the other outputs.
        """
        self.wiring.finish(loss)
        self.tape.scope.name = LOSS
        if self.tape.numerics is not Numerics.BF16:
            return loss
        loss, *_ = [ops.cast(output, DType.FLOAT32) for output in (loss, *outputs)]
        return loss


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """A model that is ready to be run.

    Attributes:
        kind: the class that transformers builds.
        run: its forward, to the loss and whatever else it returns; to the output alone where the
            loss is a function of its own.
        loss: that function; None where the model computes its loss.
        takes_tokens: whether the batch is token ids; else it is images.
        longest: the longest sequence that it has positions for, None if there is no limit.
        experts_per_token: that a mixture sends a token to; None where there is none.
    """

    kind: str
    run: Callable[[FamilyRun], tuple[Array, ...]]
    loss: Callable[[FamilyRun, Array], Array] | None = None
    takes_tokens: bool = True
    longest: int | None = None
    experts_per_token: int | None = None


@dataclass(eq=False)
class FamilyUnit:
    """A module treated as one piece: see `profiles.model.profile.UnitProfile`.

    Attributes:
        parameters: by path; a tied one is in the first unit alone.
        buffer_bytes: of registered buffers.
        layers: of the latest call.
    """

    network: FamilyRun
    name: str
    kind: str
    is_block: bool
    parameters: dict[str, Array] = field(default_factory=dict)
    buffer_bytes: int = 0
    layers: LayerCalls = field(init=False)

    def __call__(
        self, function: Callable[..., Output], *inputs: Array | None, **options: object
    ) -> Output:
        """`function(unit, *inputs, **options)`, counted as a call of this unit."""
        tape = self.network.tape
        inputs = tuple(x and self.network.lowered(x) for x in inputs)
        given = [x for x in inputs if x is not None]
        sources = self.network.wiring.sources(given)
        tape.enter(self.name, given, is_block=self.is_block)
        self.layers = LayerCalls(tape.scope, tape.features)
        del given  # as the call has it, so that it is released with it
        with self.module(self.kind):
            output = function(self, *inputs, **options)
        outputs = output if isinstance(output, tuple) else (output,)
        self.layers.finish(outputs)
        tape.leave(outputs)
        self.network.wiring.note(self.name, sources, outputs)
        return output

    def parameter(self, path: str, *shape: int) -> Array:
        """A trainable parameter by its path in the unit; made on first use, in fp32."""
        name = f"{self.name}.{path}"
        if name not in self.parameters:
            tape = self.network.tape
            dtype = DType.BFLOAT16 if tape.numerics is Numerics.BF16 else DType.FLOAT32
            self.parameters[name] = tape.known(shape, dtype, holders=(self.name,), trainable=True)
        return self.parameters[name]

    def tie(self, path: str, parameter: Array) -> Array:
        """Another unit's parameter under a name of this one."""
        made = parameter.storage.made
        first = next(
            name
            for unit in self.network.units.values()
            for name, known in unit.parameters.items()
            if known is parameter
        )
        self.network.ties.setdefault(first, [first]).append(f"{self.name}.{path}")
        made.holders |= {self.name}
        return parameter

    def buffer(self, *shape: int, dtype: DType = DType.FLOAT32) -> Array:
        """A registered buffer; each call makes another."""
        array = self.network.tape.known(shape, dtype)
        self.buffer_bytes += array.size_bytes
        return array

    def module(self, kind: str) -> AbstractContextManager[None]:
        """A module of that class within the unit, for what runs in the context."""
        return self.network.tape.module(kind)

    # Layers of torch.nn

    def layer(
        self,
        path: str,
        kind: LayerKind,
        given: Array,
        weight: Array,
        bias: Array | None,
        call: Callable[[], Array],
    ) -> Array:
        """`call()` as the call of the weight layer `path`; only own parameters count as its."""
        sizes = weight.shape
        flipped = kind in (LayerKind.EMBEDDING, LayerKind.TRANSPOSED)
        weight_bytes, bias_bytes = (
            x.elements * DType.FLOAT32.size_bytes
            if x is not None and self.parameters.get(_joined(self.name, path, name)) is x
            else 0
            for name, x in (("weight", weight), ("bias", bias))
        )
        shape = LayerShape(
            path=path,
            kind=kind,
            inputs=sizes[0] if flipped else sizes[1],
            outputs=sizes[1] if flipped else sizes[0],
            weight_bytes=weight_bytes,
            bias_bytes=bias_bytes,
            weight_gradient_bytes=weight_bytes,
            bias_gradient_bytes=bias_bytes,
        )
        layer = self.layers.enter(shape, given)
        out = call()
        self.layers.leave(layer, out)
        return out

    def linear(
        self,
        x: Array,
        path: str,
        width: int,
        *,
        bias: bool,
        tied: Array | None = None,
        tied_bias: Array | None = None,
    ) -> Array:
        """nn.Linear; `tied` gives its weight, `tied_bias` its bias."""
        prefix = f"{path}." if path else ""
        name = f"{prefix}weight"
        weight = self.tie(name, tied) if tied else self.parameter(name, width, x.shape[-1])
        added = self.tie(f"{prefix}bias", tied_bias) if tied_bias else None
        added = self.parameter(f"{prefix}bias", width) if bias else added
        return self.layer(
            path, LayerKind.LINEAR, x, weight, added, lambda: kernels.linear(x, weight, added)
        )

    def conv1d(self, x: Array, path: str, width: int) -> Array:
        """transformers' Conv1D: a linear layer whose weight is (in, out)."""
        weight = self.parameter(f"{path}.weight", x.shape[-1], width)
        bias = self.parameter(f"{path}.bias", width)

        def call() -> Array:
            return kernels.linear(x, weight, bias, is_transposed=True)

        return self.layer(path, LayerKind.TRANSPOSED, x, weight, bias, call)

    def embedding(
        self, ids: Array, path: str, rows: int, width: int, *, tied: Array | None = None
    ) -> Array:
        """nn.Embedding; `tied` gives its weight."""
        name = f"{path}.weight" if path else "weight"
        weight = self.tie(name, tied) if tied else self.parameter(name, rows, width)
        return self.layer(
            path, LayerKind.EMBEDDING, ids, weight, None, lambda: kernels.embedding(weight, ids)
        )

    def layer_norm(self, x: Array, path: str) -> Array:
        """nn.LayerNorm over the last dimension, with weight and bias."""
        prefix = f"{path}." if path else ""
        width = x.shape[-1]
        weight = self.parameter(f"{prefix}weight", width)
        bias = self.parameter(f"{prefix}bias", width)
        with self.module("LayerNorm"):
            return kernels.layer_norm(x, weight, bias)

    def rms_norm(self, x: Array, path: str) -> Array:
        """The root-mean-square norm that transformers writes out, computed in fp32."""
        prefix = f"{path}." if path else ""
        with self.module("RMSNorm"):
            dtype = x.dtype
            x = ops.cast(x, DType.FLOAT32)
            variance = ops.mean_last(ops.power(x))
            x = ops.mul(x, ops.rsqrt(ops.add_number(variance)))
            return ops.mul(self.parameter(f"{prefix}weight", x.shape[-1]), ops.cast(x, dtype))


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)
