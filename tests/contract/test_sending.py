"""Traffic and buffers of DDP's hooks equal their estimates: two nodes of two ranks."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from advisor.cost import Estimate, estimate
from advisor.cost.communication.aggregation import buffer_share
from engines.apply import apply_plan
from engines.data import loss_mean
from engines.optional.aggregation.aggregate import aggregate
from engines.plan import Aggregation, Plan
from engines.runtime import world
from profiles.capture.capture import capture
from profiles.machine.cluster import Collective
from profiles.model.profile import ModelProfile, Numerics
from tests.contract.watch import LiveBytes, Messages, facts_of
from tests.engines.cases import CASES, cpu_ranks
from tests.workers import Pool

pytestmark = pytest.mark.dist

RANKS, NODES = 4, 2
PLANS = (
    "aggregation=ring",
    "aggregation=hierarchical accumulation=2",
    "aggregation=hierarchical compression=bf16",
    "compression=bf16",
    "compression=powersgd",
    "compression=powersgd compression_rank=3 accumulation=2",
)
Sums = Counter[Collective]
CALLED_AS = (
    (dist, "all_reduce"),
    (loss_mean, "start_all_reduce"),
    (world, "start_all_reduce"),
)
"""All-reduces of hooks, and those of a step's few numbers."""


class _Reductions:
    """The bytes of all-reduces that Python calls, in whatever thread."""

    def __enter__(self) -> _Reductions:
        self.total_bytes, self._patches = 0, ExitStack()
        for owner, name in CALLED_AS:
            counted = self._counted(getattr(owner, name))
            self._patches.enter_context(mock.patch.object(owner, name, counted))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def _counted(self, called: Callable[..., Any]) -> Callable[..., Any]:
        def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.total_bytes += tensor.nbytes
            return called(tensor, *args, **kwargs)

        return all_reduce


def _plan(words: str) -> Plan:
    return Plan.parse(f"dp_replicate={RANKS} microbatch_size=2 {words}")


def _profile() -> ModelProfile:
    case = CASES["gpt"]
    return capture(case.build(), case.batch(2), loss_fn=case.loss_fn, numerics=tuple(Numerics))


def _stepped(profile: ModelProfile) -> list[tuple[Sums, int]]:
    """For each plan the bytes that a step sends, by collective; and of PowerSGD what it keeps."""
    case, results = CASES["gpt"], []
    for words in PLANS:
        plan = _plan(words)
        parallel = apply_plan(
            case.build(),
            plan,
            profile=profile,
            cluster=cpu_ranks(RANKS, nodes=NODES),
            loss_fn=case.loss_fn,
        )
        batch = case.batch(2 * plan.forwards)
        for _ in range(3):  # buckets are settled, and PowerSGD has begun
            parallel.train_step(batch)
        with Messages() as watched, _Reductions() as reductions:
            parallel.train_step(batch)
        sums = Counter[Collective]()
        for (kind, payload, *_), count in watched.sent.items():
            sums[kind] += payload * count
        if "powersgd" in words:  # its later sums begin in threads of gloo, which nobody watches
            sums[Collective.ALL_REDUCE] = reductions.total_bytes
        hooks = [s for s in gc.get_objects() if type(s) is PowerSGDState]
        results.append((sums, sum(e.nbytes for s in hooks for e in s.error_dict.values())))
        del parallel, hooks
        gc.collect()
    return results


def _charged(words: str, profile: ModelProfile) -> Estimate:
    plan = _plan(words)
    return estimate(plan, facts_of(plan, profile, nodes=NODES))


def test_predicted_bytes_equal_those_sent(pool: Pool) -> None:
    """Parts are of whole elements, so that ranks send a little more or less than an equal part; all
    together exactly what is charged."""
    profile = _profile()
    stepped = pool.run(_stepped, profile, world_size=RANKS, timeout_s=120)
    plain = _charged("", profile).peak_bytes
    gradients = sum(unit.gradient_bytes for unit in profile.units)
    for words, ranks in zip(PLANS, zip(*stepped, strict=True), strict=True):
        called, charged = Counter[Collective](), Counter[Collective]()
        for sums, errors_bytes in ranks:
            called.update(sums)
            assert errors_bytes == (gradients if "powersgd" in words else 0), words
        actual = _charged(words, profile)
        for item in actual.traffic:
            charged[item.kind] += round(item.payload_bytes * item.count * RANKS)
        assert called == charged, words
        if "powersgd" in words and "accumulation" not in words:
            assert actual.peak_bytes - plain == gradients


def _aggregation_buffers() -> dict[str, int]:
    """Bytes beside a tensor of a million while it is summed up."""
    results = {}
    for kind in Aggregation:
        tensor = torch.ones(250_000)
        with LiveBytes([tensor]) as watched:
            before = watched.now()
            aggregate(tensor, kind=kind, per_node=RANKS // NODES)
        results[kind.value] = max(watched.peak_bytes, before) - before
    return results


def test_predicted_buffers_equal_those_allocated(pool: Pool) -> None:
    """Of the rank that takes most."""
    ranks = pool.run(_aggregation_buffers, world_size=RANKS)
    for kind in Aggregation:
        share = buffer_share(kind, RANKS, per_node=RANKS // NODES)
        assert max(rank[kind.value] for rank in ranks) == share * 1_000_000, kind
