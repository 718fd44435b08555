"""The ring over chunks of a sequence is attention to all of its tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engines.context.ring import Ring
from engines.context.tokens import joined, part
from engines.plan import Plan
from engines.runtime.mesh import Mesh
from engines.runtime.world import join_world
from tests.engines.context.formula import written_out
from tests.workers import Pool


def test_each_rank_gets_one_chunk_from_each_end_of_the_sequence() -> None:
    whole = torch.arange(12).view(1, 12)
    parts = [part(whole, rank=rank, size=3) for rank in range(3)]
    assert parts[0].tolist() == [[0, 1, 10, 11]]
    assert torch.equal(joined(parts), whole)


def ring_error(is_causal: bool, groups: int, width: int) -> float:
    """Largest difference of outputs and gradients from attention in one process, in float64."""
    mesh = Mesh(Plan.parse("cp=4"), join_world())
    generator = torch.Generator().manual_seed(5)

    def made(heads: int, width: int) -> Tensor:
        values = torch.randn(2, heads, 16, width, generator=generator, dtype=torch.float64)
        return values.requires_grad_()

    q, k, v = made(4, 8), made(groups, 8), made(groups, width)
    times = 4 // groups
    wanted = written_out(
        q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1),
        is_causal=is_causal, scale=0.4,
    )  # fmt: skip
    gradient = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
    wanted.backward(gradient)

    def own(whole: Tensor) -> Tensor:
        return part(whole.detach(), rank=mesh.cp.position, size=4, dim=2)

    mine = [own(t).requires_grad_() for t in (q, k, v)]
    out = Ring(mesh.cp).attention(*mine, is_causal=is_causal, scale=0.4)
    out.backward(own(gradient))
    errors = [(out - own(wanted)).abs().max()]
    for leaf, whole in zip(mine, (q, k, v), strict=True):
        assert leaf.grad is not None
        assert whole.grad is not None
        errors.append((leaf.grad - own(whole.grad)).abs().max())
    return max(error.item() for error in errors)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("is_causal", "groups", "width"), [(False, 4, 8), (True, 2, 8), (True, 1, 6)]
)
def test_a_ring_of_four_is_attention_to_all_tokens(
    pool: Pool, is_causal: bool, groups: int, width: int
) -> None:
    assert max(pool.run(ring_error, is_causal, groups, width, world_size=4)) < 1e-12
