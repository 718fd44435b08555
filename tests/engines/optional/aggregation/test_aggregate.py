"""Sums by messages are those of the backend, on real ranks; DDP trains as well with them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from advisor.cost.communication.exchange import FIRST_BUCKET_BYTES
from engines.apply import apply_plan
from engines.optional.aggregation.aggregate import aggregate, stepped
from engines.optional.aggregation.rounds import rounds
from engines.plan import Aggregation, Plan
from tests.contract.watch import Messages
from tests.engines.cases import CASES, Case, cpu_ranks, profile_of
from tests.engines.parity import (
    gradient_error,
    local_rows,
    reference_loss,
    relative,
    sgd,
)
from tests.workers import Pool

pytestmark = pytest.mark.dist

KINDS = [kind for kind in Aggregation if kind is not Aggregation.BACKEND]
SIZES = (3, 1001)  # fewer elements than parts, and a number that few of them divide


def _sums() -> dict[str, tuple[float, bool, bool]]:
    """Of each kind: how far from the backend's, whether all ranks hold the same bits, and whether
    whole numbers are exact."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results = {}
    for kind in KINDS:
        error, same, exact = 0.0, True, True
        for size in SIZES:
            own = torch.randn(size, generator=torch.Generator().manual_seed(rank))
            wanted = own.clone()
            dist.all_reduce(wanted)
            got = aggregate(own.clone(), kind=kind, per_node=2)
            error = max(error, relative(got, wanted))
            first = got.clone()
            dist.broadcast(first, 0)
            same &= torch.equal(first, got)
            counts = aggregate(torch.full((size,), rank + 1), kind=kind, per_node=2)
            exact &= bool((counts == ranks * (ranks + 1) // 2).all())
        results[kind.value] = error, same, exact
    return results


@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_equal_those_of_the_backend(pool: Pool, ranks: int) -> None:
    for result in pool.run(_sums, world_size=ranks):
        for kind, (error, same, exact) in result.items():
            assert error <= (1e-6 if ranks > 2 else 0.0), kind
            assert same, kind
            assert exact, kind


def _shapes() -> tuple[bool, bool, bool]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    turned = torch.arange(12.0).view(3, 4).t() * (rank + 1)
    aggregate(turned, kind=Aggregation.RING)
    wanted = torch.arange(12.0).view(3, 4).t() * sum(range(1, ranks + 1))
    small = aggregate(torch.ones(8, dtype=torch.bfloat16), kind=Aggregation.TREE)
    split = aggregate(torch.ones(5), kind=Aggregation.GATHER, devices=2)
    return torch.equal(turned, wanted), bool((small == ranks).all()), bool((split == ranks).all())


def test_any_shape_and_dtype_can_be_summed_up(pool: Pool) -> None:
    assert all(all(result) for result in pool.run(_shapes, world_size=4))


def _steps() -> list[list[float]]:
    """A tensor of one element for each rank, after each round of a ring."""
    tensor = torch.eye(3)[dist.get_rank()] * (dist.get_rank() + 1)
    return [tensor.tolist() for _ in stepped(tensor, kind=Aggregation.RING)]


def test_a_ring_can_be_stepped_through(pool: Pool) -> None:
    """By hand: rank i starts with i + 1 in its own place and passes sums on to the right."""
    steps = pool.run(_steps, world_size=3)
    assert steps[0][:2] == [[1.0, 0.0, 3.0], [1.0, 2.0, 3.0]]
    assert steps[1][:2] == [[1.0, 2.0, 0.0], [1.0, 2.0, 3.0]]
    assert steps[2][:2] == [[0.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
    assert all(rank[-1] == [1.0, 2.0, 3.0] for rank in steps)


def _trained(plans: tuple[str, ...], name: str) -> list[tuple[float, float, int]]:
    """(gradient against one process, bits apart from the backend's after 3 steps, bytes sent in the
    last), as two nodes of two ranks."""
    case = CASES[name]
    results: list[tuple[float, float, int]] = []
    backend: dict[str, torch.Tensor] = {}
    for text in ("dp_replicate=4", *plans):
        torch.manual_seed(1)
        reference, model = case.build(), case.build()
        model.load_state_dict(reference.state_dict())
        parallel = apply_plan(
            model,
            Plan.parse(text),
            profile=profile_of(case, model),
            cluster=cpu_ranks(4, nodes=2),
            loss_fn=case.loss_fn,
            optimizer=sgd,
        )
        batch = case.batch(8)
        reference_loss(reference, case, batch).backward()
        parallel.forward_backward(local_rows(parallel, batch, 8))
        error = gradient_error(parallel, reference)
        parallel.optimizer.zero_grad()
        for _ in range(2):
            parallel.train_step(local_rows(parallel, batch, 8))
        with Messages() as watched:
            parallel.train_step(local_rows(parallel, batch, 8))
        backend = backend or parallel.state_dict()
        difference = max(relative(v, backend[n]) for n, v in parallel.state_dict().items())
        sent = sum(
            payload * count
            for (kind, payload, *_), count in watched.sent.items()
            if kind == "send_recv"
        )
        results.append((error, difference, sent))
    return results[1:]


@pytest.mark.parametrize(("name", "kinds"), [("gpt", KINDS), ("tied-frozen-unused", KINDS[-1:])])
def test_ddp_trains_the_same_under_every_aggregation(
    pool: Pool, name: str, kinds: list[Aggregation]
) -> None:
    """Backward by backward as one process, and what a rank sends is what its messages say."""
    plans = tuple(f"dp_replicate=4 aggregation={kind}" for kind in kinds)
    model = CASES[name].build()
    payload = sum(p.nbytes for n, p in model.named_parameters() if p.requires_grad)
    for rank, result in enumerate(pool.run(_trained, plans, name, world_size=4, timeout_s=120)):
        for kind, (error, difference, sent) in zip(kinds, result, strict=True):
            assert error <= 1e-5, kind
            assert difference <= 1e-5, kind
            script = [m for each in rounds(kind, 4, per_node=2) for m in each]
            pieces = 1 + max(m.parts[-1] for m in script)
            own = sum(len(m.parts) for m in script if m.source == rank) / pieces
            assert sent == pytest.approx(own * payload, rel=1e-3), kind  # parts of whole elements


def _wide() -> nn.Module:
    """Seven layers whose gradients take more than DDP's first, smaller bucket."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 320), *(nn.Linear(320, 320) for _ in range(6)))


def _gradients_of_several_buckets() -> list[float]:
    """Errors of gradients against one process: DDP's own, in messages, and rounded to bf16."""
    case, errors = Case(_wide, CASES["resnet-group-norm"].batch), []
    for words in ("", "aggregation=ring", "aggregation=ring compression=bf16"):
        torch.manual_seed(1)
        reference, model = case.build(), case.build()
        model.load_state_dict(reference.state_dict())
        assert sum(p.nbytes for p in model.parameters()) > 2 * FIRST_BUCKET_BYTES
        parallel = apply_plan(
            model,
            Plan.parse(f"dp_replicate=2 {words}"),
            profile=profile_of(case, model),
            cluster=cpu_ranks(2),
            loss_fn=case.loss_fn,
            optimizer=sgd,
        )
        batch = case.batch(8)
        for _ in range(2):  # after the first backward DDP cuts its buckets anew
            reference.zero_grad()
            parallel.optimizer.zero_grad()
            reference_loss(reference, case, batch).backward()
            parallel.forward_backward(local_rows(parallel, batch, 8))
        errors.append(gradient_error(parallel, reference))
    return errors


def test_the_gradients_of_every_bucket_are_averaged(pool: Pool) -> None:
    for plain, ring, rounded in pool.run(_gradients_of_several_buckets, world_size=2):
        assert max(plain, ring) < 1e-5
        assert 1e-5 < rounded < 2**-7
