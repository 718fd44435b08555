"""Residuals of steps of small GPTs against constants fitted to the others' steps.

python -m tests.benchmarks.learning
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from math import log
from pathlib import Path
from unittest.mock import patch

import torch

from advisor.auto.parallelize import auto_parallelize
from advisor.cost import estimate
from advisor.inputs.bundled.gpt import GPT, GPTConfig, loss
from advisor.learning.learning import refit
from advisor.learning.run_log import keep_run
from engines.parallel import ParallelModel
from profiles.machine.cluster import ClusterProfile
from profiles.machine.probe import probe
from profiles.timing.runs import TrainingRun

LENGTH, STEPS = 64, 15
# Width, blocks, rows.
SHAPES = (
    (64, 2, 4),
    (128, 4, 4),
    (192, 4, 8),
    (256, 3, 16),
    (384, 2, 8),
    (128, 2, 32),
    (512, 2, 4),
)


@dataclass(frozen=True, slots=True)
class Trained:
    """One training run and its measurements."""

    shape: tuple[int, int, int]
    parallel: ParallelModel
    run: TrainingRun

    def missed(self, cluster: ClusterProfile) -> float:
        """The logarithm of measured over predicted, with these constants."""
        decision = self.parallel.decision
        facts = decision.facts.model_copy(update={"cluster": cluster})  # type: ignore[attr-defined]
        return log(self.run.step.median_s / estimate(self.parallel.plan, facts).step_s)


def train(cluster: ClusterProfile, width: int, blocks: int, rows: int) -> Trained:
    """Some steps of one GPT; nothing learnt before is used."""
    ids = torch.randint(0, 256, (rows, LENGTH))
    shape = GPTConfig(vocab_size=256, context=LENGTH, num_layers=blocks, num_heads=4, width=width)
    parallel = auto_parallelize(
        GPT(shape),
        sample=(ids, ids),
        loss_fn=loss,
        plan=f"microbatch_size={rows}",
        cluster=cluster,
        learns=False,
    )
    for _ in range(STEPS):
        parallel.train_step((ids, ids))
    run = keep_run(parallel)
    assert run is not None
    return Trained((width, blocks, rows), parallel, run)


def main() -> None:
    """Print a table."""
    torch.set_num_threads(1)
    cluster = probe(measure=True)
    trained = [train(cluster, *shape) for shape in SHAPES]
    print("width blocks rows   measured   log(measured / predicted): before, by the other runs")
    left = []
    for one in trained:
        others = [other.run for other in trained if other is not one]
        before = one.missed(cluster)
        left.append(one.missed(refit(cluster, others, dtype="float32")))
        width, blocks, rows = one.shape
        step = one.run.step.median_s * 1e3
        print(f"{width:5} {blocks:6} {rows:4}   {step:5.1f} ms   {before:+.2f}   {left[-1]:+.2f}")
    print(f"median of the sizes: {statistics.median(map(abs, left)):.2f}")


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict("os.environ", {"XDG_CACHE_HOME": str(Path(folder))}),
    ):
        main()
