"""Traffic of asynchronous updates, beside its estimate."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from advisor.cost import estimate
from advisor.inputs.facts import Facts
from engines.plan import Plan
from profiles.workload.workload import Workload
from tests.engines.cases import cpu_ranks, profile_of
from tests.engines.optional.async_updates.ranks import GPT
from tests.engines.parity import local_rows, spread
from tests.workers import Pool

STEPS = 4


def _sent(plan: str) -> tuple[int, int, bool]:
    """Bytes of gradients and parameters of all steps, both ways, without numbers and flags."""
    reference, parallel = spread(GPT, plan)
    batch = local_rows(parallel, GPT.batch(8), 8)
    for _ in range(STEPS):
        parallel.train_step(batch)
    report = parallel.update_report
    assert report is not None
    # A worker sends four numbers and a flag for each tensor to every server, and takes four.
    servers, tensors = parallel.plan.servers, len(list(reference.parameters()))
    words = 8 * STEPS * (4 * servers + tensors) if servers else 0
    taken = 8 * STEPS * 4 * servers
    works = dist.get_rank() >= servers
    return report.sent_bytes - words, report.received_bytes - taken, works


@pytest.mark.dist
@pytest.mark.parametrize(
    "plan",
    [
        "dp_replicate=2 updates=local sync_every=2",
        "dp_replicate=2 updates=diloco sync_every=4",
        "dp_replicate=1 servers=2",
        "dp_replicate=1 servers=1 updates=asynchronous",
    ],
)
def test_predicted_bytes_of_updates_equal_those_sent(pool: Pool, plan: str) -> None:
    parsed = Plan.parse(f"{plan} microbatch_size={8 // Plan.parse(plan).dp_replicate}")
    facts = Facts(
        model=profile_of(GPT, GPT.build()),
        cluster=cpu_ranks(parsed.world_size),
        workload=Workload(global_batch_size=8),
    )
    charged = {t.purpose: t.payload_bytes * t.count for t in estimate(parsed, facts).traffic}
    for sent, received, works in pool.run(_sent, plan, world_size=parsed.world_size):
        if not works:
            continue
        if parsed.servers:
            assert sent == STEPS * charged["gradients to servers"]
            assert received == STEPS * charged["parameters from servers"]
        else:
            (all_reduced,) = charged.values()
            assert sent == received == STEPS * all_reduced
