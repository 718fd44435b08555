"""Modules whose parts their authors put on several devices, as in PyTorch's tutorial on it.

Elsewhere than on GPUs nothing computes on two devices. There the parts are recognised by the
devices of fake tensors, and what the engine does is run with both parts on the CPU.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from advisor.decide.decide import decide
from advisor.inputs.facts import Facts
from engines.apply import apply_plan
from engines.data.ddp import replicate
from engines.legality import problems
from engines.plan import Plan
from engines.runtime.world import join_world
from profiles.capture.capture import capture
from profiles.capture.module.manual_placement import devices_of, is_manually_placed
from profiles.machine.clusters import cluster_from_name
from profiles.model.profile import ModelProfile
from profiles.workload.workload import Workload
from tests.placed import put
from tests.workers import Pool

TWO = ("cuda:0", "cuda:1")
ROWS = 8


class TwoParts(nn.Module):
    """Two layers; the forward moves what it computes from one device to the other."""

    def __init__(self, first: str = "cpu", second: str = "cpu") -> None:
        super().__init__()
        self.first, self.second = first, second
        self.lower = nn.Linear(6, 10, device=first)
        self.upper = nn.Linear(10, 3, device=second)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.lower(x.to(self.first)))
        out: Tensor = self.upper(hidden.to(self.second))
        return out

    def to(self, *args: object, **kwargs: object) -> TwoParts:  # type: ignore[override]
        raise AssertionError("it was moved")


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 6, generator=draw), torch.randn(ROWS, 3, generator=draw)


def profile(**update: object) -> ModelProfile:
    actual = capture(TwoParts(), batch(), loss_fn=F.mse_loss)
    return actual.model_copy(update=update)


def trained(model: nn.Module) -> list[Tensor]:
    """In plain torch, on the whole batch: what every plan has to give."""
    x, y = batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        F.mse_loss(model(x), y.to(model(x).device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().cpu() for p in model.parameters()]


class TestRecognised:
    def test_by_the_devices_of_its_parameters(self) -> None:
        model = TwoParts()
        assert not is_manually_placed(model)
        put(model.lower, TWO[0])
        put(model.upper, TWO[1])
        assert is_manually_placed(model)
        assert [str(device) for device in devices_of(model)] == list(TWO)

    def test_parts_without_values_are_not_on_a_device(self) -> None:
        model = TwoParts(second="meta")
        assert devices_of(model) == (torch.device("cpu"),)
        assert not is_manually_placed(model)

    def test_a_look_needs_none_of_the_devices_that_the_forward_names(self) -> None:
        named = TwoParts()
        named.first, named.second = TWO
        plain = capture(TwoParts(), batch(), loss_fn=F.mse_loss)
        looked_at = capture(named, batch(), loss_fn=F.mse_loss)
        assert looked_at.flop(ROWS) == plain.flop(ROWS) > 0
        assert [unit.name for unit in looked_at.units] == [unit.name for unit in plain.units]


class TestPossible:
    CLUSTER = cluster_from_name("2xA100-SXM-80GB")

    @pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_replicate=2 accumulation=2"])
    def test_replicas(self, plan: str) -> None:
        assert problems(Plan.parse(plan), profile(devices=TWO), self.CLUSTER) == []

    @pytest.mark.parametrize(
        ("plan", "rule"),
        [
            ("pp=2 schedule=gpipe stages=upper", "by-hand-split-again"),
            ("dp_shard=2", "by-hand-split-again"),
            ("dp_replicate=2 zero=1", "by-hand-split-again"),
            ("dp_replicate=2 updates=local sync_every=4", "by-hand-updates"),
        ],
    )
    def test_nothing_that_moves_its_parts(self, plan: str, rule: str) -> None:
        plain = {p.rule for p in problems(Plan.parse(plan), profile(), self.CLUSTER)}
        results = {p.rule for p in problems(Plan.parse(plan), profile(devices=TWO), self.CLUSTER)}
        assert results - plain == {rule}

    def test_replicas_over_devices_of_one_type_alone(self) -> None:
        mixed = profile(devices=("cpu", "cuda:0"))
        refusals = problems(Plan.parse("dp_replicate=2"), mixed, self.CLUSTER)
        assert [problem.rule for problem in refusals] == ["by-hand-device-types"]
        assert problems(Plan(), mixed, cluster_from_name("A100-SXM-80GB")) == []

    def test_the_advisor_weighs_nothing_else(self) -> None:
        facts = Facts(
            model=profile(devices=TWO),
            cluster=self.CLUSTER,
            workload=Workload(global_batch_size=ROWS),
        )
        choice = decide(facts, compares=True)
        assert choice.winner is not None
        assert {(c.plan.dp_replicate, c.plan.dp_shard) for c in choice.weighed} == {(2, 1)}
        assert not any(c.plan.data_parallel.is_sharded for c in choice.weighed)


def applied(world_size: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = TwoParts()
    rank_of = join_world()
    with patch("engines.apply.shard.replicate", wraps=replicate) as asked:
        parallel = apply_plan(
            model,
            Plan(dp_replicate=world_size, microbatch_size=ROWS // world_size),
            profile=profile(devices=("cpu:0", "cpu:1")),
            cluster=cluster_from_name(f"{world_size}xA100-SXM-80GB"),
            loss_fn=F.mse_loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        )
    if world_size > 1:
        assert isinstance(parallel._runner, nn.parallel.DistributedDataParallel)
        # Then it is given no device_ids: on processors it never is, so that they show nothing.
        assert asked.call_args.kwargs["device"] is None
    rows = ROWS // world_size
    mine = slice(rank_of.rank * rows, (rank_of.rank + 1) * rows)
    for _ in range(3):
        parallel.train_step(tuple(t[mine] for t in batch()))
    return [p.detach() for p in model.parameters()]


class TestRun:
    def test_alone_it_trains_as_in_plain_torch_and_is_not_moved(self) -> None:
        torch.manual_seed(0)
        expected = trained(TwoParts())
        torch.testing.assert_close(applied(1), expected)

    @pytest.mark.dist
    def test_replicas_average_without_device_ids(self, pool: Pool) -> None:
        torch.manual_seed(0)
        expected = trained(TwoParts())
        for result in pool.run(applied, 2, world_size=2):
            torch.testing.assert_close(result, expected)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_parts_on_the_processor_and_on_a_gpu(self) -> None:
        torch.manual_seed(0)
        model = TwoParts("cpu", "cuda:0")
        torch.manual_seed(0)
        expected = trained(TwoParts("cpu", "cuda:0"))
        looked_at = capture(model, batch(), loss_fn=F.mse_loss)
        assert looked_at.devices == ("cpu", "cuda:0")
        parallel = apply_plan(
            model,
            Plan(microbatch_size=ROWS),
            profile=looked_at,
            cluster=cluster_from_name("A100-SXM-80GB"),
            loss_fn=F.mse_loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        )
        for _ in range(3):
            parallel.train_step(batch())
        torch.testing.assert_close([p.detach().cpu() for p in model.parameters()], expected)
