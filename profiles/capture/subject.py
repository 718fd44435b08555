"""A model and its sample, about to be looked at: its units, and who holds which parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from profiles.capture.batch.call import Batch, LossFn
from profiles.capture.batch.dims import Dims
from profiles.capture.batch.tree import batch_tensors
from profiles.capture.module.manual_placement import devices_of, is_manually_placed
from profiles.capture.module.units import Unit, find_units, owners
from profiles.capture.traces.layer_trace import Shapes, layer_shapes
from profiles.errors import ModelError, a_type


@dataclass(slots=True)
class TracedModel:
    """The model to trace. Parameters are known by their ids, so that a tied one is one.

    Attributes:
        dims: of the sample, see `profiles.capture.batch.dims`.
        on_processor: operators are a processor's, else see `AcceleratorOperators`.
        units: see `find_units`.
        owners: unit of each module, by id.
        parameters: each once, in the order of the modules.
        names: all paths of a parameter.
        holders: units that hold a parameter, the first one first.
        layers: weight layers of each unit.
        devices: where the parameters were put by hand; empty where they are on one device.
    """

    model: nn.Module
    sample: Batch
    loss_fn: LossFn | None
    dims: Dims = field(default_factory=dict)
    on_processor: bool = True
    units: tuple[Unit, ...] = field(init=False)
    owners: dict[int, str] = field(init=False)
    parameters: dict[int, nn.Parameter] = field(default_factory=dict, init=False)
    names: dict[int, list[str]] = field(default_factory=dict, init=False)
    holders: dict[int, list[str]] = field(default_factory=dict, init=False)
    layers: dict[str, Shapes] = field(init=False)
    devices: tuple[str, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        require_module(self.model)
        if is_manually_placed(self.model):
            self.devices = tuple(map(str, devices_of(self.model)))
        self.units = find_units(self.model)
        self.owners = owners(self.model, self.units)
        for path, parameter in self.model.named_parameters(remove_duplicate=False):
            self.parameters[id(parameter)] = parameter
            self.names.setdefault(id(parameter), []).append(path)
        units_of: dict[int, list[str]] = {}  # a module may be registered in several
        for unit in self.units:
            for module in unit.module.modules():
                units_of.setdefault(id(module), []).append(unit.name)
        for module in self.model.modules():
            for parameter in module.parameters(recurse=False):
                holders = self.holders.setdefault(id(parameter), [])
                units = units_of.get(id(module), [self.owners[id(module)]])
                holders += [name for name in units if name not in holders]
        first = {key: names[0] for key, names in self.names.items()}
        self.layers = {unit.name: layer_shapes(unit, first) for unit in self.units}

    def parameters_of(self, unit: str) -> list[nn.Parameter]:
        """Those that count as the unit's: it is the first that holds them."""
        return [p for key, p in self.parameters.items() if self.holders[key][0] == unit]

    def buffer_bytes_of(self, unit: str) -> int:
        """Of the buffers of the unit's modules, each once."""
        sizes = {
            id(buffer): buffer.nbytes
            for module in self.model.modules()
            if self.owners[id(module)] == unit
            for buffer in module.buffers(recurse=False)
        }
        return sum(sizes.values())

    def tied(self) -> tuple[tuple[str, ...], ...]:
        """Groups of names that are one parameter."""
        return tuple(tuple(names) for names in self.names.values() if len(names) > 1)

    def holders_of_tied(self) -> frozenset[str]:
        """Units that hold a parameter together with another unit."""
        return frozenset(u for units in self.holders.values() if len(units) > 1 for u in units)

    def dtype(self) -> str:
        """Of most parameter elements; of the first floating input where there are none.

        A complex number is two of its real dtype: a precision is said of these."""
        elements: Counter[str] = Counter()
        for parameter in self.parameters.values():
            is_complex = parameter.is_complex()
            real = parameter.dtype.to_real() if is_complex else parameter.dtype
            elements[dtype_name(real)] += (1 + is_complex) * parameter.numel()
        if elements:
            return elements.most_common(1)[0][0]
        floating = (t for t in batch_tensors(self.sample) if t.is_floating_point())
        return next(map(dtype_name, floating), "float32")


def dtype_name(tensor: object) -> str:
    """As torch prints it, without its first word: "float32"."""
    dtype = tensor if isinstance(tensor, torch.dtype) else getattr(tensor, "dtype", "")
    return str(dtype).removeprefix("torch.")


def require_module(model: object) -> None:
    """Raises ModelError: no module, one whose shapes are not known yet, or parts elsewhere."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"a torch.nn.Module is wanted, this is {a_type(model)}")
    remote = next(_remote_modules(model), None)
    if remote is not None:
        raise ModelError(
            f"`{remote or type(model).__name__}` is on another process, by torch.distributed.rpc:"
            " its parameters and its backward are not here",
            hints=[
                "build it as a plain module, and let the plan place it: `pp=2` puts layers on other"
                " ranks, `tp=2` splits large tables and layers, `dp_shard=2` shards all of them",
                "parameters on servers that workers fetch from: `updates=asynchronous servers=1`",
            ],
        )
    lazy = next((name for name, p in model.named_parameters() if is_lazy(p)), None)
    lazy = lazy or next((name for name, b in model.named_buffers() if is_lazy(b)), None)
    if lazy is not None:
        raise ModelError(
            f"`{lazy}` is lazy and not initialised: its shape is not known yet",
            hints=["run the model once on a batch before it is looked at"],
        )


def _remote_modules(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Names of the modules in `module` that are elsewhere; a RemoteModule raises where it is asked
    for its own modules."""
    if _is_remote(module):
        yield prefix
        return
    for name, child in vars(module).get("_modules", {}).items():
        if child is not None:
            yield from _remote_modules(child, f"{prefix}.{name}" if prefix else name)


def _is_remote(module: nn.Module) -> bool:
    """True of a RemoteModule, and of a module that holds references to remote values.

    By name: torch's RPC need not be there, and is slow to import.
    """
    kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(module).__mro__}
    if "torch.distributed.nn.api.remote_module._RemoteModule" in kinds:
        return True
    values = (value for key, value in vars(module).items() if not key.startswith("_"))
    return any(
        type(each).__name__ in ("RRef", "PyRRef")
        for value in values
        for each in (value if isinstance(value, list | tuple) else (value,))
    )
