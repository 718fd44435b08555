"""Finiteness of a step: losses and gradients that are nan or inf, before they are stepped by.

A rank marks its loss as nan where one of its gradients is not finite. The mean of losses, which all
ranks exchange anyway, then tells all of them: no message is added.

Under a loss scale gradients that overflow are no error: the step is left out, and the scale falls.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from math import isfinite

import torch
from torch import Tensor, nn

from engines.data.gradients import GradientBuckets, local_gradients
from engines.data.loss_scale import LossScaler
from engines.data.replicas import local_part
from engines.data.running_statistics import running_statistics
from engines.runtime.world import World, name_ranks, texts_of_ranks
from profiles.capture.batch.call import Batch
from profiles.capture.batch.tree import batch_items
from profiles.errors import NonFiniteError, UnknownNameError
from profiles.torch_compat import tensors_in

log = logging.getLogger(__name__)


class OnNonfinite(StrEnum):
    """Reaction to a loss or a gradient that is not finite."""

    STOP = "stop"
    SKIP = "skip"
    IGNORE = "ignore"


def reaction_of(text: OnNonfinite | str) -> OnNonfinite:
    """The reaction of that name.

    Raises:
        UnknownNameError: there is none.
    """
    try:
        return OnNonfinite(text)
    except ValueError:
        raise UnknownNameError("reaction", text, OnNonfinite, where="on_nonfinite") from None


class FiniteGuard:
    """Looks at losses and gradients of every step, and stops all ranks or leaves the step out.

    Args:
        parameters: of the module, by name: those that have gradients between two steps.
        world: the ranks that step together.
        scaler: of the losses; it follows what is seen here.
        gradients_stay: as of `GradientBuckets`.

    Attributes:
        is_last_skipped, skipped: if the last step was left out, and how many so far.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[tuple[str, nn.Parameter]],
        world: World,
        reaction: OnNonfinite,
        scaler: LossScaler,
        gradients_stay: bool,
    ) -> None:
        self._module = module
        self._parameters = parameters
        self._buckets = GradientBuckets(parameters, stay=gradients_stay)
        self._world = world
        self._reaction = reaction
        self._scaler = scaler
        is_asked = reaction is not OnNonfinite.IGNORE or scaler.is_on
        # Of a fake world the others send nothing, and its values mean nothing.
        self.is_on = is_asked and not world.is_fake
        self.is_last_skipped = False
        self.skipped = 0
        self._statistics: list[tuple[Tensor, Tensor]] = []

    def begin(self) -> None:
        """Copy the running statistics of batch norms, which a forward changes before its loss is
        known, where a step may be left out."""
        if self.is_on and self._reaction is OnNonfinite.SKIP:
            buffers = running_statistics(self._module).values()
            self._statistics = [(buffer, buffer.clone()) for buffer in buffers]

    @torch.no_grad()
    def marked(self, loss: Tensor) -> Tensor:
        """The loss of this rank; nan where a gradient of this rank is not finite."""
        if not self.is_on:
            return loss
        # One reading of all gradients. A norm that overflows is of gradients whose squares do, as
        # Adam's second moments.
        norm = nn.utils.get_total_norm(self._buckets.now())
        return loss.add(norm.to(loss), alpha=0.0)

    def passes(
        self, mean: Tensor, own: Tensor, *, step: int, origin: Callable[[], str] | None = None
    ) -> bool:
        """True if the mean of the marked losses is finite. All ranks call it.

        Where it is not there are no gradients afterwards. A loss scale above 1 is lowered, and
        that step skipped, if every loss is finite.

        Args:
            own: this rank's loss.
            step: number of the step that is under way.
            origin: says where the forward made the first value that is not finite. All ranks call
                it, or none.

        Raises:
            NonFiniteError: on all ranks, with the ranks and where it began, unless it is skipped.
        """
        if not self.is_on:
            return True
        scaler, scale = self._scaler, self._scaler.scale
        self.is_last_skipped = not isfinite(mean.item())
        scaler.update(is_finite=not self.is_last_skipped)
        if not self.is_last_skipped:
            return True
        gradient = first_nonfinite(dict(reversed(local_gradients(self._parameters).items())))
        self._module.zero_grad(set_to_none=True)
        facts = {"loss": "" if bool(own.isfinite()) else str(own.item()), "gradient": gradient}
        of_ranks = self._of_ranks(facts)
        is_overflow = scale > 1 and not any(each["loss"] for each in of_ranks.values())
        if self._reaction is OnNonfinite.STOP and not is_overflow:
            facts["origin"] = origin() if origin is not None else ""
            raise _error(self._of_ranks(facts), step)
        cause = _cause(of_ranks)
        if is_overflow:
            cause = f"gradients overflow, the loss scale falls from {scale:,g} to {scaler.scale:,g}"
        self._skip(f"step {step} was left out: {cause}; {self.skipped + 1} so far", is_overflow)
        return False

    def _of_ranks(self, facts: dict[str, str]) -> dict[int, dict[str, str]]:
        texts = texts_of_ranks("values that are not finite", json.dumps(facts), self._world)
        if self._world.size == 1:
            return {self._world.rank: facts}
        return {rank: json.loads(text) for rank, text in enumerate(texts)}

    def _skip(self, text: str, is_overflow: bool) -> None:
        """An overflow under a loss scale belongs to it: it is logged, and no warning."""
        self.skipped += 1
        for buffer, before in self._statistics:
            buffer.copy_(before)
        if self._world.rank == 0 or self._world.size == 1:
            if is_overflow:
                log.warning(text)
            else:
                warnings.warn(text, RuntimeWarning, stacklevel=4)

    def require_savable(self, job: World) -> None:
        """Require that trained parameters and running statistics are finite. All ranks call it.

        Raises:
            NonFiniteError: on all ranks, with the first one that is not.
        """
        if self._reaction is OnNonfinite.IGNORE or job.is_fake:
            return
        parameters = self._module.named_parameters()
        trained = {name: local_part(p.detach()) for name, p in parameters if p.requires_grad}
        name = first_nonfinite({**trained, **running_statistics(self._module)})
        names = texts_of_ranks("parameters that are not finite", name, job)
        ranks = [rank for rank, text in enumerate(names) if text]
        if ranks:
            raise NonFiniteError(
                f"`{names[ranks[0]]}` is not finite on {name_ranks(ranks)}: it is not saved",
                hints=["load the last checkpoint, which is finite"],
            )


def first_nonfinite(tensors: Mapping[str, Tensor]) -> str:
    """The first name whose tensor has a value that is not finite; empty without one."""
    bad = (name for name, tensor in tensors.items() if not bool(tensor.isfinite().all()))
    return next(bad, "")


def nonfinite_element(batch: Batch) -> str:
    """The first element of a batch that has a value that is not finite; empty without one."""
    return first_nonfinite({name: v for name, v in batch_items(batch) if isinstance(v, Tensor)})


@contextmanager
def nonfinite_output(model: nn.Module) -> Iterator[list[str]]:
    """Around forwards: yields a list that gets the name of the first module whose output has a
    value that is not finite. Of modules inside each other the innermost ends first."""
    names: list[str] = []

    def note(name: str, output: object) -> None:
        if not names and not all(bool(t.isfinite().all()) for t in tensors_in(output)):
            names.append(name)

    def hook_of(name: str) -> Callable[[nn.Module, object, object], None]:
        return lambda module, args, output: note(name, output)

    modules = [(name, module) for name, module in model.named_modules() if name]
    handles = [module.register_forward_hook(hook_of(name)) for name, module in modules]
    try:
        yield names
    finally:
        for handle in handles:
            handle.remove()


def _error(of_ranks: Mapping[int, Mapping[str, str]], step: int) -> NonFiniteError:
    gradient = "the backward's first gradient that is not finite is that of"
    lines = [
        *_by_ranks(of_ranks, "origin", "{}"),
        *_by_ranks(of_ranks, "gradient", f"{gradient} `{{}}`"),
    ]
    return NonFiniteError(
        f"step {step}: {_cause(of_ranks)}",
        where="\n".join(lines) or None,
        hints=[
            f"no parameter was changed: they are those after step {step - 1}",
            "look at the data and at the learning rate; `max_grad_norm` clips what is large and"
            " finite",
            '`on_nonfinite="skip"` leaves such steps out',
        ],
    )


def _cause(of_ranks: Mapping[int, Mapping[str, str]]) -> str:
    ranks = [rank for rank, facts in of_ranks.items() if facts["loss"]]
    if not ranks:
        return "a gradient is not finite, every loss is"
    values = " or ".join(sorted({of_ranks[rank]["loss"] for rank in ranks}))
    return f"the loss of {name_ranks(ranks)} is {values}"


def _by_ranks(of_ranks: Mapping[int, Mapping[str, str]], key: str, line: str) -> list[str]:
    """A line for each fact, with the ranks that have it."""
    holders: dict[str, list[int]] = {}
    for rank, facts in of_ranks.items():
        if facts[key]:
            holders.setdefault(facts[key], []).append(rank)
    return [f"{name_ranks(ranks)}: {line.format(fact)}" for fact, ranks in holders.items()]
