"""Data against model parallelism: a small GPT, trained on two ranks in several ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from advisor.auto.parallelize import auto_parallelize
from advisor.decide.decision import Decision
from advisor.inputs.bundled.gpt import GPT, GPTConfig, loss
from engines.data.replicas import local_part
from engines.runtime.steps import WARM_UP_STEPS
from profiles.capture.batch.call import LossFn
from profiles.machine.bench import bench
from profiles.machine.cluster import ClusterProfile
from profiles.machine.probe import probe
from profiles.provenance import Timing
from profiles.units import format_bandwidth, format_flop_rate, format_percent, format_seconds

# Steps of some 50 ms on a core, so that a lesson takes seconds.
SHAPE = GPTConfig(vocab_size=256, context=32, num_layers=4, num_heads=4, width=192)
BATCH = 16
STEPS = 6
BENCH_S = 2.0
# Losses that agree to this count as equal: fp32 sums in different orders differ by less.
SAME_LOSS = 1e-4


@dataclass(frozen=True, slots=True)
class Trained:
    """Results of one rank.

    Attributes:
        plan: complete plan.
        predicted_s, low_s, high_s: step time, predicted before the first step.
        measured: step time.
        parameter_bytes: parameters on this rank.
        sent_bytes: bytes that each rank sends in a step, from the cost model.
        loss: of the last step.
    """

    plan: str
    predicted_s: float
    low_s: float
    high_s: float
    measured: Timing
    parameter_bytes: int
    sent_bytes: float
    loss: float


def this_machine() -> ClusterProfile:
    """Cluster of this job's ranks: speed and links, timed while all ranks work."""
    return bench(probe(), budget_s=BENCH_S)


def summarize_machine(machine: ClusterProfile) -> str:
    """Summarize the measured machine."""
    device, link = machine.device, machine.intra
    assert link is not None  # several ranks of one machine
    return (
        f"{machine.world_size} ranks on {machine.cores} cores: each does"
        f" {format_flop_rate(device.flop_per_s['float32'].value)} in fp32, and sends"
        f" {format_bandwidth(link.bandwidth_bytes_per_s.value)} to the other while both do so."
    )


def small_gpt() -> tuple[nn.Module, tuple[Tensor, Tensor], LossFn]:
    """Return a model, a batch of random text, and the loss, deterministically."""
    torch.manual_seed(0)
    text = torch.randint(SHAPE.vocab_size, (BATCH, SHAPE.context + 1))
    return GPT(SHAPE), (text[:, :-1], text[:, 1:]), loss


def train(plan: str, machine: ClusterProfile) -> Trained:
    """Train on each rank; the code is the same for every plan."""
    model, batch, loss_fn = small_gpt()
    parallel = auto_parallelize(
        model,
        sample=batch,
        loss_fn=loss_fn,
        plan=plan,
        global_batch_size=BATCH,
        cluster=machine,
        learns=False,
    )
    for part in parallel.shard([batch] * (WARM_UP_STEPS + STEPS)):
        value = parallel.train_step(part)

    assert isinstance(parallel.decision, Decision)
    predicted, measured = parallel.decision.estimate, parallel.steps.timing()
    assert measured is not None
    parameters = [p for group in parallel.optimizer.param_groups for p in group["params"]]
    return Trained(
        plan=str(parallel.plan),
        predicted_s=predicted.step_s,
        low_s=predicted.step_low_s,
        high_s=predicted.step_high_s,
        measured=measured,
        parameter_bytes=sum(local_part(parameter).nbytes for parameter in parameters),
        sent_bytes=sum(traffic.bus_bytes for traffic in predicted.traffic),
        loss=float(value),
    )


def summarize(ways: Mapping[str, list[Trained]]) -> str:
    """Summarize the plot; `ways` has the results of `train` on all ranks, by name."""
    losses = [ranks[0].loss for ranks in ways.values()]
    difference = max(losses) - min(losses)
    same = "All train the same" if difference <= SAME_LOSS else "They do not train the same"
    times = {name: ranks[0].measured.median_s for name, ranks in ways.items()}
    fastest, slowest = min(times, key=times.__getitem__), max(times, key=times.__getitem__)
    inside = [
        name
        for name, ranks in ways.items()
        if ranks[0].low_s <= ranks[0].measured.median_s <= ranks[0].high_s
    ]
    return (
        f"{same} (losses differ by {difference:.1g}); fastest here is {fastest}"
        f" ({format_seconds(times[fastest])} a step), {slowest} takes"
        f" {format_percent(times[slowest] / times[fastest] - 1)} longer;"
        f" {len(inside)} of {len(ways)} lie in the range that was predicted before the first step."
    )
