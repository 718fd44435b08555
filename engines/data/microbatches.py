"""Microbatches of a rank's part of a global batch, and their weights in the loss."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from engines.data.batch_structure import batch_topic
from engines.data.coupled_rows import require_no_coupling
from engines.data.loader import ShardedLoader, length_topic, split_rows_evenly
from engines.data.loss_rule import LossParts, LossWeight, weight_of
from engines.data.loss_weight import WeightedBatch
from engines.data.prefetch import CopiesAhead
from engines.data.replica_batches import OwnRandomness
from engines.data.same_rows import are_equal, fingerprint, print_of_whole, report_other_whole
from engines.plan import Plan
from engines.runtime.rank_agreement import require_agreement
from engines.runtime.world import (
    World,
    name_ranks,
    rank_error_context,
    say_holders,
    start_sum_over_ranks,
    sum_over_ranks,
    texts_of_ranks,
)
from profiles.capture.batch.call import Batch
from profiles.capture.batch.rows import batch_size, split_rows
from profiles.capture.batch.tree import describe, map_batch
from profiles.errors import BatchError, RankMismatchError
from profiles.model.profile import ModelProfile

log = logging.getLogger(__name__)

COUNTING = "counting the rows of the batch"
FIRST_CUTS = 2
"""Steps before ranks count beside their forwards: the first batches are compared, and the second
forward of DDP agrees on the order of its buckets."""
_DROP = "drop the short batch: DataLoader(..., drop_last=True)"


@dataclass(frozen=True, slots=True)
class _Cut:
    """A rank's batch in microbatches: rows and weight of each."""

    rows: int
    sizes: list[int]
    pieces: list[Batch]
    counts: list[float]


class MicrobatchCutter:
    """Cuts batches into microbatches; keeps a spare row for a microbatch without rows.

    Args:
        loss_weight: of a microbatch's mean loss, where it is known; else the number of targets that
            the loss was seen to be a mean over, else that of its rows.
        parts: how losses of microbatches make up that of the batch, where that is known better.
        replica: number of the replica that this rank is part of.
        require: check of a step's microbatches by the plan's engine; raises BatchError.
        overlaps: a forward exchanges nothing, so that ranks may count beside it.

    Attributes:
        is_sharded: a loader was split over the replicas.
        iterated: the loaders that are in the middle of a pass.
        copies: of batches that loaders began to copy ahead.
        draws: random numbers of loading, where several ranks make up a replica.
        total: rows of the latest global batch.
        counted: weights of this rank's rows in it.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        *,
        profile: ModelProfile,
        world: World,
        loss_weight: LossWeight | None,
        parts: LossParts | None = None,
        replica: int = 0,
        require: Callable[[Sequence[Batch]], None] | None = None,
        overlaps: bool = False,
    ) -> None:
        self._module = module
        self._plan = plan
        self._profile = profile
        self._world = world
        self._weight = loss_weight or weight_of(parts.terms if parts else profile.loss_terms)
        self._parts = parts or LossParts()
        self._is_said = loss_weight is not None
        self._has_warned = self._has_differed = False
        self._replica = replica
        self._require = require
        self._dims = profile.batch_dims or None
        self.copies = CopiesAhead(world.device)
        self.draws = OwnRandomness() if self._is_shared else None
        self._spare: Batch | None = None
        self._spare_before: Batch | None = None
        self._is_compared = False
        self._overlaps, self._cuts = overlaps, 0
        self.is_sharded = False
        self.iterated: Callable[[], Iterable[ShardedLoader]] = tuple
        self.total = 0.0
        self.counted = 0.0

    def follow(self, plan: Plan) -> None:
        """Cut as `plan` says from now on."""
        self._plan, self._cuts = plan, 0

    def take_back(self) -> None:
        """Borrow no row of the latest batch: a step failed with it, and others would too."""
        self._spare = self._spare_before

    def note_sharded(self, loader: ShardedLoader) -> None:
        """A loader of global batches is split over the replicas.

        Raises:
            BatchError: its batches are larger than the plan's, or the model does not run on a part
                of the rows.
        """
        loader.require_room(self._plan)
        if self._parts.refusal and self._plan.data_degree > 1:
            raise BatchError(
                self._parts.refusal,
                where=f"plan: {self._plan}",
                hints=["let each rank's loader make batches of its own rows, without `shard`"],
            )
        self.is_sharded = True

    @rank_error_context(COUNTING)
    def cut(self, batch: Batch, *, is_training: bool = True) -> WeightedBatch:
        """The plan's microbatches, and the weight of each mean loss.

        Gradients and losses are averaged over replicas, so a microbatch of n samples in a global
        batch of N over W replicas weighs n * W / N. Every rank runs the same number of microbatches
        whatever it got, because collectives must match: one without rows takes a spare row with
        weight 0. Those of a pipeline are alike: rows that are left over make further rounds.

        Args:
            is_training: of a step; else of an evaluation.

        Raises:
            BatchError: more rows than the microbatches hold, some that cannot be used, or others
                than another rank of the same replica has; on every rank, if it is so on one.
            RankMismatchError: the first batches of ranks differ in structure; or some ranks train
                and others evaluate.
        """
        replicas = self._plan.data_degree
        prints = [0.0] * (2 * replicas if self._is_shared else 0)
        whole = print_of_whole(self.iterated()) if replicas > 1 else []
        rounds = [0.0] * (self._plan.forwards // self._plan.in_flight if self._plan.pp > 1 else 0)
        try:
            cut = self._cut(batch)
        except BatchError as error:
            # The others learn of it before they wait for this rank.
            failed = [0.0, 0.0, 1.0, float(is_training)]
            sum_over_ranks([*failed, *rounds, *prints, *whole], self._world)
            self._refusals(error.what)
            raise
        own_rounds = (len(cut.sizes) - self._plan.forwards) // self._plan.in_flight
        rounds[:own_rounds] = [1.0] * own_rounds
        self.counted = sum(cut.counts)
        if self._is_shared:
            own = float(fingerprint(batch))
            prints[2 * self._replica : 2 * self._replica + 2] = own, own**2
        counted = [self.counted, cut.rows, 0.0, float(is_training), *rounds, *prints, *whole]
        sums = start_sum_over_ranks(counted, self._world)
        weigh = partial(self._weigh, batch, cut, sums, len(rounds), own_rounds, is_training)
        microbatches = WeightedBatch(cut.pieces, weigh)
        self._cuts += 1
        if not self._overlaps or self._cuts <= FIRST_CUTS:
            _ = microbatches.weights
            microbatches.waited_s = 0.0
        return microbatches

    @rank_error_context(COUNTING)
    def _weigh(
        self,
        batch: Batch,
        cut: _Cut,
        wait: Callable[[], list[float]],
        of_rounds: int,
        own_rounds: int,
        is_training: bool,
    ) -> tuple[list[Batch], list[float]]:
        total, rows, failed, training, *sums = wait()
        if failed:
            refusals = self._refusals("")
            first = next(iter(refusals.values()))
            raise BatchError(
                f"{failed:.0f} of {self._world.size} ranks could not use their part of the batch:"
                f" {name_ranks(list(refusals))} ({first})",
                where=f"rank {self._world.rank}, which has {cut.rows} rows and could",
                hints=["the output of the other ranks says why"],
            )
        if not self._world.is_fake:  # whose others send nothing
            self._require_same_call(training, is_training=is_training)
            self._require_same(batch, sums[of_rounds:])
        if not self._is_compared:
            self._is_compared = True
            topics = [batch_topic(batch, self._profile.batch_dims), length_topic(self.iterated())]
            require_agreement(topics, self._world)
            self._warn_of_equal_rows(batch, cut.rows)
        replicas = self._plan.data_degree
        of_replicas = replicas / self._world.size  # the ranks of a replica have the same
        self.total = rows * of_replicas
        # Nothing to count anywhere (every label is padding, say) is a step without a gradient.
        share = total / self._world.size or math.inf  # of a rank, in the mean
        if self._parts.is_sum:
            share = 1 / replicas
        most = sum(1 for each in sums[:of_rounds] if each)
        if most:
            self._require_no_batch_norms(f"{self.total:.0f} rows leave microbatches without a row")
        spare = [
            self._borrowed(cut.rows) for _ in range((most - own_rounds) * self._plan.in_flight)
        ]
        return spare, [count / share for count in cut.counts] + [0.0] * len(spare)

    def _refusals(self, own: str) -> dict[int, str]:
        """Reasons of the ranks that could not use their part of the batch; `own` is this one's."""
        if self._world.is_fake:
            return {self._world.rank: own}
        texts = texts_of_ranks("refusals", own, self._world)
        return {rank: text for rank, text in enumerate(texts) if text}

    def _require_same_call(self, training: float, *, is_training: bool) -> None:
        """Require that all ranks train, or none: rows of an evaluation would count in a step."""
        if training not in (0, self._world.size):
            own = "called `train_step`" if is_training else "called `eval_step`"
            called = texts_of_ranks("calls", own, self._world)
            raise RankMismatchError(
                f"ranks train and evaluate at once: {say_holders(dict(enumerate(called)))}",
                where=f"rank {self._world.rank}, plan: {self._plan}",
                hints=["as after loaders of different lengths: give every rank as many batches"],
            )

    @property
    def _is_shared(self) -> bool:
        """True if several ranks make up a replica, and must have the same rows."""
        return self._world.size > self._plan.data_degree

    def _require_same(self, batch: Batch, prints: Sequence[float]) -> None:
        """Require that the ranks of each replica have the same rows, out of equal batches."""
        ranks = self._world.size // self._plan.data_degree
        pairs = list(zip(prints[::2], prints[1::2], strict=True))
        if self._plan.data_degree > 1:
            whole = are_equal(*pairs.pop(), count=self._world.size)
            if not (whole or self._has_differed):
                self._has_differed = True  # it is said once
                report_other_whole(self._world, self._plan, is_first=not self._is_compared)
        different = [n for n, sums in enumerate(pairs) if not are_equal(*sums, count=ranks)]
        if different:
            texts = texts_of_ranks("rows", f"{self._replica} {describe(batch)}", self._world)
            own = {
                rank: text.partition(" ")[2]
                for rank, text in enumerate(texts)
                if text.startswith(f"{different[0]} ")
            }
            raise BatchError(
                f"the {ranks} ranks of replica {different[0]} got different batches:"
                f" {name_ranks(list(own))} have parts of one model, and must work on the same rows",
                where=f"rank {self._world.rank}, plan: {self._plan}\n{say_holders(own)}",
                hints=[
                    "`for batch in parallel.shard(loader)` gives every rank its rows; a sampler of"
                    " your own takes `parallel.data_rank` and `parallel.data_world_size`, and the"
                    " same seed everywhere",
                    "random numbers of loading begin where those of the process are: seed Python's,"
                    " numpy's and torch's alike on every rank",
                ],
            )

    def _warn_of_equal_rows(self, batch: Batch, rows: int) -> None:
        """Say where all replicas train on the same rows: a loader that knows nothing of ranks."""
        if self._plan.data_degree == 1 or self._world.size == 1 or self._world.is_fake:
            return
        prints = texts_of_ranks("first rows", str(fingerprint(batch)), self._world)
        if len(set(prints)) == 1 and rows and self._world.rank == 0:
            log.warning(
                "all %d replicas were given the same %d rows: a loader of global batches goes"
                " through `parallel.shard(loader)`",
                self._plan.data_degree,
                rows,
            )

    def _cut(self, batch: Batch) -> _Cut:
        """The microbatches of this rank alone."""
        self._spare_before = self._spare
        rows = batch_size(batch, self._dims)
        sizes = self._sizes(rows)
        self._require_room(rows, max(sizes))
        self._require_rule(batch)
        counts = [
            self._count(part, size)
            for part, size in zip(self._split(batch, sizes), sizes, strict=True)
        ]
        batch = self._move(batch)
        if rows and (self._spare is None or 0 in sizes or self._plan.pp > 1):
            first = self._split(batch, [1, rows - 1])[0]
            # Copied: a view would keep its whole batch alive.
            self._spare = map_batch(torch.clone, first)
        pieces = [
            part if size else self._borrowed(rows)
            for part, size in zip(self._split(batch, sizes), sizes, strict=True)
        ]
        if self._require is not None:
            self._require(pieces)
        return _Cut(rows, sizes, pieces, counts)

    def _split(self, batch: Batch, sizes: Sequence[int]) -> list[Batch]:
        return split_rows(batch, sizes, self._dims, rows=sum(sizes))

    def _sizes(self, rows: int) -> list[int]:
        """Rows of each microbatch. In a round of a pipeline all have the same number, but for those
        that take a spare row."""
        forwards, in_flight = self._plan.forwards, self._plan.in_flight
        each, left = divmod(rows, forwards)
        if self._plan.pp == 1 or not each or not left:
            return split_rows_evenly(rows, forwards)
        return [each] * forwards + [1] * left + [0] * (-left % in_flight)

    def _require_room(self, rows: int, largest: int) -> None:
        plan, limit = self._plan, self._plan.microbatch_size
        if limit is None or largest <= limit:
            return
        hints = [
            f"give global batches of at most {plan.global_batch_size} rows,"
            f" {limit * plan.forwards} per rank",
            "or plan for them: `auto_parallelize(...,"
            f" global_batch_size={rows * plan.data_degree})`",
        ]
        if plan.data_degree > 1 and not self.is_sharded:
            hints.insert(
                0,
                "no loader was given to `parallel.shard`: `for batch in parallel.shard(loader)`"
                " gives each rank its rows of a global batch",
            )
        raise BatchError(
            f"{rows} rows on this rank make microbatches of {largest}, the plan holds {limit}",
            where=f"rank {self._world.rank}, plan: {plan}",
            hints=hints,
        )

    def _require_rule(self, batch: Batch) -> None:
        """Refuse or warn of values for which the losses of parts do not make up the whole; those
        of the sample were judged with the plan."""
        is_new = bool(self._parts.unless) and not self._has_warned
        doubt = self._parts.doubt_of(batch)
        require_no_coupling(doubt, self._plan, is_said=self._is_said, warns=is_new)
        self._has_warned |= bool(doubt)

    def _count(self, piece: Batch, rows: int) -> float:
        """The weight of a microbatch's mean loss; 0 for a borrowed row."""
        if self._parts.is_sum:
            return float(rows > 0)
        if not rows or self._weight is None:
            return float(rows)
        count = float(self._weight(piece))
        if not math.isfinite(count) or count < 0:
            raise BatchError(
                f"`loss_weight` of a microbatch is {count}: 0 or more is wanted",
                where=describe(piece),
            )
        return count

    def _borrowed(self, rows: int) -> Batch:
        """One row for a microbatch that has none."""
        what = f"{rows} rows on rank {self._world.rank} for {self._plan.forwards} microbatches"
        if self._spare is None:
            raise BatchError(f"{what}, and no earlier batch to borrow a row from", hints=[_DROP])
        self._require_no_batch_norms(what)
        return self._spare

    def _require_no_batch_norms(self, what: str) -> None:
        if self._profile.batch_norms and self._module.training:
            raise BatchError(
                f"{what}: a microbatch without rows would disturb the statistics of"
                f" `{self._profile.batch_norms[0]}`",
                hints=[_DROP],
            )

    def _move(self, batch: Batch) -> Batch:
        """The batch on this rank's device, from whatever device it is on."""

        def moved(tensor: Tensor) -> Tensor:
            if tensor.is_meta:
                raise BatchError(
                    "a tensor of the batch is on the meta device: it has a shape and no values",
                    where=describe(batch),
                    hints=["a meta sample is enough to plan; train on real batches"],
                )
            return self.copies.moved(tensor)

        return map_batch(moved, batch)
