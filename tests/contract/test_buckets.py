"""Buckets of DDP: the messages that are charged for a bucket size are those that DDP sends."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engines.apply import apply_plan
from engines.plan import Plan
from profiles.machine.cluster import Collective
from tests.contract.watch import Calls, Collectives, prediction
from tests.engines.cases import Case, cpu_ranks, profile_of
from tests.workers import Pool

pytestmark = pytest.mark.dist

ROWS, WIDTH, LAYERS = 2, 512, 6
MIB = WIDTH * WIDTH * 4
"""The gradient of a layer."""


def _layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, WIDTH, generator=generator), torch.arange(rows)


CASE = Case(_layers, _batch, F.cross_entropy)


def _sent(text: str) -> tuple[Calls, Calls]:
    """Messages of one step after DDP has settled on its buckets, and those it is charged."""
    model, plan = CASE.build(), Plan.parse(text)
    profile = profile_of(CASE, model, ROWS)
    parallel = apply_plan(model, plan, profile=profile, cluster=cpu_ranks(2), loss_fn=CASE.loss_fn)
    batch = CASE.batch(ROWS * plan.forwards)
    for _ in range(2):
        parallel.train_step(batch)
    with Collectives() as watched:
        parallel.train_step(batch)
    charged: Calls = Counter()
    for item in prediction(plan, profile).traffic:
        charged[item.kind, round(item.payload_bytes)] += item.count
    return watched.calls, charged


@pytest.mark.parametrize(
    ("setting", "messages"),
    [
        ("", {1: 1, 5: 1}),  # the first bucket is 1 MiB, so that something is sent early
        ("bucket_mib=1", {1: 6}),
        ("bucket_mib=2", {2: 3}),
        ("bucket_mib=100", {6: 1}),
    ],
)
def test_gradients_are_sent_in_buckets_of_the_predicted_size(
    setting: str, messages: dict[int, int], pool: Pool
) -> None:
    text = f"dp_replicate=2 microbatch_size={ROWS} {setting}"
    wanted = {(Collective.ALL_REDUCE, size * MIB): count for size, count in messages.items()}
    for called, charged in pool.run(_sent, text, world_size=2):
        assert called == charged
        assert {message: n for message, n in called.items() if message[1] >= MIB} == wanted
