"""ParallelModel: what a plan makes of a model. The same calls for every plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointError

from engines import checkpoint
from engines.data import ShardedLoader, shares
from engines.ddp import autocast, explained_reduction, require_all_reduced
from engines.fsdp import prepare_backward, release, start_over
from engines.optimizer import clip_gradients, full_gradients, local_part, send_from_rank_zero
from engines.pipeline.cuts import Cut, cuts
from engines.plan import Plan
from engines.world import World, in_contact, sum_over_ranks
from profiles.batch import (
    Batch,
    batch_size,
    batch_tensors,
    call_model,
    describe,
    loss_of,
    map_batch,
    split_rows,
)
from profiles.errors import BatchError, ModelError, PlanError
from profiles.model import ModelProfile
from profiles.torch_compat import map_tensors

if TYPE_CHECKING:
    from engines.pipeline.pipeline import Pipeline

LossFn = Callable[..., Tensor]


class ParallelModel(nn.Module):
    """A model under a plan: train it with `train_step`, or in a classic loop.

    `train_step(batch)` cuts the rank's part of the global batch into the plan's microbatches, runs
    forward and backward on each, exchanges gradients, clips, steps, and returns the loss averaged
    over the samples of all ranks. It does not switch between train and eval mode.

    A classic loop works for plans without stages: `out = parallel(x); loss.backward();
    parallel.optimizer.step(); parallel.optimizer.zero_grad()`.

    Attributes:
        module: the user's own module; its parameters are now what the plan says.
        plan: how it is spread.
        decision: why; None where the plan was given.
        optimizer: steps the parameters that this rank holds.
        data_rank, data_world_size: which part of the data this rank sees.
    """

    decision: object

    def __init__(
        self,
        module: nn.Module,
        runner: Callable[..., Any],
        *,
        plan: Plan,
        profile: ModelProfile,
        world: World,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFn | None,
        count: Callable[[Batch], float | Tensor] | None,
        max_grad_norm: float | None,
        runs_autocast: bool,
        seed: int,
        pipeline: Pipeline | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.plan = plan
        self.decision = None
        self.optimizer = optimizer
        self.data_rank = world.rank % plan.data_degree
        self.data_world_size = plan.data_degree
        self._profile = profile
        self._world = world
        self._loss_fn = loss_fn
        self._counter = count
        self._max_grad_norm = max_grad_norm
        self._runs_autocast = runs_autocast
        self._seed = seed
        self._spare: Batch | None = None
        self._pipeline = pipeline
        # Kept out of the module tree: a wrapper must not show in names or state dicts.
        object.__setattr__(self, "_runner", runner)

    @in_contact("running the model")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward, under the plan's precision; outputs are fp32 or as built.

        Raises:
            PlanError: in a pipeline no rank has the whole model.
        """
        if self._pipeline is not None:
            raise PlanError(
                "a pipeline cannot be called: a rank has its own stages only",
                where=f"plan: {self.plan}",
                hints=["use `train_step(batch)` and `eval_step(batch)`, on all ranks"],
            )
        try:
            with explained_reduction(), autocast(self._world.device, enabled=self._runs_autocast):
                output = self._runner(*args, **kwargs)
        except BaseException:
            start_over(self.module, self.plan)
            raise
        if not torch.is_grad_enabled():
            release(self.module)  # no backward will follow to do it
        return map_tensors(_as_fp32, output) if self._runs_autocast else output

    def train_step(self, batch: Batch) -> Tensor:
        """One optimizer step on this rank's part of the global batch.

        Every sample weighs the same: a microbatch's loss must be the mean over its samples. Where
        it is the mean over something else (tokens that are not padding), give `count` to
        `apply_plan` or `auto_parallelize`.

        Returns the loss averaged over all samples of all ranks: 0-d, on the device, no gradient.

        Raises:
            BatchError: more rows than the plan's microbatches hold, or tensors that do not agree.
        """
        loss = self.forward_backward(batch)
        if self._max_grad_norm is not None:
            self.clip_grad_norm_(self._max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    @in_contact("exchanging gradients")
    def forward_backward(self, batch: Batch) -> Tensor:
        """`train_step` without the step: gradients are left averaged over the global batch.

        Where it raises it leaves no gradients, and the next call starts clean.
        """
        pieces, weights = self._cut(batch)
        self._follow_rank_zero()
        total = torch.zeros((), device=self._world.device)
        try:
            if self._pipeline is not None:
                with _explained_recompute(self.plan):
                    total += self._pipeline.forward_backward(pieces, weights.unbind())
                pieces = []
            for index, piece in enumerate(pieces):
                with self._backward_mode(last=index == len(pieces) - 1):
                    loss = _weighted(self._loss(piece), weights[index])
                    with _explained_recompute(self.plan):
                        loss.backward()
                total += loss.detach()
        except BaseException:
            start_over(self.module, self.plan)
            self.module.zero_grad(set_to_none=True)
            raise
        self._check_unused()
        return self._average(total)

    @in_contact("averaging the loss")
    @torch.no_grad()
    def eval_step(self, batch: Batch) -> Tensor:
        """The loss of this rank's part, averaged over all samples of all ranks; no gradients.

        Call `eval()` before and `train()` after where the model distinguishes them.
        """
        pieces, weights = self._cut(batch)
        self._follow_rank_zero()
        total = torch.zeros((), device=self._world.device)
        if self._pipeline is not None:
            return self._average(self._pipeline.evaluate(pieces, weights.unbind()))
        for piece, weight in zip(pieces, weights, strict=True):
            total += _weighted(self._loss(piece), weight)
        return self._average(total)

    def shard(self, loader: Iterable[Batch]) -> ShardedLoader:
        """`loader` yields global batches; the result yields this replica's rows of each."""
        return ShardedLoader(
            loader, replica=self.data_rank, replicas=self.data_world_size, seed=self._seed
        )

    @in_contact("summing up the norms of gradients")
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their global L2 norm is at most `max_norm`.

        Returns the norm before clipping, over all shards, the same on every rank.
        """
        if self._pipeline is not None:
            return self._pipeline.clip(max_norm)
        return clip_gradients(self.module.parameters(), max_norm)

    @in_contact("putting gradients together")
    def full_gradients(self) -> dict[str, Tensor]:
        """Whole gradients by original name, on every rank; all ranks must call it."""
        if self._pipeline is not None:
            return self._pipeline.full_gradients()
        return full_gradients(self.module)

    @in_contact("saving")
    def save(self, path: checkpoint.PathLike) -> None:
        """Write weights and optimizer states to the folder `path`; all ranks call it.

        Any plan with any world size can load it. An interrupted save leaves the old folder.
        """
        release(self.module)
        self._follow_rank_zero(every_buffer=True)
        owned = self._pipeline.owns if self._pipeline is not None else None
        checkpoint.save(path, self.module, self.optimizer, world=self._world, owned=owned)

    @in_contact("loading")
    def load(self, path: checkpoint.PathLike) -> None:
        """Read what `save` wrote under any plan; all ranks call it."""
        release(self.module)
        held = self._pipeline.holds if self._pipeline is not None else None
        checkpoint.load(path, self.module, self.optimizer, held=held)

    @in_contact("putting the state together")
    def state_dict(  # type: ignore[override]
        self,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Whole tensors under the unwrapped model's names, on every rank; all ranks call it.

        Needs the memory of the whole model; `save` does not. `keep_vars` has no meaning for tensors
        that were put together here.
        """
        release(self.module)
        self._follow_rank_zero(every_buffer=True)
        found = destination if destination is not None else {}
        pipeline = self._pipeline
        state = pipeline.whole_state() if pipeline else checkpoint.whole_state(self.module)
        for name, value in state.items():
            found[prefix + name] = value
        return found

    @in_contact("spreading the state")
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load whole tensors, the same on every rank, as the unwrapped model would."""
        release(self.module)
        held = self._pipeline.holds if self._pipeline is not None else None
        return checkpoint.set_whole_state(self.module, dict(state_dict), strict=strict, held=held)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Original names; what this rank holds."""
        found = self.module.named_parameters(prefix, recurse, remove_duplicate)
        if self._pipeline is None:
            return found
        start = len(prefix) + 1 if prefix else 0
        return ((name, p) for name, p in found if self._pipeline.holds(name[start:]))

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Original names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """What crosses each cut of a pipeline for one microbatch: the plan's, else the sample."""
        samples = self.plan.microbatch_size or self._profile.samples
        return cuts(self.plan, self._profile.flow, samples=samples)

    def extra_repr(self) -> str:
        return "\n".join([f"plan: {self.plan}", *map(str, self.cuts)])

    def _loss(self, piece: Batch) -> Tensor:
        output = call_model(self, piece, has_target=self._loss_fn is not None)
        return loss_of(output, piece, self._loss_fn)

    def _cut(self, batch: Batch) -> tuple[list[Batch], Tensor]:
        """The plan's microbatches, and the weight of each mean loss.

        Gradients and losses are averaged over replicas, so a microbatch of n samples in a global
        batch of N over W replicas weighs n * W / N. Every rank runs the same number of microbatches
        whatever it got, because collectives must match: one without rows takes a spare row with
        weight 0.
        """
        try:
            rows, sizes, pieces = self._pieces(batch)
            counts = [self._count(piece, size) for piece, size in zip(pieces, sizes, strict=True)]
            if self._pipeline is not None:
                self._pipeline.require_equal_pieces(pieces)
        except BatchError:
            sum_over_ranks([0.0, 1.0], self._world)  # tell the others before they wait for us
            raise
        total, failed = sum_over_ranks([sum(counts), 0.0], self._world)
        if failed:
            raise BatchError(
                f"{failed:.0f} of {self._world.size} ranks could not use their part of the batch",
                where=f"rank {self._world.rank}, which has {rows} rows and could",
                hints=["the output of the other ranks says why"],
            )
        total *= self.data_world_size / self._world.size  # the ranks of a replica have the same
        # Nothing to count anywhere (every label is padding, say) is a step without a gradient.
        scale = self.data_world_size / max(total, 1.0)
        weights = torch.tensor([count * scale for count in counts], dtype=torch.float64)
        return pieces, weights.to(self._world.device, dtype=torch.float32)

    def _pieces(self, batch: Batch) -> tuple[int, list[int], list[Batch]]:
        """Rows on this rank, rows of each microbatch, and the microbatches."""
        rows = batch_size(batch)
        sizes = shares(rows, self.plan.forwards)
        limit = self.plan.microbatch_size
        if limit is not None and sizes[0] > limit:
            raise BatchError(
                f"{rows} rows on this rank make microbatches of {sizes[0]}, the plan holds {limit}",
                where=f"rank {self._world.rank}, plan: {self.plan}",
                hints=[
                    f"give global batches of at most {self.plan.global_batch_size} rows,"
                    f" {limit * self.plan.forwards} per rank",
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
        """What a microbatch's mean loss is a mean over; 0 for a borrowed row."""
        return float(self._counter(piece)) if rows and self._counter else float(rows)

    def _borrowed(self, rows: int) -> Batch:
        """One row for a microbatch that has none."""
        what = f"{rows} rows on rank {self._world.rank} for {self.plan.forwards} microbatches"
        hint = "drop the short batch: DataLoader(..., drop_last=True)"
        if self._spare is None:
            raise BatchError(f"{what}, and no earlier batch to borrow a row from", hints=[hint])
        if self._profile.batch_norms and self.module.training:
            raise BatchError(
                f"{what}: a microbatch without rows would disturb the statistics of"
                f" `{self._profile.batch_norms[0]}`",
                hints=[hint],
            )
        return self._spare

    def _backward_mode(self, *, last: bool) -> AbstractContextManager[None]:
        if isinstance(self.module, FSDPModule):
            prepare_backward(self.module, self.plan, last=last)
        elif isinstance(self._runner, DistributedDataParallel) and not last:
            return self._runner.no_sync()
        return nullcontext()

    def _follow_rank_zero(self, *, every_buffer: bool = False) -> None:
        """Running statistics of batch norms follow rank 0, as they do under plain DDP.

        Other buffers do so where they are written out: a checkpoint holds rank 0's.
        """
        has_statistics = bool(self._profile.batch_norms) and not self.plan.sync_batch_norm
        if self.data_world_size > 1 and (every_buffer or has_statistics):
            send_from_rank_zero(self.module.buffers(), self._world.device)

    def _check_unused(self) -> None:
        if isinstance(self._runner, DistributedDataParallel):
            require_all_reduced(self._runner, self._profile)
        elif isinstance(self.module, FSDPModule):
            # Zeros were exchanged for parameters that no rank uses; optimizers skip None, not 0.
            for name in self._profile.unused:
                parameter = self.module.get_parameter(name)
                if parameter.grad is not None and not local_part(parameter.grad).any():
                    parameter.grad = None

    def _average(self, value: Tensor) -> Tensor:
        """Over replicas; the ranks of a pipeline that have no loss hold zero."""
        if self._world.size > 1:
            dist.all_reduce(value)
            value /= self.data_world_size
        return value

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

    if TYPE_CHECKING:
        _runner: Callable[..., Any]


@contextmanager
def _explained_recompute(plan: Plan) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, CheckpointError) and "has been mutated" not in str(error):
            raise
        raise ModelError(
            "a block computes something else the second time: its forward changes state outside it"
            " or changes a kept tensor in place (a key/value cache, an in-place activation)",
            where=f"plan: {plan}\n{str(error).splitlines()[0]}",
            hints=["switch the cache off (`use_cache=False`)", "or plan with recompute=none"],
        ) from error


def _weighted(loss: Tensor, weight: Tensor) -> Tensor:
    """The loss's share of the global mean; without weight nothing counts, NaN neither."""
    return torch.where(weight > 0, loss.reshape(()) * weight, torch.zeros_like(weight))


def _as_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor
