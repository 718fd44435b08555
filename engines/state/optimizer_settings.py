"""Settings of an optimizer, alike on all ranks: before the first step and while they train.

A schedule that counts other steps on one rank, or a rate that its code sets, changes what that rank
learns. Where each rank steps shards of its own, no checksum of parameters would show it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from engines.runtime.mesh import Axis
from engines.runtime.rank_agreement import Topic, require_agreement
from engines.runtime.world import World, largest_over_ranks
from profiles.errors import RankMismatchError

_HINT = "give every rank the same optimizer with the same settings"


def optimizer_topics(
    optimizer: torch.optim.Optimizer, *, part: str, noun: str = "optimizer"
) -> list[Topic]:
    """The class of an optimizer, its defaults and its parameter groups.

    Args:
        part: of the model, on this rank: only ranks with the same one have the same groups.
    """
    kind = type(optimizer)
    facts = {"class": [f"{kind.__module__}.{kind.__qualname__}"]}
    facts |= {f"`{key}`": [value] for key, value in _plain_items(optimizer.defaults)}
    return [Topic(noun, facts, _HINT), _groups_topic(optimizer, part)]


class EqualSettings:
    """Compares the settings of ranks' parameter groups between two steps.

    Args:
        stages: of a pipeline: a factory may make other groups in each, which are not compared with
            each other.
        every: steps between two comparisons; 0: never.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        world: World,
        stages: Axis,
        *,
        every: int,
    ) -> None:
        self._optimizer, self._world = optimizer, world
        self._stage, self._stages = stages.position, stages.size
        self._every = 0 if world.size == 1 or world.is_fake else every
        self._compared = 0

    def require_equal_when_due(self, step: int) -> None:
        """Compare every so many steps; `step` is the number of those that are over."""
        if self._every and step % self._every == 0 and step != self._compared:
            self.require_equal(step)

    def require_equal(self, step: int) -> None:
        """Compare now, by one small message. All ranks call it, between two steps.

        Raises:
            RankMismatchError: on all ranks, with the first setting that differs.
        """
        if not self._every:
            return
        self._compared = step
        topic = _groups_topic(self._optimizer, f"stage {self._stage}")
        digest = float(int(topic.digest[:12], 16))  # 48 bits: exact
        # The largest and the smallest of each stage.
        table = [-math.inf] * (2 * self._stages)
        table[2 * self._stage : 2 * self._stage + 2] = digest, -digest
        table = largest_over_ranks(table, self._world)
        if all(most == -least for most, least in zip(table[::2], table[1::2], strict=True)):
            return
        try:
            require_agreement([topic], self._world)
        except RankMismatchError as error:
            error.where = f"after step {step}"
            raise


def _groups_topic(optimizer: torch.optim.Optimizer, part: str) -> Topic:
    groups = {
        str(number): [
            f"{len(group['params'])} parameters",
            *(f"{key}={value}" for key, value in _plain_items(group)),
        ]
        for number, group in enumerate(optimizer.param_groups)
    }
    return Topic("parameter group", groups, _HINT, part=part)


def _plain_items(settings: Mapping[str, object]) -> Iterable[tuple[str, str]]:
    """Settings of an optimizer as texts; parameters and their names are none."""
    others = {key: v for key, v in settings.items() if key not in ("params", "param_names")}
    return ((key, _plain(value)) for key, value in sorted(others.items()))


def _plain(value: object) -> str:
    if isinstance(value, Tensor):
        return repr(value.item()) if value.numel() == 1 and not value.is_meta else "a tensor"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_plain, value))})"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    return type(value).__qualname__  # an object's own text may hold its address
