"""Bytes that an accelerator's caching allocator reserves."""

from __future__ import annotations

import pytest

from advisor.cost import CostModel
from advisor.cost.memory.peak import USUAL_SLACK
from engines.plan import Plan
from tests.factories import facts, gpus, transformer

VOCABULARY, WIDTH = 256_000, 4096
MODEL = transformer(vocab=VOCABULARY, hidden=WIDTH)  # whose peak is in the loss


def idle_bytes(settings: str, *, ranks: int = 8) -> float:
    """Reserved beyond the usual slack of what is allocated."""
    known = facts(MODEL, gpus(ranks // 8, 8), batch=ranks)
    estimate = CostModel(known).estimate(Plan.parse(f"{settings} microbatch_size=1"))
    allocated = estimate.memory.total - estimate.memory.context
    return estimate.reserved_bytes - estimate.memory.context - (1 + USUAL_SLACK) * allocated


def test_shards_of_gradients_and_gathers_have_streams_of_their_own() -> None:
    """At the peak, in the loss, there are no gradients: an eighth of them in fp32 is reserved, and
    what the largest unit, the head, is gathered into in 16 bits."""
    idle = idle_bytes("dp_shard=8 precision=bf16 recompute=full")
    head = VOCABULARY * WIDTH
    assert idle == pytest.approx(4 * MODEL.parameters / 8 + 2 * head, rel=0.02)


def test_replicas_reserve_no_more_than_the_usual() -> None:
    assert idle_bytes("dp_replicate=8 precision=bf16 recompute=full") == 0


def test_shards_on_the_host_reserve_nothing_on_the_device() -> None:
    here, there = (
        idle_bytes(f"dp_shard=8 precision=bf16 recompute=full{more}")
        for more in ("", " offload=states")
    )
    assert here - there == pytest.approx(4 * MODEL.parameters / 8, rel=0.02)


def test_casts_of_blocks_that_run_again_are_gone_before_the_loss() -> None:
    """Autocast's cache ends with the forward: 2.2 GiB less than all casts of a GPT of 1.3 billion
    parameters on an H200."""

    def casts(recompute: str) -> float:
        known = facts(MODEL, gpus(1, 8), batch=64)
        settings = f"dp_replicate=8 microbatch_size=8 precision=bf16 recompute={recompute}"
        estimate = CostModel(known).estimate(Plan.parse(settings))
        assert estimate.phase == "forward of the loss"
        return estimate.memory.gathered

    blocks = sum(unit.parameters for unit in MODEL.units if unit.is_block)
    assert casts("none") - casts("full") == pytest.approx(2 * blocks, rel=0.01)
