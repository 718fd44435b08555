"""Values for models from the meta device: only for the parameters of a rank."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from engines.runtime.world import World, require_same
from engines.state.weights import Init, Weights, open_weights
from profiles.errors import ModelError, near_misses
from profiles.torch_compat import version_of


def open_weights_of(
    model: nn.Module, weights: Weights | None, *, world: World, seed: int
) -> DeferredWeights | None:
    """Open the values of a model on the meta device; None for one that has them.

    Raises:
        ModelError: a model on the meta device without `weights`, or one with values and `weights`.
        PlanMismatchError: some ranks have a model with values, some without.
    """
    on_meta = [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    require_same("device of the model", "meta" if on_meta else "real", world)
    if on_meta and weights is None:
        raise ModelError(
            f"`{on_meta[0]}` is on the meta device: it has a shape and no values",
            hints=[
                "give `weights`: init(module), a state dict, or a path to safetensors files",
                'or fill it first: `model.to_empty(device="cpu")`, then your init function',
            ],
        )
    if weights is None:
        return None
    if not on_meta:
        raise ModelError(
            "`weights` are for a model on the meta device, this one has values",
            hints=['build it under `with torch.device("meta"):`, or leave `weights` out'],
        )
    return DeferredWeights(model, weights, seed=seed)


def placeholder(tensor: Tensor, *, device: torch.device) -> Tensor:
    """A tensor of zeros like `tensor`, expanded from one element of memory."""
    return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)


class DeferredWeights:
    """Values of a meta-device model, filled in part by part.

    An init function is called for the modules whose own tensors are needed, with torch's generator
    seeded by the name of the module: so a parameter starts with the same values on every rank that
    holds it, however the model is split. Tensors by name are copied, in the dtype of the model;
    a tied parameter may be stored under any of its names. Buffers that are not part of a state
    dict are made by the init function, or by the model's own `_init_weights` (as transformers has
    it since 5.0).
    """

    def __init__(self, model: nn.Module, weights: Weights, *, seed: int = 0) -> None:
        self._model = model
        self._weights = open_weights(weights)
        self._seed = seed
        self._stored = frozenset(model.state_dict())
        self._parameters = _names(model.named_parameters(remove_duplicate=False))
        self._names = self._parameters | _names(model.named_buffers(remove_duplicate=False))
        _require_registered(model)

    @torch.no_grad()
    def fill(
        self,
        part: nn.Module,
        *,
        local: Container[str] | None = None,
        device: torch.device = torch.device("cpu"),  # noqa: B008 (immutable)
    ) -> None:
        """Give the meta tensors in `part`, the model or a module of it, their values, on the CPU.

        Args:
            local: first names of the parameters that this rank holds, all if None. The others get a
                `placeholder` on `device`, as do buffers of modules without a local parameter.

        Raises:
            ModelError: a tensor is missing, or has another shape.
        """
        inside = set(part.parameters()) | set(part.buffers())
        wanted: list[str] = []
        for name, parameter in list(self._model.named_parameters()):
            if parameter.is_meta and parameter in inside:
                if local is None or name in local:
                    wanted.append(name)
                else:
                    self._put(name, placeholder(parameter, device=device))
        for name, buffer in list(self._model.named_buffers()):
            if buffer.is_meta and buffer in inside:
                if local is None or self._is_near(name, local):
                    wanted.append(name)
                else:
                    self._put(name, placeholder(buffer, device=device))
        for name, value in self._values(wanted):
            self._put(name, value)

    def _values(self, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        by_module: dict[str, list[str]] = {}
        for name in names:
            if isinstance(self._weights, Mapping) and name in self._stored:
                yield name, self._read(name, self._weights)
            else:
                by_module.setdefault(name.rpartition(".")[0], []).append(name)
        init = self._init()
        for path, own in by_module.items():
            if init is None:
                raise ModelError(
                    f"buffer `{own[0]}` is on the meta device and not in a state dict: its"
                    " values cannot be read",
                    hints=[
                        'build it with values: `torch.arange(n, device="cpu")` in the constructor',
                        "or give an init function, which fills it",
                    ],
                )
            yield from self._initialised(path, own, init)

    def _init(self) -> Init | None:
        if not isinstance(self._weights, Mapping):
            return self._weights
        own: Init | None = getattr(self._model, "_init_weights", None)
        return own

    def _read(self, name: str, stored: Mapping[str, Tensor]) -> Tensor:
        layout = _named(self._model, name)
        there = next((n for n in self._names[name] if n in stored), None)
        if there is None:
            near = near_misses(name, stored)
            raise ModelError(
                f"`weights` has no `{name}`",
                where=f"{len(stored)} tensors, the model has {len(self._stored)}",
                hints=[f"did you mean {' or '.join(f'`{n}`' for n in near)}?"] if near else [],
            )
        value = stored[there]
        if value.shape != layout.shape:
            raise ModelError(
                f"`{there}` in `weights` has the shape {tuple(value.shape)}, in the model"
                f" {tuple(layout.shape)}"
            )
        return torch.empty_like(layout, device="cpu").copy_(value)

    def _initialised(self, path: str, names: list[str], init: Init) -> Iterator[tuple[str, Tensor]]:
        """The module's own tensors `names`, as `init` fills them."""
        module = self._model.get_submodule(path)
        with _spare_tensors(module), _seeded(f"{self._seed} {path}"):
            begun = {name: (t, version_of(t)) for name, t in _own(module)}
            init(module)
            made = dict(_own(module))
        for name in names:
            own = name.rpartition(".")[2]
            tensor, (before, version) = made[own], begun[own]
            is_untouched = tensor is before and version_of(tensor) == version
            # `parameter.data.normal_()` changes no version: floating tensors start as NaN.
            is_unknown = _has_nan(tensor) if tensor.is_floating_point() else is_untouched
            if tensor.is_meta or is_unknown:
                raise ModelError(
                    f"the init function left `{name}` without values",
                    where=f"init({type(module).__name__})",
                    hints=["fill every parameter and buffer that the module itself holds"],
                )
            yield name, tensor.detach()

    def _put(self, first_name: str, value: Tensor) -> None:
        """Set `value` under all names of a tensor."""
        old = _named(self._model, first_name)
        new = value
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(value, requires_grad=old.requires_grad)
            vars(new).update(vars(old))
        for name in self._names[first_name]:
            path, _, own = name.rpartition(".")
            setattr(self._model.get_submodule(path), own, new)

    def _is_near(self, buffer: str, local: Container[str]) -> bool:
        """True if the module of a buffer has a parameter that this rank holds, or none at all."""
        path = buffer.rpartition(".")[0]
        neighbours = [
            first
            for first, names in self._parameters.items()
            if any(not path or name.startswith(f"{path}.") for name in names)
        ]
        return not neighbours or any(name in local for name in neighbours)


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _names(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, list[str]]:
    """All names of each tensor by its first one."""
    by_tensor: dict[Tensor, list[str]] = {}
    for name, tensor in tensors:
        by_tensor.setdefault(tensor, []).append(name)
    return {names[0]: names for names in by_tensor.values()}


def _named(model: nn.Module, name: str) -> Tensor:
    path, _, own = name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(path), own)
    return tensor


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _has_nan(tensor: Tensor) -> bool:
    return not tensor.is_meta and bool(tensor.isnan().any())


@contextmanager
def _spare_tensors(module: nn.Module) -> Iterator[None]:
    """Inside, the module has copies of its own tensors; NaN where there are no values yet."""
    before = list(_own(module))
    try:
        for name, tensor in before:
            spare = torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor.clone()
            if tensor.is_meta and tensor.is_floating_point():
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
