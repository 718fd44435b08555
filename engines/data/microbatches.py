"""Microbatches of a rank's part of a global batch, and their weights in the loss."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from engines.data.batch_structure import batch_topic
from engines.data.loader import split_rows_evenly
from engines.plan import Plan
from engines.runtime.rank_agreement import require_agreement
from engines.runtime.world import World, rank_error_context, sum_over_ranks
from profiles.capture.batch import Batch, batch_size, batch_tensors, describe, map_batch, split_rows
from profiles.errors import BatchError
from profiles.model.profile import ModelProfile

Count = Callable[[Batch], float | Tensor]
FINGERPRINT_ELEMENTS = 2**14  # of a tensor; batches that differ do so in every row


class MicrobatchCutter:
    """Cuts batches into microbatches; keeps a spare row for a microbatch without rows.

    Args:
        count: what a microbatch's mean loss is a mean over, where that is not its rows.
        replica: number of the replica that this rank is part of.
        require: check of a step's microbatches by the plan's engine; raises BatchError.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        *,
        profile: ModelProfile,
        world: World,
        count: Count | None,
        replica: int = 0,
        require: Callable[[Sequence[Batch]], None] | None = None,
    ) -> None:
        self._module = module
        self._plan = plan
        self._profile = profile
        self._world = world
        self._counter = count
        self._replica = replica
        self._require = require
        self._spare: Batch | None = None
        self._is_compared = False
        self.total = 0.0
        """Rows of the latest global batch, or their `count`: its loss is the mean over them."""
        self.counted = 0.0
        """Rows of this rank in the last batch, or their `count`."""

    def follow(self, plan: Plan) -> None:
        """Cut as `plan` says from now on."""
        self._plan = plan

    @rank_error_context("counting the rows of the batch")
    def cut(self, batch: Batch) -> tuple[list[Batch], Tensor]:
        """The plan's microbatches, and the weight of each mean loss.

        Gradients and losses are averaged over replicas, so a microbatch of n samples in a global
        batch of N over W replicas weighs n * W / N. Every rank runs the same number of microbatches
        whatever it got, because collectives must match: one without rows takes a spare row with
        weight 0.

        Raises:
            BatchError: more rows than the microbatches hold, some that cannot be used, or others
                than another rank of the same replica has; on every rank, if it is so on one.
        RankMismatchError: the first batches of ranks differ in structure.
        """
        prints = [0.0] * (2 * self._plan.data_degree if self._is_shared else 0)
        try:
            rows, sizes, pieces = self._pieces(batch)
            counts = [self._count(piece, size) for piece, size in zip(pieces, sizes, strict=True)]
            if self._require is not None:
                self._require(pieces)
        except BatchError:
            # The others learn of it before they wait for this rank.
            sum_over_ranks([0.0, 1.0, *prints], self._world)
            raise
        self.counted = sum(counts)
        if self._is_shared:
            own = float(_fingerprint(batch))
            prints[2 * self._replica : 2 * self._replica + 2] = own, own**2
        total, failed, *prints = sum_over_ranks([self.counted, 0.0, *prints], self._world)
        if failed:
            raise BatchError(
                f"{failed:.0f} of {self._world.size} ranks could not use their part of the batch",
                where=f"rank {self._world.rank}, which has {rows} rows and could",
                hints=["the output of the other ranks says why"],
            )
        if not self._world.is_fake:  # whose others send nothing
            self._require_same(prints)
        if not self._is_compared:
            self._is_compared = True
            require_agreement([batch_topic(batch)], self._world)
        replicas = self._plan.data_degree
        total *= replicas / self._world.size  # the ranks of a replica have the same
        self.total = total
        # Nothing to count anywhere (every label is padding, say) is a step without a gradient.
        scale = replicas / max(total, 1.0)
        weights = torch.tensor([count * scale for count in counts], dtype=torch.float64)
        return pieces, weights.to(self._world.device, dtype=torch.float32)

    @property
    def _is_shared(self) -> bool:
        """True if several ranks make up a replica, and must have the same rows."""
        return self._world.size > self._plan.data_degree

    def _require_same(self, prints: Sequence[float]) -> None:
        """Require that the ranks of each replica have the same rows.

        Numbers are equal if and only if the square of their sum is their count times the sum of
        their squares (Cauchy-Schwarz). The sums are integers below 2**53, so they are exact.
        """
        ranks = self._world.size // self._plan.data_degree
        pairs = zip(prints[::2], prints[1::2], strict=True)
        different = [n for n, (s, q) in enumerate(pairs) if int(s) ** 2 != ranks * int(q)]
        if different:
            raise BatchError(
                f"the {ranks} ranks of replica {different[0]} got different batches: they"
                " have parts of one model, and must work on the same rows",
                where=f"rank {self._world.rank}, plan: {self._plan}",
                hints=[
                    "`for batch in parallel.shard(loader)` gives every rank its rows; a sampler of"
                    " your own takes `parallel.data_rank` and `parallel.data_world_size`, and the"
                    " same seed everywhere"
                ],
            )

    def _pieces(self, batch: Batch) -> tuple[int, list[int], list[Batch]]:
        """Rows on this rank, rows of each microbatch, and the microbatches."""
        rows = batch_size(batch)
        sizes = split_rows_evenly(rows, self._plan.forwards)
        limit = self._plan.microbatch_size
        if limit is not None and sizes[0] > limit:
            raise BatchError(
                f"{rows} rows on this rank make microbatches of {sizes[0]}, the plan holds {limit}",
                where=f"rank {self._world.rank}, plan: {self._plan}",
                hints=[
                    f"give global batches of at most {self._plan.global_batch_size} rows,"
                    f" {limit * self._plan.forwards} per rank",
                    "or make a plan for the larger batch",
                ],
            )
        batch = self._move(batch)
        if rows and self._spare is None:  # copied: a view would keep its whole batch alive
            self._spare = map_batch(torch.clone, split_rows(batch, [1, rows - 1])[0])
        parts = split_rows(batch, sizes)
        pieces = [
            part if size else self._borrowed(rows) for part, size in zip(parts, sizes, strict=True)
        ]
        return rows, sizes, pieces

    def _count(self, piece: Batch, rows: int) -> float:
        """The count that a microbatch's mean loss is a mean over; 0 for a borrowed row."""
        return float(self._counter(piece)) if rows and self._counter else float(rows)

    def _borrowed(self, rows: int) -> Batch:
        """One row for a microbatch that has none."""
        what = f"{rows} rows on rank {self._world.rank} for {self._plan.forwards} microbatches"
        hint = "drop the short batch: DataLoader(..., drop_last=True)"
        if self._spare is None:
            raise BatchError(f"{what}, and no earlier batch to borrow a row from", hints=[hint])
        if self._profile.batch_norms and self._module.training:
            raise BatchError(
                f"{what}: a microbatch without rows would disturb the statistics of"
                f" `{self._profile.batch_norms[0]}`",
                hints=[hint],
            )
        return self._spare

    def _move(self, batch: Batch) -> Batch:
        """The batch on this rank's device, from whatever device it is on."""
        if any(tensor.is_meta for tensor in batch_tensors(batch)):
            raise BatchError(
                "a tensor of the batch is on the meta device: it has a shape and no values",
                where=describe(batch),
                hints=["a meta sample is enough to plan; train on real batches"],
            )
        device = self._world.device
        return map_batch(lambda tensor: tensor.to(device, non_blocking=True), batch)


def weighted(loss: Tensor, weight: Tensor) -> Tensor:
    """The loss times its weight in the global mean: 0 without weight, also where it is NaN."""
    return torch.where(weight > 0, loss.reshape(()) * weight, torch.zeros_like(weight))


def _fingerprint(batch: Batch) -> int:
    """20 bits of the rows: shapes, and the first bytes of every tensor that the host has."""
    checksum = zlib.crc32(describe(batch).encode())
    for tensor in batch_tensors(batch):
        if tensor.device.type == "cpu":  # of others it would wait for the device in every step
            first = tensor.detach().reshape(-1)[:FINGERPRINT_ELEMENTS].contiguous()
            checksum = zlib.crc32(first.view(torch.uint8).numpy().tobytes(), checksum)
    return checksum % 2**20
