"""Traffic and memory of one rank of a hybrid plan in a fake world, beside its estimate."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from advisor.cost.estimates.staged import traffic_of_ranks
from advisor.cost.model import CostModel
from engines.apply import apply_plan
from engines.parallel import ParallelModel
from engines.pipeline.segments import stages_of_rank
from engines.pipeline.stage import buffers
from engines.plan import Plan, Precision, Recompute
from engines.tensor.proposal import propose_styles
from profiles.capture.batch.call import Batch
from profiles.capture.capture import capture
from profiles.machine.cluster import Collective
from profiles.model.profile import ModelProfile, Numerics
from profiles.torch_compat import tensors_in
from tests.contract.fake_world import fake_rank
from tests.contract.subjects import Decoder, batch_of
from tests.contract.watch import (
    LiveBytes,
    Messages,
    Sent,
    facts_of,
    gradients,
    local,
    optimizer_states,
)
from tests.engines.cases import cpu_ranks, token_loss

ROWS = 2  # of a microbatch
TOKENS, UNEVEN = 16, 13
EXPERTS = 8

PLANS = {
    "DDP": "dp_replicate=1024",
    "ZeRO-1": "dp_replicate=8 zero=1 accumulation=2",
    "ZeRO-2": "dp_replicate=8 zero=2 accumulation=2",
    "ZeRO-3": "dp_shard=8 accumulation=2",
    "HSDP": "dp_replicate=128 dp_shard=8 accumulation=2",
    "TP": "tp=8",
    "TP beyond key heads by tokens": "tp=16 sequence_parallel=true recompute=full",
    "TP beyond key heads + ZeRO-3": "tp=16 dp_shard=8 accumulation=2",
    "TP by tokens": "tp=8 sequence_parallel=true",
    "TP by tokens, uneven": "tp=8 sequence_parallel=true",
    "PP + TP by tokens, uneven": "pp=2 tp=8 sequence_parallel=true microbatches=2 schedule=1f1b",
    "TP by tokens, recompute": "tp=4 sequence_parallel=true recompute=full",
    "TP by tokens + ZeRO-3": "tp=4 dp_shard=8 sequence_parallel=true accumulation=2",
    "TP, recompute": "tp=8 recompute=full",
    "PP (1F1B)": "pp=4 microbatches=8 schedule=1f1b",
    "PP (GPipe)": "pp=4 microbatches=8 schedule=gpipe",
    "PP (interleaved)": "pp=2 microbatches=4 schedule=interleaved",
    "PP (ZBV)": "pp=2 microbatches=4 schedule=zbv",
    "PP + DP": "pp=2 dp_replicate=8 microbatches=4 schedule=1f1b accumulation=2",
    "PP + ZeRO-1": "pp=2 dp_replicate=8 zero=1 microbatches=4 schedule=1f1b accumulation=2",
    "PP + ZeRO-2": "pp=2 dp_replicate=8 zero=2 microbatches=4 schedule=1f1b",
    "PP + ZeRO-3": "pp=2 dp_shard=8 microbatches=4 schedule=1f1b",
    "PP (GPipe) + ZeRO-3": "pp=2 dp_shard=8 microbatches=4 schedule=gpipe",
    "PP + ZeRO-3, rounds": "pp=2 dp_shard=8 microbatches=4 schedule=1f1b accumulation=3",
    "PP (interleaved) + HSDP, rounds": "pp=2 dp_replicate=2 dp_shard=4 microbatches=4"
    " schedule=interleaved accumulation=2",
    "PP (ZBV) + ZeRO-3, rounds": "pp=2 dp_shard=8 microbatches=4 schedule=zbv accumulation=2",
    "PP + HSDP": "pp=2 dp_replicate=64 dp_shard=8 microbatches=4 schedule=1f1b",
    "TP + DP": "tp=4 dp_replicate=256",
    "TP + ZeRO-1": "tp=4 dp_replicate=8 zero=1",
    "TP + ZeRO-2": "tp=4 dp_replicate=8 zero=2 accumulation=2",
    "TP + ZeRO-3": "tp=4 dp_shard=8 accumulation=2",
    "TP + HSDP": "tp=2 dp_replicate=16 dp_shard=8",
    "PP + TP": "pp=2 tp=4 microbatches=4 schedule=1f1b",
    "PP + TP + DP": "pp=4 tp=8 dp_replicate=32 microbatches=8 schedule=1f1b",
    "PP + TP + ZeRO-1": "pp=4 tp=4 dp_replicate=8 zero=1 microbatches=8 schedule=1f1b",
    "PP + TP + ZeRO-2": "pp=2 tp=2 dp_replicate=8 zero=2 microbatches=4 schedule=1f1b",
    "PP + TP + ZeRO-3": "pp=2 tp=4 dp_shard=8 microbatches=4 schedule=1f1b",
    "PP + TP + HSDP": "pp=4 tp=4 dp_replicate=8 dp_shard=8 microbatches=4 schedule=1f1b",
    "PP + DP, recompute": "pp=2 dp_replicate=4 microbatches=4 schedule=1f1b recompute=full",
    "PP + TP + DP, tied": "pp=2 tp=4 dp_replicate=2 microbatches=4 schedule=1f1b",
    "PP of four + TP, tied": "pp=4 tp=2 microbatches=4 schedule=1f1b",
    "PP + TP by tokens + ZeRO-1": "pp=2 tp=4 dp_replicate=8 zero=1 microbatches=4 schedule=1f1b"
    " sequence_parallel=true",
    "EP + DP": "dp_replicate=8 ep=4 accumulation=2 bucket_mib=16",
    "EP + ZeRO-1, recompute": "dp_replicate=8 ep=4 zero=1 accumulation=2 recompute=full",
    "PP + EP + DP": "pp=2 dp_replicate=8 ep=4 microbatches=4 schedule=1f1b",
    "PP + EP + ZeRO-1, recompute": "pp=2 dp_replicate=8 ep=4 zero=1 microbatches=4 schedule=1f1b"
    " accumulation=2 recompute=full",
    "PP (interleaved) + EP + ZeRO-2": "pp=2 dp_replicate=8 ep=4 zero=2 microbatches=4"
    " schedule=interleaved",
    "PP + EP + ZeRO-3": "pp=2 dp_shard=8 ep=4 microbatches=4 schedule=1f1b",
    "PP + EP + HSDP": "pp=4 dp_replicate=32 dp_shard=8 ep=8 microbatches=4 schedule=1f1b",
    "TP + EP + DP": "tp=2 dp_replicate=8 ep=4 bucket_mib=16",
    "TP + EP + ZeRO-3": "tp=2 dp_shard=8 ep=4 accumulation=2",
    "TP by tokens + EP + ZeRO-1": "tp=4 dp_replicate=8 ep=4 zero=1 sequence_parallel=true",
    "PP + TP by tokens + EP + ZeRO-1, recompute": "pp=2 tp=4 dp_replicate=8 ep=8 zero=1"
    " microbatches=4 schedule=1f1b sequence_parallel=true recompute=full",
    "DDP, bf16": "dp_replicate=8 precision=bf16",
    "TP + ZeRO-3, bf16": "tp=4 dp_shard=8 precision=bf16",
    "PP + ZeRO-1, bf16": "pp=2 dp_replicate=8 zero=1 microbatches=4 schedule=1f1b precision=bf16",
}
"""Every engine, and what combines them; worlds of 2 to 1,024 ranks."""
STAGES = {
    2: ("blocks.2",),
    4: ("blocks.1", "blocks.2", "blocks.3"),
}
"""Borders by the number of stages."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A plan with its styles and borders, the model it is for, and what is known of that."""

    name: str
    plan: Plan
    profile: ModelProfile
    is_tied: bool
    tokens: int = TOKENS

    def build(self) -> Decoder:
        return _decoder(self.is_tied, self.plan.ep > 1)

    def batch(self, rows: int = ROWS) -> Batch:
        return batch_of(rows, tokens=self.tokens)

    @property
    def ranks(self) -> Iterator[int]:
        """One for every stage: the first on all other axes."""
        return iter(range(0, self.plan.world_size, self.plan.world_size // self.plan.pp))


@dataclass(frozen=True, slots=True)
class Compared:
    """Of one rank: what was called and what was charged, in messages and bytes.

    Attributes:
        states: parameters, gradients and optimizer states when the optimizer steps.
        activations: kept from the forward of one microbatch to its backward, of all its stages.
    """

    rank: int
    called: Sent
    charged: Sent
    states: int
    charged_states: float
    activations: int | None
    charged_activations: float

    @property
    def unexplained(self) -> tuple[Sent, Sent]:
        """Messages called and not charged, and charged and not called.

        DDP fills its buckets with whole tensors in the order of their gradients, which a profile
        does not have: where that is all that differs, and their number and bytes are the same, it
        is no difference.
        """
        called, charged = self.called - self.charged, self.charged - self.called
        if _totals(called) == _totals(charged):
            return Counter(), Counter()
        return called, charged


def _totals(sent: Sent) -> dict[object, tuple[int, int]]:
    """Number and bytes of all-reduces by their groups; other kinds one by one."""
    results: dict[object, tuple[int, int]] = {}
    for (kind, payload, size, stride), count in sent.items():
        is_sum = kind is Collective.ALL_REDUCE
        key = (kind, size, stride) if is_sum else (kind, payload, size, stride)
        before = results.get(key, (0, 0))
        results[key] = before[0] + count, before[1] + count * payload
    return results


def _decoder(is_tied: bool, has_experts: bool) -> Decoder:
    return Decoder(tied=is_tied, experts=EXPERTS if has_experts else 0)


@cache
def _profile(is_tied: bool, has_experts: bool, tokens: int) -> ModelProfile:
    model, sample = _decoder(is_tied, has_experts), batch_of(ROWS, tokens=tokens)
    return capture(model, sample, loss_fn=token_loss, numerics=tuple(Numerics))


@cache
def _styles(
    is_tied: bool, has_experts: bool, tp: int, by_tokens: bool, tokens: int
) -> tuple[tuple[str, str], ...]:
    """As the engine proposes and proves them."""
    return propose_styles(
        _decoder(is_tied, has_experts),
        batch_of(ROWS, tokens=tokens),
        size=tp,
        profile=_profile(is_tied, has_experts, tokens),
        has_target=True,
        by_tokens=by_tokens,
    ).styles


def subject_of(name: str) -> Subject:
    plan, is_tied = Plan.parse(f"{PLANS[name]} microbatch_size={ROWS}"), "tied" in name
    stages = plan.pp * (2 if "interleaved" in name or "ZBV" in name else 1)
    update: dict[str, object] = {"stages": STAGES.get(stages, ())}
    has_experts, tokens = plan.ep > 1, UNEVEN if "uneven" in name else TOKENS
    if plan.tp > 1:
        by_tokens = plan.sequence_parallel
        update["tensor_styles"] = _styles(is_tied, has_experts, plan.tp, by_tokens, tokens)
    profile = _profile(is_tied, has_experts, tokens)
    return Subject(name, plan.model_copy(update=update), profile, is_tied, tokens)


def compared(subject: Subject, rank: int) -> Compared:
    """Three steps of one rank; the last one is looked at, when DDP has settled on its buckets."""
    plan = subject.plan
    with fake_rank(rank, plan.world_size):
        parallel = apply_plan(
            subject.build(),
            plan,
            profile=subject.profile,
            cluster=cpu_ranks(plan.world_size),
            loss_fn=token_loss,
            sample=subject.batch(),
        )
        batch = subject.batch(ROWS * plan.forwards)
        parallel.train_step(batch)
        parallel.train_step(batch)
        states = []
        hook = parallel.optimizer.register_step_pre_hook(
            lambda *_: states.append(_states(parallel))
        )
        with Messages() as messages:
            parallel.train_step(batch)
        hook.remove()
        # Gathered parameters and autocast's copies are held as well, and charged elsewhere.
        # Experts of this rank save what tokens came, here in another code path than captured.
        is_plain = not plan.data_parallel.is_sharded and plan.precision is Precision.FP32
        is_plain = is_plain and plan.ep == 1
        activations = saved_activations(parallel, subject.batch()) if is_plain else None
    model = CostModel(facts_of(plan, subject.profile))
    position = rank // (plan.world_size // plan.pp)
    return Compared(
        rank=rank,
        called=messages.sent,
        charged=charged(model, plan, position),
        states=states[0],
        charged_states=_charged_states(model, plan, position),
        activations=activations,
        charged_activations=charged_activations(model, plan, position),
    )


def charged(model: CostModel, plan: Plan, position: int) -> Sent:
    """Estimated traffic of the rank at a position of the pp axis."""
    whole = plan.pp == 1
    traffic = model.estimate(plan).traffic if whole else traffic_of_ranks(model, plan)[position]
    actual: Sent = Counter()
    for item in traffic:
        key = item.kind, round(item.payload_bytes), item.group_size, item.stride
        actual[key] += item.count
    return actual


def _charged_states(model: CostModel, plan: Plan, position: int) -> float:
    estimate = model.estimate(plan)
    if plan.pp == 1:
        return estimate.states_bytes
    return next(stage.states_bytes for stage in estimate.stages if stage.rank == position)


def charged_activations(model: CostModel, plan: Plan, position: int) -> float:
    """Bytes of a microbatch that the rank at a position of the pp axis is charged, of all its
    stages."""
    ends = model.stages.ends(plan) if plan.pp > 1 else (0, len(model.facts.model.units))
    own = stages_of_rank(plan, position) if plan.pp > 1 else (0,)
    loads = model.loads(plan)
    units = [u for s in own for u in loads.part(ends[s], ends[s + 1]).units]
    is_again = plan.recompute is Recompute.FULL
    return sum(u.input_bytes if is_again and u.is_block else u.activation_bytes for u in units)


def _states(parallel: ParallelModel) -> int:
    """Step counters are left out, they are no bytes worth charging."""
    moments = [state for state in optimizer_states(parallel) if state.dim()]
    tensors = [*map(local, parallel.parameters()), *gradients(parallel), *moments]
    return sum(tensor.nbytes for tensor in tensors)


def saved_activations(parallel: ParallelModel, batch: Batch) -> int:
    """Bytes that a forward of every stage leaves for its backward.

    What arrives over a border is kept by the first unit of a stage; what leaves it belongs to the
    exchange, as the loss does.
    """
    pipeline = parallel._pipeline
    module = parallel.module
    known = [*map(local, module.parameters()), *module.buffers(), *batch]
    if pipeline is None:
        return _left(lambda: parallel._loss(batch, partial(torch.ones, ())), known, arrived=())
    recording = pipeline._recording(batch)
    pipeline._round.pieces, pipeline._round.weights = [batch], [torch.ones(1)]
    number, actual = torch.zeros(1, dtype=torch.int64), 0
    for stage in pipeline._stages(recording):
        arrived = buffers(stage.segment.received, recording, torch.device("cpu"))
        run = partial(stage, *arrived, microbatch=number)
        actual += _left(run, known, arrived)
    return actual


def _left(run: Callable[[], object], known: Sequence[Tensor], arrived: Sequence[Tensor]) -> int:
    """Bytes that stay allocated after a call, without those that it returns; `arrived` counts."""
    watched = LiveBytes([*known, *arrived])
    before = watched.now()
    with watched:
        output = run()
    gc.collect()  # a forward that ends early leaves frames that hold each other
    returned = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors_in(output)}
    made = watched.now() - before - sum(storage.nbytes() for storage in returned.values())
    return made + sum(tensor.nbytes for tensor in arrived)
