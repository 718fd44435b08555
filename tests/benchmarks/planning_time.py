"""How long planning takes: `python -m tests.benchmarks.planning_time`, a table on one core.

Not a test: nothing here passes or fails. Models are counted from their config.json in closed form,
which is not part of the times; a decision is, with the comparison of every kind of plan.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from advisor.choose import choose
from advisor.facts import Facts
from advisor.policy import Objective, Policy
from profiles.clusters import resolve_cluster
from profiles.families import profile_from_config
from profiles.model import ModelProfile, Numerics
from profiles.workload import Workload

# Llama 3 (arXiv:2407.21783, table 3).
LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
LLAMA_405B = {
    **LLAMA_70B,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
}


@dataclass(frozen=True, slots=True)
class Case:
    """A model on so many nodes of eight H100, and samples of 8,192 tokens a step."""

    name: str
    config: dict[str, object]
    nodes: int
    batch: int


CASES = (
    Case("70B", dict(LLAMA_70B), 8, 512),
    Case("405B", dict(LLAMA_405B), 128, 2048),
    Case("405B", dict(LLAMA_405B), 2048, 2048),
    Case("405B", dict(LLAMA_405B), 2048, 16384),
)


def profile(case: Case) -> ModelProfile:
    kinds = (Numerics.AS_BUILT, Numerics.BF16, Numerics.BF16_AUTOCAST)
    return profile_from_config(
        case.config, samples=1, sequence_length=8192, name=case.name, numerics=kinds
    )


def main() -> None:
    print(f"{'model':6} {'GPUs':>6} {'batch':>6} {'objective':9} {'plans':>9} {'exact':>6} seconds")
    for case in CASES:
        facts = Facts(
            model=profile(case),
            cluster=resolve_cluster(f"{case.nodes}x8xH100-SXM-80GB"),
            workload=Workload(global_batch_size=case.batch, precision="bf16"),
        )
        for objective in (Objective.TREE, Objective.TIME):
            wall, cpu = time.perf_counter(), time.process_time()
            decision = choose(facts, policy=Policy(objective=objective))
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            print(
                f"{case.name:6} {facts.cluster.world_size:6} {case.batch:6} {objective:9}"
                f" {decision.weighed:9,} {decision.estimated:6} {cpu:.2f} (wall {wall:.2f})"
                f"  {decision.estimate.mfu:.0%} MFU: {_degrees(decision.plan)}"
            )


def _degrees(plan: object) -> str:
    words = str(plan).split()
    return " ".join(w for w in words if not w.startswith(("tensor_styles", "stages")))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
