"""Search space: every legal plan as a row of numbers, in columns.

A row has all settings of a plan but its stage borders, which follow from them (see
`advisor.search.stages`). The order of mesh axes is the engines' (`engines.plan.AXES`): axes with
the most traffic are innermost, between the nearest ranks. Another order would make some plans
faster, but none faster than the best of this order: a plan that gains from it has most traffic on
its outer axes, and the space also has a plan with that traffic on inner axes
(tests/advisor/search/test_placement.py tries every order on small clusters).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from engines.plan import (
    DataParallel,
    Offload,
    OffloadTo,
    PartialPlan,
    Plan,
    Precision,
    Recompute,
    Schedule,
    Updates,
)
from engines.tensor.token_rules import splits_tokens
from profiles.record.bounds import MOST_MICROBATCHES

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

KINDS = tuple(DataParallel)
SCHEDULES: tuple[Schedule | None, ...] = (None, *Schedule)
RECOMPUTES = tuple(Recompute)


@dataclass(frozen=True, slots=True)
class Row:
    """Row with the field names of `Plan`; `stages` has one number per border."""

    pp: int
    tp: int
    cp: int
    dp_replicate: int
    dp_shard: int
    data_parallel: DataParallel
    schedule: Schedule | None
    per_rank: int
    microbatch_size: int
    microbatches: int
    accumulation: int
    recompute: Recompute
    offload: Offload
    updates: Updates = Updates.SYNCHRONOUS
    sync_every: int = 1
    servers: int = 0
    backup_workers: int = 0
    ep: int = 1

    @property
    def forwards(self) -> int:
        return self.microbatches * self.accumulation

    @property
    def stages(self) -> range:
        return range(self.pp * self.per_rank - 1)


@dataclass(frozen=True, slots=True)
class Space:
    """Plans as columns of equal length.

    Attributes:
        pp, tp, cp, dp_replicate, dp_shard, microbatch_size, microbatches, accumulation: as in
            `Plan`.
        per_rank: stages per rank; 1 without a pipeline.
        kind, schedule, recompute: indices into `KINDS`, `SCHEDULES`, `RECOMPUTES`.
        offload, precision: of all rows.
        styles: tensor styles by tp degree.
        segments: units that may begin a stage, including the first one of the model.
        common: settings of all plans that are not searched.
    """

    pp: Integers
    tp: Integers
    cp: Integers
    dp_replicate: Integers
    dp_shard: Integers
    kind: Integers
    recompute: Integers
    microbatch_size: Integers
    microbatches: Integers
    accumulation: Integers
    schedule: Integers
    per_rank: Integers
    offload: Offload
    precision: Precision
    styles: Mapping[int, tuple[tuple[str, str], ...]]
    segments: tuple[str, ...]
    common: PartialPlan

    def __len__(self) -> int:
        return len(self.pp)

    @property
    def forwards(self) -> Integers:
        """Microbatches per replica and optimizer step."""
        return self.microbatches * self.accumulation

    @property
    def updates(self) -> Updates:
        """Kind of updates of all rows."""
        return self.common.updates or Updates.SYNCHRONOUS

    @property
    def updates_in_step(self) -> bool:
        """Return True if replicas all-reduce gradients in every step, in all rows."""
        return self.updates is Updates.SYNCHRONOUS and not self.common.servers

    @property
    def offload_to(self) -> OffloadTo:
        """Target of `offload`, of all rows."""
        return self.common.offload_to or OffloadTo.HOST

    @property
    def is_to_disk(self) -> bool:
        return self.offload_to is OffloadTo.DISK

    @property
    def ep(self) -> int:
        """Expert-parallel degree of all rows."""
        return self.common.ep or 1

    def has_rows_of(self, other: Space) -> bool:
        """Return True if both have the same rows, in the same order."""
        return len(self) == len(other) and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in COLUMNS
        )

    def part(self, rows: Integers) -> Space:
        """Subspace of these rows."""
        return replace(self, **{name: getattr(self, name)[rows] for name in COLUMNS})

    def row(self, index: int) -> Row:
        """Settings of a row, without building its plan."""
        return Row(
            pp=int(self.pp[index]),
            tp=int(self.tp[index]),
            cp=int(self.cp[index]),
            dp_replicate=int(self.dp_replicate[index]),
            dp_shard=int(self.dp_shard[index]),
            data_parallel=KINDS[self.kind[index]],
            schedule=SCHEDULES[self.schedule[index]],
            per_rank=int(self.per_rank[index]),
            microbatch_size=int(self.microbatch_size[index]),
            microbatches=int(self.microbatches[index]),
            accumulation=int(self.accumulation[index]),
            recompute=RECOMPUTES[self.recompute[index]],
            offload=self.offload,
            updates=self.updates,
            sync_every=self.common.sync_every or 1,
            servers=self.common.servers or 0,
            backup_workers=self.common.backup_workers or 0,
            ep=self.ep,
        )

    def plan(self, index: int, *, stages: tuple[str, ...] = ()) -> Plan:
        """Plan of a row, whose stages begin with the units `stages`."""
        row, styles = self.row(index), self.styles.get(int(self.tp[index]), ())
        settings = {
            **self.common.fixed,
            "pp": row.pp,
            "tp": row.tp,
            "cp": row.cp,
            "data_parallel": row.data_parallel,
            "dp_replicate": row.dp_replicate,
            "dp_shard": row.dp_shard,
            "schedule": row.schedule,
            "stages": stages,
            "tensor_styles": styles,
            "sequence_parallel": splits_tokens(styles),
            "microbatch_size": row.microbatch_size,
            "microbatches": row.microbatches,
            "accumulation": row.accumulation,
            "recompute": row.recompute,
            "precision": self.precision,
            "offload": self.offload,
        }
        return plan_with(**settings)  # rows are legal: validation takes longer than all else


COLUMNS = tuple(field.name for field in fields(Space))[:12]

_DEFAULTS = Plan.model_construct()


def plan_with(**settings: object) -> Plan:
    """Plan with these settings and defaults for all others; it is not validated."""
    return _DEFAULTS.model_copy(update=settings)


def divisors(number: int) -> list[int]:
    """Divisors of `number`, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [value for value in range(1, int(number**0.5) + 1) if number % value == 0]
    return sorted({*small, *(number // value for value in small)})


def factors(number: int) -> Iterator[tuple[int, int, int]]:
    """Yield (size, microbatches, accumulation) with product `number`, large sizes first.

    >>> list(factors(2))
    [(2, 1, 1), (1, 2, 1), (1, 1, 2)]
    """
    for size in reversed(divisors(number)):
        for microbatches in reversed(divisors(number // size)):
            accumulation = number // size // microbatches
            if max(microbatches, accumulation) <= MOST_MICROBATCHES:
                yield size, microbatches, accumulation


def stages_per_rank(schedule: Schedule, pp: int, segments: int) -> Sequence[int]:
    """Possible numbers of stages per rank, for a model of `segments` segments.

    Of numbers with equally many segments in the largest stage only the smallest: more stages of the
    same size send more, without a smaller bubble.

    >>> stages_per_rank(Schedule.INTERLEAVED, 2, 12), stages_per_rank(Schedule.ZBV, 2, 12)
    ([2, 3, 6], [2])
    """
    first = {Schedule.INTERLEAVED: 2, Schedule.ZERO_BUBBLE: 1, Schedule.ZBV: 2}.get(schedule, 1)
    most = segments // pp
    if schedule not in (Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE):
        return [first] if first <= most else []
    by_largest: dict[int, int] = {}
    for count in range(first, most + 1):
        by_largest.setdefault(-(-segments // (pp * count)), count)
    return list(by_largest.values())
