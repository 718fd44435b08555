"""Predicted step times against runs that others published."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import median

import pytest

from advisor.cost import Estimate, estimate
from advisor.inputs.facts import Facts
from advisor.inputs.models import profile_model
from engines.plan import Plan
from profiles.machine.clusters import cluster_from_name
from profiles.model.profile import ModelProfile, Numerics
from profiles.workload.workload import Workload

TOKENS = 2048


def profile(name: str) -> ModelProfile:
    return profile_model(
        name, samples=1, sequence_length=TOKENS, numerics=[Numerics.BF16, Numerics.BF16_AUTOCAST]
    )


def runs(shared: Path, model: str) -> list[dict[str, str]]:
    with (shared / "data/measured/llm_foundry_fsdp.csv").open() as stream:
        return [
            row
            for row in csv.DictReader(stream)
            if row["model_name"] == model and row["dtype"] == "bf16" and row["seq_len"] == "2048"
        ]


def predicted(row: dict[str, str], model: ModelProfile) -> Estimate:
    gpus, batch, size = (int(row[key]) for key in ("n_gpus", "global_batch", "microbatch"))
    kind = {"3": f"dp_shard={gpus}", "2": f"dp_replicate={gpus} zero=2"}[row["zero_stage"]]
    plan = Plan.parse(
        f"{kind} microbatch_size={size} accumulation={batch // gpus // size} precision=bf16"
        f" recompute={row['recompute']}"
    )
    cluster = cluster_from_name(f"{gpus // 8}x8x{row['gpu_type']}")
    workload = Workload(global_batch_size=batch, precision="bf16")
    return estimate(plan, Facts(model=model, cluster=cluster, workload=workload))


@pytest.mark.slow
def test_published_fsdp_runs_lie_in_the_predicted_ranges(shared: Path) -> None:
    """llm-foundry's MPT 1B and 7B on 8 to 512 A100 and H100, sequences of 2,048."""
    ratios, inside = [], []
    for published, ours in (("mpt-1b", "gpt-1.3b"), ("mpt-7b", "gpt-7b")):
        model = profile(ours)
        for row in runs(shared, published):
            prediction = predicted(row, model)
            rate = float(row["tokens_per_s_per_gpu"]) * int(row["n_gpus"])
            measured_s = int(row["global_batch"]) * TOKENS / rate
            ratios.append(prediction.step_s / measured_s)
            inside.append(prediction.step_low_s <= measured_s <= prediction.step_high_s)
    assert len(ratios) > 20
    assert 0.85 < median(ratios) < 1.15
    assert sum(inside) / len(inside) > 0.9
