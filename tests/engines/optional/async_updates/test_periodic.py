"""Replicas that update on their own and meet now and then: local SGD and DiLoCo."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from engines.parallel import ParallelModel
from profiles.capture.batch.call import Batch
from profiles.capture.batch.rows import split_rows
from tests.engines.cases import CASES, Case
from tests.engines.optional.async_updates.ranks import GPT, drift, one_process, trained
from tests.engines.optional.async_updates.test_servers import QUADRATIC, plain
from tests.engines.optional.async_updates.wire import counts, since
from tests.engines.parity import local_rows, reference_loss, spread
from tests.workers import Pool


def as_it_is(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An outer optimizer that takes the averaged step whole."""
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.0)


def _meeting_after_every_step(plan: str) -> tuple[float, float]:
    rows = [8, 8, 8]
    options = {"optimizer": plain}
    if "diloco" in plan:
        options["outer_optimizer"] = as_it_is
    reference, parallel, _, batches = trained(plan, rows, **options)
    optimizer = plain(list(reference.parameters()))
    for batch in batches:
        optimizer.zero_grad()
        reference_loss(reference, GPT, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    evaluated = parallel.eval_step(local_rows(parallel, batches[0], 8)).item()
    expected = reference_loss(reference, GPT, batches[0]).item()
    return drift(parallel, reference), abs(evaluated - expected)


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["local", "diloco"])
def test_averaging_after_every_sgd_step_equals_synchronous_training(pool: Pool, kind: str) -> None:
    """mean(p - a g) = p - a mean(g); of DiLoCo with an outer rate of 1 and no momentum too."""
    plan = f"dp_replicate=4 updates={kind}"
    for away, evaluated in pool.run(_meeting_after_every_step, plan, world_size=4):
        assert away < 1e-6
        assert evaluated < 1e-5


def _by_hand(
    replicas: list[nn.Module],
    batches: list[Batch],
    every: int,
    *,
    outer: tuple[float, float] | None,
) -> nn.Module:
    """The algorithm as the papers write it, in one process: replicas with SGD and momentum, the
    outer step with a rate and Nesterov momentum."""
    optimizers = [torch.optim.SGD(r.parameters(), lr=0.05, momentum=0.9) for r in replicas]
    met = copy.deepcopy(replicas[0])
    speed = [torch.zeros_like(p) for p in met.parameters()]
    for number, batch in enumerate(batches, start=1):
        parts = split_rows(batch, [4] * len(replicas))
        for replica, optimizer, part in zip(replicas, optimizers, parts, strict=True):
            optimizer.zero_grad()
            reference_loss(replica, GPT, part).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if number % every:
            continue
        with torch.no_grad():
            for place, anchor in enumerate(met.parameters()):
                copies = [list(replica.parameters())[place] for replica in replicas]
                mean = torch.stack([p.detach() for p in copies]).mean(0)
                if outer is None:
                    anchor.copy_(mean)
                else:
                    rate, momentum = outer
                    moved = anchor - mean
                    speed[place] = momentum * speed[place] + moved
                    anchor -= rate * (moved + momentum * speed[place])
                for p in copies:
                    p.copy_(anchor)
    return met


def _several_steps(kind: str) -> float:
    reference, parallel, _, batches = trained(
        f"dp_replicate=2 updates={kind} sync_every=2", [8] * 6
    )
    replicas = [reference, copy.deepcopy(reference)]
    outer = (0.7, 0.9) if kind == "diloco" else None
    return drift(parallel, _by_hand(replicas, batches, 2, outer=outer))


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["local", "diloco"])
def test_diloco_steps_equal_those_of_the_paper(pool: Pool, kind: str) -> None:
    assert max(pool.run(_several_steps, kind, world_size=2)) < 1e-5


def _traffic(plan: str, steps: int) -> tuple[int, int, float, int]:
    """Bytes that the kernel moved in so many steps, and what the report says of them."""
    _, parallel = spread(GPT, plan)
    batch = local_rows(parallel, GPT.batch(8), 8)
    for _ in range(parallel.plan.sync_every):  # DDP makes its buckets anew after the first
        parallel.train_step(batch)
    dist.barrier()  # nothing of the steps before is still on its way
    before = counts()
    dist.barrier()  # and nothing of those after has come yet
    for _ in range(steps):
        parallel.train_step(batch)
    dist.barrier()
    moved = sum(since(before))
    dist.barrier()  # a rank that is done closes the connections whose counts the other one reads
    report = parallel.update_report
    if report is None:
        return moved, 0, 0.0, 0
    return moved, report.sent_bytes, report.mean_staleness, report.most_staleness


@pytest.mark.dist
def test_local_steps_divide_the_traffic_by_their_number(pool: Pool) -> None:
    """By the kernel's count, against DDP; staleness goes from 0 to one less than the period."""
    ddp = [result[0] for result in pool.run(_traffic, "dp_replicate=2", 8, world_size=2)]
    for every in (1, 4):
        plan = f"dp_replicate=2 updates=local sync_every={every}"
        for whole, result in zip(ddp, pool.run(_traffic, plan, 8, world_size=2), strict=True):
            moved, _, mean, most = result
            assert whole / moved == pytest.approx(every, rel=0.05)
            assert (mean, most) == ((every - 1) / 2, every - 1)


def _classic_loop() -> tuple[float, float]:
    """Against `train_step` with the same plan."""
    plan = "dp_replicate=2 updates=local sync_every=2"
    _, parallel = spread(GPT, plan)
    batches = [GPT.batch(8)] * 4
    for batch in batches:
        tokens, targets = local_rows(parallel, batch, 8)  # type: ignore[misc]
        assert GPT.loss_fn is not None
        GPT.loss_fn(parallel(tokens), targets).backward()
        parallel.optimizer.step()
        parallel.optimizer.zero_grad()
    other, twin, _, _ = trained(plan, [8] * 4)
    assert dist.get_world_size() == 2
    one, two = parallel.state_dict(), twin.state_dict()
    return max(float((one[n] - two[n]).abs().max()) for n in one), float(other is None)


@pytest.mark.dist
def test_a_classic_loop_averages_replicas_too(pool: Pool) -> None:
    assert max(result[0] for result in pool.run(_classic_loop, world_size=2)) < 1e-7


def _state_between_meetings() -> tuple[list[float], float]:
    """Weights of all ranks after one step of three, and again after a meeting was asked for."""
    _, parallel, _, _ = trained(
        "dp_replicate=2 updates=local sync_every=3", [8], case=QUADRATIC, optimizer=plain
    )
    with torch.no_grad():
        parallel.module.get_parameter("x").fill_(float(dist.get_rank()))
    state = parallel.state_dict()
    return state["x"].tolist(), parallel.module.get_parameter("x")[0].item()


@pytest.mark.dist
def test_a_saved_state_is_the_mean_and_equal_on_every_rank(pool: Pool) -> None:
    for state, parameter in pool.run(_state_between_meetings, world_size=2):
        assert state == [0.5] * 5
        assert parameter == 0.5


def _saved_and_trained_on(folder: str) -> tuple[float, float, float]:
    """After a meeting: a training that goes on from the folder, beside one that never stopped."""
    plan = "dp_replicate=2 updates=diloco sync_every=2"
    _, parallel, _, _ = trained(plan, [8] * 4, optimizer=plain)
    parallel.save(folder)
    _, alike = spread(GPT, "dp_replicate=2", optimizer=plain)
    alike.load(folder)
    loaded = drift_of(parallel.state_dict(), alike)
    _, again = spread(GPT, plan, optimizer=plain)
    again.load(folder)
    alike.save(f"{folder}-of-ddp")
    _, anew = spread(GPT, plan, optimizer=plain)
    anew.load(f"{folder}-of-ddp")
    for each in (parallel, again, anew):
        for _ in range(2):
            each.train_step(local_rows(each, GPT.batch(8), 8))
    state = parallel.state_dict()
    return loaded, drift_of(state, again), drift_of(state, anew)


def _states_of_their_own(folder: str) -> tuple[float, float, bool]:
    """The same with states in every replica's optimizer, saved between two meetings."""
    plan = "dp_replicate=2 updates=diloco sync_every=3"

    def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2)

    _, parallel, _, _ = trained(plan, [8] * 4, optimizer=adam)
    parallel.save(folder)
    _, again = spread(GPT, plan, optimizer=adam)
    again.load(folder)
    _, alike = spread(GPT, "dp_replicate=2", optimizer=adam)
    alike.load(folder)
    own = [state["exp_avg"].clone() for state in parallel.optimizer.state.values()]
    of_all = [state["exp_avg"].clone() for state in alike.optimizer.state.values()]
    differs = any(not torch.equal(one, other) for one, other in zip(own, of_all, strict=True))
    losses = 0.0
    for _ in range(5):
        batch = local_rows(parallel, GPT.batch(8), 8)
        losses = max(losses, abs(float(parallel.train_step(batch) - again.train_step(batch))))
    return drift_of(parallel.state_dict(), again), losses, differs


@pytest.mark.dist
def test_each_replica_resumes_with_its_own_optimizer_states(pool: Pool, tmp_path: object) -> None:
    """Another plan takes the first replica's, which the second one's are not."""
    results = pool.run(_states_of_their_own, f"{tmp_path}/kept", world_size=2)
    assert [(drift, losses) for drift, losses, _ in results] == [(0.0, 0.0)] * 2
    assert [differs for _, _, differs in results] == [False, True]


def drift_of(state: dict[str, torch.Tensor], other: ParallelModel) -> float:
    actual = other.state_dict()
    return max(float((state[name] - actual[name]).abs().max()) for name in state)


@pytest.mark.dist
def test_a_checkpoint_restores_the_outer_momentum(pool: Pool, tmp_path: object) -> None:
    """A checkpoint from DDP has no outer momentum, and training begins without."""
    for loaded, again, anew in pool.run(_saved_and_trained_on, f"{tmp_path}/kept", world_size=2):
        assert loaded == again == 0.0
        assert anew > 1e-4


class _Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12)
        self.head = nn.Linear(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(x))[:, 0]
        return out


def _statistics() -> list[float]:
    case = Case(_Norm, _noise, lambda out, wanted: (out - wanted).square().mean())
    _, parallel, _, _ = trained(
        "dp_replicate=2 updates=local sync_every=2", [8, 8], case=case, optimizer=plain
    )
    mean = parallel.state_dict()["norm.running_mean"]
    return [float(value) for value in mean]


def _noise(rows: int) -> Batch:
    drawn = torch.randn(rows, 12, generator=torch.Generator().manual_seed(rows))
    return drawn, torch.zeros(rows)


@pytest.mark.dist
def test_statistics_of_batch_norms_follow_the_first_replica(pool: Pool) -> None:
    one, other = pool.run(_statistics, world_size=2)
    assert one == other
    first = split_rows(_noise(8), [4, 4])[0][0].mean(0)  # type: ignore[index]
    expected = (
        0.1 * first + 0.9 * 0.1 * first
    )  # two steps of the same rows, torch's momentum of 0.1
    assert one == pytest.approx(expected.tolist(), rel=1e-4)


def test_the_reference_of_these_tests_is_plain_sgd() -> None:
    """One replica that meets itself after every step is `one_process`."""
    torch.manual_seed(3)
    model = CASES["gpt"].build()
    batches = [GPT.batch(4)] * 3
    met = _by_hand([copy.deepcopy(model)], batches, 1, outer=None)
    one_process(model, GPT, batches)
    for p, q in zip(met.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q)
