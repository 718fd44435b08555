"""A model of nearly three times the memory that a rank may take: four ranks build, train, write and
read it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engines.apply import apply_plan
from engines.plan import Plan
from engines.state.deferred import deferred
from profiles.capture.capture import capture
from tests.engines.cases import cpu_ranks
from tests.engines.hungry import MIB, memory_limit
from tests.engines.parity import sgd
from tests.nightly import nightly
from tests.workers import Pool

WIDTH = 1024
"""A block has 4 MiB."""


class Block(nn.Module):
    """A frozen layer with a trained norm, so that gradients take no memory to speak of."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.layer(self.norm(x))
        return out


class Deep(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def trained(
    plan: str, blocks: int, limit_mib: int, folder: str
) -> tuple[int, bool, list[float], bool]:
    """Bytes of the model, True if the whole of it has no room, losses, and True if it learned."""
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)), torch.arange(4)
    loss_fn = nn.functional.cross_entropy
    parsed = Plan.parse(plan)
    with deferred():
        model = Deep(blocks)
    profile = capture(model, batch, loss_fn=loss_fn, name="deep")
    nbytes = sum(p.nbytes for p in model.parameters())
    with memory_limit(limit_mib):
        try:
            Deep(blocks)
        except (RuntimeError, MemoryError):
            is_too_large = True
        else:
            is_too_large = False
        parallel = apply_plan(
            model,
            parsed,
            profile=profile,
            cluster=cpu_ranks(parsed.world_size),
            loss_fn=loss_fn,
            optimizer=sgd,
            sample=batch,
        )
        losses = [parallel.train_step(batch).item() for _ in range(3)]
        parallel.save_pretrained(f"{folder}/out", max_shard_size="6MiB")
        parallel.load_pretrained(f"{folder}/out")
    return nbytes, is_too_large, losses, losses[-1] < losses[0]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("plan", "blocks", "limit_mib"),
    [
        # A rank keeps 24 MiB of 96; with two files of a checkpoint mapped at once it wants 34.
        ("pp=4 schedule=gpipe microbatches=4 stages=blocks.6,blocks.12,blocks.18", 24, 33),
        # It keeps 48 MiB of 192, and FSDP2 has up to four whole blocks at once.
        *nightly(("dp_shard=4", 48, 72), ("dp_shard=2 tp=2", 48, 72)),
    ],
)
def test_a_model_of_nearly_three_times_the_limit_trains_on_four_ranks(
    pool: Pool, tmp_path: Path, plan: str, blocks: int, limit_mib: int
) -> None:
    for nbytes, is_too_large, losses, learns in pool.run(
        trained, plan, blocks, limit_mib, str(tmp_path), world_size=4, timeout_s=300
    ):
        assert nbytes > 2.6 * limit_mib * MIB
        assert is_too_large
        assert learns, losses
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
