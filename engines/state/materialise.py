"""Values for models from the meta device: a plan is applied to shapes, and what a rank keeps of
them is then filled tensor by tensor."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from engines.runtime.world import World, require_same
from engines.state.deferred import recipes_of
from engines.state.shard_spec import PlacedTensor, placed
from engines.state.stored import Form, box
from engines.state.weights import (
    Weights,
    left_out_names,
    matched,
    names_of,
    open_weights,
    storable_names,
)
from profiles.errors import ModelError
from profiles.torch_compat import version_of
from profiles.torch_compat.module_copy import copy_module

CPU = torch.device("cpu")
Place = Callable[[str, Tensor], PlacedTensor]
"""The boxes that a tensor of this rank has of the whole one of that name; see `Layout.placed`."""


def deferred_weights_of(
    model: nn.Module, weights: Weights | None, *, world: World, seed: int
) -> DeferredWeights | None:
    """The values of a model on the meta device; None for one that has them.

    Raises:
        ModelError: `weights` are given for a model that has values, or do not fit it.
        PlanMismatchError: some ranks have a model with values, some without.
    """
    on_meta = any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    require_same("device of the model", "meta" if on_meta else "real", world)
    if not on_meta:
        if weights is not None:
            raise ModelError(
                "`weights` are for a model on the meta device, this one has values",
                hints=[
                    "build it under `with advisor.deferred():`, or load them into the parallel"
                    " model: `parallel.load_pretrained(path)`"
                ],
            )
        return None
    return DeferredWeights(model, weights, seed=seed)


def placeholder(tensor: Tensor, *, device: torch.device) -> Tensor:
    """A tensor of zeros like `tensor`, expanded from one element of memory."""
    return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)


class DeferredWeights:
    """Values of a model on the meta device, for the parts of tensors that a rank keeps.

    Made before a plan changes the model. `leave_out` and `allocate` give tensors memory, `fill`
    gives them values. These come, by what there is:

    * from `weights`, tensors by name: boxes of them are read, in the dtype of the model; a tied
      parameter may be stored under any of its names;
    * from `weights`, an init function: called for the modules whose own tensors are needed;
    * from the constructor, where the model was built under `deferred()`;
    * from the model's own `reset_parameters` and `_init_weights` (as nanoGPT and transformers have
      them), a module's own first and then those of the modules around it.

    Functions draw from torch's generator, seeded by the name of the module, so that a parameter
    starts with the same values on every rank that holds it, however the model is split. They are
    not those of eager construction, in which all modules draw from one sequence of numbers.
    """

    def __init__(self, model: nn.Module, weights: Weights | None = None, *, seed: int = 0) -> None:
        """Raises ModelError for values that nothing will give, where this is known already."""
        _require_registered(model)
        self._seed = seed
        source = None if weights is None else open_weights(weights)
        self._init = source if callable(source) else None
        self._stored = None if callable(source) else source
        self._parameters = names_of(model.named_parameters(remove_duplicate=False))
        self._buffers = names_of(model.named_buffers(remove_duplicate=False))
        self._names = self._parameters | self._buffers
        tensors = {name: _named(model, name) for name in self._names}
        self._forms = {name: Form(tuple(t.shape), t.dtype) for name, t in tensors.items()}
        self._storable = storable_names(model)
        self._left_out = left_out_names(model)
        on_meta = {name for name, tensor in tensors.items() if tensor.is_meta}
        # Files have values for buffers too that the constructor filled.
        self._wanted = on_meta | (self._storable.keys() if self._stored is not None else set())
        recipes = recipes_of(model)
        self._recipes = {n: recipes[tensors[n]] for n in on_meta if tensors[n] in recipes}
        # Init functions see whole modules, and nothing of what a plan does to them.
        needs_modules = self._init is not None or not on_meta <= self._recipes.keys()
        self._skeleton = _on_meta(model) if needs_modules else None

    @torch.no_grad()
    def leave_out(self, model: nn.Module, local: Container[str], *, device: torch.device) -> None:
        """Give `placeholder`s on `device` to the parameters whose first names are not in `local`,
        and to the buffers of modules without a parameter in `local`."""
        for name in sorted(self._wanted):
            is_needed = name in local if name in self._parameters else self._is_near(name, local)
            if not is_needed:
                self._wanted.discard(name)
                tensor = _named(model, name)
                if tensor.is_meta:
                    self._put(model, name, placeholder(tensor, device=device))

    @torch.no_grad()
    def allocate(
        self, model: nn.Module, tensors: Iterable[Tensor], *, device: torch.device
    ) -> None:
        """Give memory on `device` to those of `tensors`, of `model`, that have none yet."""
        wanted = {tensor for tensor in tensors if tensor.is_meta}
        for name in sorted(self._wanted):
            tensor = _named(model, name)
            if tensor in wanted:
                self._put(model, name, torch.empty_like(tensor, device=device))

    @torch.no_grad()
    def fill(self, model: nn.Module, place: Place | None = None) -> None:
        """Give values to what was not left out, after `allocate`.

        Main memory holds one tensor, or one module's own tensors, besides what is filled.

        Args:
            place: where the parts of this rank lie; by default it has every tensor whole.

        Raises:
            ModelError: a tensor is missing, unexpected, or has another shape or dtype; nothing was
                written. Or an init function left one without values.
        """
        place = place or (lambda _, tensor: placed(tensor))
        wanted = [name for name in self._names if name in self._wanted]
        by_name: dict[str, str] = {}
        if self._stored is not None:
            by_name = matched(
                {name: self._forms[name] for name in self._storable},
                self._stored,
                called=self._storable,
                local=[name for name in wanted if name in self._storable],
                left_out=self._left_out,
            )
        by_module: dict[str, list[str]] = {}
        for name in wanted:
            if name not in by_name and (self._init is not None or name not in self._recipes):
                by_module.setdefault(name.rpartition(".")[0], []).append(name)
        if self._stored is not None:
            self._require_own_init(by_module)
        for name in wanted:
            target = place(name, _named(model, name))
            if name in by_name and self._stored is not None:
                for chunk in target.chunks:
                    self._stored.read(by_name[name], chunk.part, offsets=chunk.offsets)
            elif self._init is None and name in self._recipes:
                _write(target, self._made(name))
        for path, names in by_module.items():
            for name, value in self._initialised(path, names):
                _write(place(name, _named(model, name)), value)

    def _made(self, name: str) -> Tensor:
        value = self._recipes[name].values(self._seed)
        if _has_nan(value):
            raise ModelError(
                f"the constructor left `{name}` without values",
                hints=["fill it in the constructor, or give `weights`"],
            )
        return value

    def _require_own_init(self, by_module: dict[str, list[str]]) -> None:
        """Files have no buffers that are not in a state dict: the model makes these itself."""
        for path, names in by_module.items():
            if not any(True for _ in self._own_inits(path)):
                raise ModelError(
                    f"buffer `{names[0]}` is on the meta device and not in a state dict: its"
                    " values cannot be read",
                    hints=[
                        "build the model under `with advisor.deferred():`",
                        'or this buffer with values: `torch.arange(n, device="cpu")`',
                        "or give an init function, which fills it",
                    ],
                )

    def _initialised(self, path: str, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        """The module's own tensors `names`, as its init function fills them."""
        assert self._skeleton is not None
        module = self._skeleton.get_submodule(path)
        inits = [*self._own_inits(path)]
        if self._init is not None:
            inits = [functools.partial(self._init, module)]
        with _spare_tensors(module), _seeded(f"{self._seed} {path}"):
            begun = {name: (t, version_of(t)) for name, t in _own(module)}
            for init in inits:
                init()
            made = dict(_own(module))
        for name in names:
            own = name.rpartition(".")[2]
            tensor, (before, version) = made[own], begun[own]
            is_untouched = tensor is before and version_of(tensor) == version
            # `parameter.data.normal_()` changes no version: floating tensors start as NaN.
            is_unknown = _has_nan(tensor) if tensor.is_floating_point() else is_untouched
            if tensor.is_meta or is_unknown:
                raise self._unknown(name, type(module).__name__, has_init=bool(inits))
            yield name, tensor.detach()

    def _unknown(self, name: str, kind: str, *, has_init: bool) -> ModelError:
        if self._init is not None:
            return ModelError(
                f"the init function left `{name}` without values",
                where=f"init({kind})",
                hints=["fill every parameter and buffer that the module itself holds"],
            )
        own = "its `reset_parameters` and `_init_weights` leave it so" if has_init else ""
        return ModelError(
            f"`{name}` is on the meta device: it has a shape and no values",
            where=f"{kind}: {own or 'it has no `reset_parameters`, the model no `_init_weights`'}",
            hints=[
                "build the model under `with advisor.deferred():`, which repeats its constructor",
                "or give `weights`: init(module), a state dict, or a path to safetensors files",
            ],
        )

    def _own_inits(self, path: str) -> Iterator[Callable[[], object]]:
        """Calls of constructors for a module: its own `reset_parameters` and those of the modules
        around it, then `_init_weights` of the nearest that has one, with each of them."""
        assert self._skeleton is not None
        around = [self._skeleton.get_submodule(part) for part in _and_above(path)]
        for module in around:
            names = ("reset_parameters", "_reset_parameters")
            yield from [f for name in names if (f := _callable(module, name, 0))][:1]
        for number, module in enumerate(around):
            for owner in around[number:]:
                if function := _callable(owner, "_init_weights", 1):
                    yield functools.partial(function, module)
                    break

    def _put(self, model: nn.Module, first_name: str, value: Tensor) -> None:
        """Set `value` under all names of a tensor."""
        old = _named(model, first_name)
        new = value
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(value, requires_grad=old.requires_grad)
            vars(new).update(vars(old))
        for name in self._names[first_name]:
            path, _, own = name.rpartition(".")
            setattr(model.get_submodule(path), own, new)

    def _is_near(self, buffer: str, local: Container[str]) -> bool:
        """True if the module of a buffer has a parameter that this rank holds, or none at all."""
        path = buffer.rpartition(".")[0]
        neighbours = [
            first
            for first, names in self._parameters.items()
            if any(not path or name.startswith(f"{path}.") for name in names)
        ]
        return not neighbours or any(name in local for name in neighbours)


def _write(target: PlacedTensor, whole: Tensor) -> None:
    for chunk in target.chunks:
        chunk.part.copy_(whole[box(chunk.offsets, chunk.part.shape)])


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _named(model: nn.Module, name: str) -> Tensor:
    path, _, own = name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(path), own)
    return tensor


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _and_above(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _callable(module: nn.Module, name: str, count: int) -> Callable[..., object] | None:
    """A method that can be called with so many arguments; None if it has none of the name."""
    function = getattr(module, name, None)
    if not callable(function):
        return None
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return None
    method: Callable[..., object] = function
    return method


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy of the model without values."""
    known: dict[int, object] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            empty = torch.empty_like(tensor, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            known[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy_module(model, known)


def _has_nan(tensor: Tensor) -> bool:
    return not tensor.is_meta and bool(tensor.isnan().any())


@contextmanager
def _spare_tensors(module: nn.Module) -> Iterator[None]:
    """Inside, the module's own tensors have memory, with NaN in it."""
    before = list(_own(module))
    try:
        for name, tensor in before:
            spare = torch.empty_like(tensor, device=CPU)
            if tensor.is_floating_point():
                spare.fill_(torch.nan)
            is_parameter = isinstance(tensor, nn.Parameter)
            setattr(
                module, name, nn.Parameter(spare, tensor.requires_grad) if is_parameter else spare
            )
        yield
    finally:
        for name, tensor in before:
            setattr(module, name, tensor)


@contextmanager
def _seeded(name: str) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        digest = hashlib.sha256(name.encode()).digest()
        torch.default_generator.manual_seed(int.from_bytes(digest[:7], "big"))
        yield


def _require_registered(model: nn.Module) -> None:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise ModelError(
                    f"`{_join(path, name)}` is a tensor on the meta device that is neither a"
                    " parameter nor a buffer: nothing can fill it",
                    hints=['register it as a buffer, or build it with `device="cpu"`'],
                )
