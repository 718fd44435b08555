"""The user's own loop and code around a model under a plan. A part of ParallelModel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from engines.data.fsdp import drop_unused, prepare_backward, require_reduced
from engines.optional.async_updates.exchange import UpdateExchange
from engines.plan import Plan
from engines.runtime.mesh import Mesh
from engines.runtime.world import World, rank_error_context, sum_over_ranks
from engines.state.layout import LayerSplit, Layout
from engines.state.own_reads import OwnReads
from engines.state.own_writes import OwnWrites
from profiles.errors import InputError, ModelError, PlanError
from profiles.model.profile import ModelProfile
from profiles.torch_compat import version_of

Module = TypeVar("Module", bound=nn.Module)
Number = float | Tensor


class InteropMixin(nn.Module):
    """Attributes of the user's module; accumulation and metrics for the user's own loop."""

    plan: Plan
    module: nn.Module
    state_dict: Callable[..., dict[str, Any]]  # type: ignore[assignment]
    _backward_mode: Callable[..., Any]
    _exchange: UpdateExchange
    _has_values: bool = False
    _is_accumulating: bool = False
    _is_local: bool = False
    _is_pending: bool
    _is_unchecked: bool
    _layout: Layout
    _mesh: Mesh
    _own_reads: OwnReads
    _own_writes: OwnWrites
    _profile: ModelProfile
    _split: LayerSplit | None
    _versions: Mapping[str, int] = MappingProxyType({})
    _world: World

    def __getattr__(self, name: str) -> Any:
        """Return attributes of the user's module: `parallel.config`, `parallel.generate(...)`.

        Methods of the module exist under every plan, and raise a `PlanError` if this rank has only
        a part of the model: they would run that part, or wait for other ranks.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("_") or not hasattr(module, name):
                raise
        value = getattr(module, name)
        if inspect.ismethod(value) and value.__self__ is module and not self._is_whole:
            return self._refused(name)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what the user's module has there, as reading it reads that: `parallel.beta = 0.1`."""
        own = self.__dict__
        if name in own and not isinstance(value, (Tensor, nn.Module)):
            own[name] = value  # as every step does; torch looks for parameters first
            return
        is_own = "_runner" not in own or name in own or hasattr(type(self), name)
        module = None if is_own or name.startswith("_") else own["_modules"].get("module")
        if module is not None and name not in own["_modules"] and hasattr(module, name):
            setattr(module, name, value)
        else:
            super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For copies and pickles; in one process alone.

        Raises:
            InputError: it has a part of the model, and connections to other ranks.
        """
        if self._world.size > 1:
            raise InputError(
                "a model that is spread over ranks is neither copied nor pickled: it has"
                " connections to them",
                where=f"plan: {self.plan}",
                hints=[
                    "an average of parameters (`AveragedModel`) keeps a clone of each of"
                    " `parallel.named_parameters()`, and `parallel.register` saves those by name",
                    "whole tensors are in `parallel.state_dict()`",
                ],
            )
        return super().__reduce_ex__(protocol)

    def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
        """Take what `state_dict` gave as a part of another module (`AveragedModel`): names of the
        user's module, where torch looks below `module.`."""
        inner = f"{prefix}module."
        for name in [name for name in state if not name.startswith(inner)]:
            if name.startswith(prefix):
                state[inner + name.removeprefix(prefix)] = state.pop(name)
        super()._load_from_state_dict(state, prefix, *others)

    @property
    def _is_whole(self) -> bool:
        """True if the user's module runs on this rank as it would in one process."""
        mesh = self._mesh
        axes = mesh.pp, mesh.tp, mesh.ep
        is_split = self.plan.cp > 1 or any(axis.size > 1 for axis in axes)
        return not is_split and mesh.shards is None and not self.plan.servers

    def _refused(self, name: str) -> Callable[..., Any]:
        def refused(*args: object, **kwargs: object) -> None:
            raise PlanError(
                f"`{name}` runs the whole model, this rank has a part of it",
                where=f"plan: {self.plan}",
                hints=[
                    f"`parallel.unwrap(into=Model(...)).{name}(...)` runs a whole copy, made of a"
                    " model that was built like the one given",
                    "or train under a plan that keeps it whole: `dp_replicate`, without `zero`",
                ],
            )

        return refused

    def unwrap(self, into: Module | None = None) -> Module:
        """Return the user's own module with whole, current parameters; all ranks call it.

        Under plans that split the model there is none: `into`, built like the original model, is
        filled with the parameters and buffers, and returned.

        Raises:
            PlanError: this rank has a part of the model, and there is no `into`.
        """
        if into is not None:
            into.load_state_dict(self.state_dict())
            return into
        if not self._is_whole:
            raise PlanError(
                "there is no whole model on this rank to unwrap",
                where=f"plan: {self.plan}",
                hints=[
                    "give one to be filled: `parallel.unwrap(into=Model(...))`",
                    "`parallel.save(folder)` and `parallel.state_dict()` need none",
                ],
            )
        self._exchange.synchronise()
        return cast(Module, self.module)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without exchanging them: wrap all microbatches of a step but the
        last, whose backward exchanges the sum.

            for number, (inputs, target) in enumerate(microbatches):
                is_last = number == len(microbatches) - 1
                with nullcontext() if is_last else parallel.no_sync():
                    (loss_fn(parallel(inputs), target) / len(microbatches)).backward()
            parallel.optimizer.step()

        As in `train_step`, ZeRO-2 and ZeRO-3 keep shards of gradients, and reduce them in every
        backward.

        Raises:
            PlanError: the plan has stages. InputError: the optimizer steps before a backward
                outside of it.
        """
        if self.plan.pp > 1:
            raise PlanError(
                "a pipeline has no backward of its own to accumulate in",
                where=f"plan: {self.plan}",
                hints=["`train_step(batch)` accumulates: `microbatches=`, `accumulation=`"],
            )
        before, self._is_accumulating = self._is_accumulating, True
        try:
            with self._backward_mode(False):
                yield
        finally:
            self._is_accumulating = before
            if isinstance(self.module, FSDPModule) and not before:
                prepare_backward(self.module, self.plan, last=True)

    def _await_backward(self, outputs: Iterable[Tensor]) -> None:
        """A backward leaves gradients to settle; a forward alone changes none."""
        for tensor in outputs:
            if tensor.requires_grad:
                tensor.register_hook(self._mark_pending)
                self._own_reads.begin()

    def _mark_pending(self, _: Tensor) -> None:
        """Note that a backward of a classic loop has left gradients.

        Raises:
            ModelError: it builds a graph of its own, over parameters that ZeRO frees before that.
        """
        self._own_reads.end()
        if torch.is_grad_enabled() and isinstance(self.module, FSDPModule):
            raise ModelError(
                "a gradient is to be differentiated again (`create_graph=True`): its graph holds"
                " parameters that are freed after the first backward",
                where=f"plan: {self.plan}",
                hints=[
                    "take that gradient inside the model's own forward, or replicate: dp_replicate"
                ],
            )
        self._require_summed()
        if self._own_writes.watches:
            self._own_writes.note_gradients_after_backward()
        self._is_pending = self._is_unchecked = True
        self._is_local = self._is_accumulating

    def _require_summed(self) -> None:
        """Refuse parameters that were changed by hand since a backward whose gradients wait for
        their sum over the tp axis."""
        partial = self._split.partial if self._split is not None else ()
        before = self._versions if self._is_pending else {}
        names = filter(self._layout.holds, sorted(partial))
        self._versions = {n: version_of(self.module.get_parameter(n)) for n in names}
        for name, version in self._versions.items():
            if before.get(name, version) != version:
                raise InputError(
                    f"`{name}` was changed by hand after a backward: its gradient was a part of a"
                    " sum over the ranks of the tp axis",
                    where=f"plan: {self.plan}",
                    hints=[
                        "step an optimizer; or read gradients after `parallel.full_gradients()` or"
                        " `parallel.clip_grad_norm_(inf)`, which sum them up"
                    ],
                )

    def _finish_pending(self) -> None:
        """After a backward of a classic loop, before its gradients are used."""
        self._require_exchanged()
        if isinstance(self.module, FSDPModule):
            require_reduced(self.module)
        if self._is_pending:
            self._own_writes.warn_of_gradients()
            self._is_pending = False
            self._finish_gradients()
            if isinstance(self.module, FSDPModule):
                drop_unused(self.module, self._profile)

    def _require_exchanged(self) -> None:
        """Refuse to step on, or to read, gradients that were not exchanged."""
        if self._is_local or self._is_accumulating:
            raise InputError(
                "the last backward was inside of `no_sync`: its gradients were not exchanged",
                where=f"plan: {self.plan}",
                hints=["run the last forward and backward before the step outside of it"],
            )

    def _require_ready(self) -> None:
        """Refuse a `train_step` where it cannot learn, before its first message."""
        self._require_values()
        if not torch.is_grad_enabled():
            raise InputError(
                "gradients are off where `train_step` was called: nothing could be learnt",
                hints=["call it outside of `torch.no_grad()`, or use `eval_step(batch)`"],
            )
        if self._is_accumulating:
            raise InputError(
                "`train_step` inside of `no_sync`: it exchanges gradients itself, once a step",
                hints=['its accumulation is the plan\'s: `plan="accumulation=4"`'],
            )

    def _require_values(self) -> None:
        """Refuse the first forward of parameters without values; warn of what a loop wrote."""
        self._own_writes.warn()
        if self._has_values:
            return
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                raise ModelError(
                    f"`{name}` is on the meta device: it has a shape and no values",
                    hints=["give it values: `parallel.load(folder)`, `parallel.load_state_dict`"],
                )
        self._has_values = True

    @rank_error_context("averaging metrics")
    def global_mean(self, metrics: Mapping[str, Number], *, count: float) -> dict[str, float]:
        """Average metrics over the global batch, the same on every rank; all ranks call it.

        Args:
            metrics: means over this rank's part, 0-d or numbers: {"accuracy": hits / len(target)}.
            count: samples, tokens or whatever they are means over; 0 where this rank has none.

        Under periodic and asynchronous updates they are this rank's own.

        Raises:
            InputError: a metric is more than one number, or there is nothing anywhere to count.
        """
        values = []
        for name, value in metrics.items():
            if isinstance(value, Tensor) and value.numel() != 1:
                raise InputError(
                    f"metric `{name}` is {tuple(value.shape)}, it must be one number",
                    where="parallel.global_mean",
                    hints=["give its mean over this rank's part, and their number as `count=`"],
                )
            values.append(float(value) * count if count else 0.0)
        total, *sums = sum_over_ranks([float(count), *values], self._world)
        if not total:
            raise InputError("no rank has anything to count", where="parallel.global_mean")
        return {name: summed / total for name, summed in zip(metrics, sums, strict=True)}
