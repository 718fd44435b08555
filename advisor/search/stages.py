"""Which units the stages of a row begin with."""

from __future__ import annotations

from advisor.cost import CostModel
from advisor.search.space import Pins, Space
from engines.plan import Plan


class Stages:
    """The best borders for every row, made once for rows that share them."""

    def __init__(self, costs: CostModel, pins: Pins) -> None:
        self._costs = costs
        self._pinned = tuple(pins.get("stages", ()))

    def plan(self, space: Space, index: int) -> Plan:
        """The plan of a row."""
        return space.plan(index, stages=self._pinned)
