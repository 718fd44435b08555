"""Ranks that serve and ranks that work, over real messages."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.optional.async_updates.messages import ServerMessage, WorkerMessage
from engines.optional.async_updates.server_rank import ServerExchange
from engines.optional.async_updates.worker_rank import WorkerExchange
from engines.parallel import ParallelModel
from engines.plan import Plan
from engines.runtime.world import World
from profiles.capture.batch.call import Batch
from profiles.errors import PlanError
from profiles.torch_compat import default_store
from tests.engines.cases import CASES, Case
from tests.engines.optional.async_updates.ranks import GPT, drift, one_process, trained
from tests.engines.optional.async_updates.wire import counts, since
from tests.engines.parity import local_rows, spread
from tests.workers import Pool


def _beside_one_process(plan: str) -> tuple[float, float, float, float]:
    """Differences of parameters, losses and an evaluation; and the staleness."""
    rows = [8, 9, 10]  # the workers' parts are uneven: they weigh by their rows
    reference, parallel, losses, batches = trained(plan, rows)
    wanted = one_process(reference, GPT, batches)
    away = drift(parallel, reference)
    again = parallel.eval_step(local_rows(parallel, batches[0], 8)).item()
    with torch.no_grad():
        tokens, targets = batches[0]  # type: ignore[misc]
        assert GPT.loss_fn is not None
        expected = GPT.loss_fn(reference(tokens), targets).item()
    report = parallel.update_report
    assert report is not None
    differences = [abs(one - other) for one, other in zip(losses, wanted, strict=True)]
    return away, max(differences), abs(again - expected), report.most_staleness


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_replicate=3 servers=1", "dp_replicate=2 servers=2"])
def test_synchronous_servers_train_as_one_process_does(pool: Pool, plan: str) -> None:
    """And so as DDP does, which is held to the same. Momentum is the servers', tensors are shared
    out; every rank has the same weights and losses in the end."""
    for away, losses, evaluation, staleness in pool.run(_beside_one_process, plan, world_size=4):
        assert away < 1e-6
        assert losses < 1e-5
        assert evaluation < 1e-5
        assert staleness == 0


class Number(nn.Module):
    """A quadratic: half the squared distance of a vector from the targets."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.full((5,), 4.0))
        self.y = nn.Parameter(torch.full((7,), 2.0))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, target: Tensor) -> Tensor:
        x = 0.5 * (self.x - target[:, :5]).square().sum(1)
        out: Tensor = x + 0.5 * (self.y - target[:, 5:]).square().sum(1)
        return out


def _targets(rows: int) -> Batch:
    return torch.ones(rows, 12), torch.zeros(rows)


QUADRATIC = Case(Number, _targets, lambda value, _: value.mean())


def plain(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _asynchronous(plan: str, steps: int) -> tuple[float, Any]:
    _, parallel, _, _ = trained(plan, [6] * steps, case=QUADRATIC, optimizer=plain)
    state = parallel.state_dict()
    distance = max(float((state[name] - 1).abs().max()) for name in ("x", "y"))
    return distance, parallel.update_report


@pytest.mark.dist
def test_asynchronous_updates_reach_the_optimum_and_report_staleness(pool: Pool) -> None:
    """rate x curvature 0.1 is stable for delays up to 15; three workers are hardly ever 5 late."""
    plan = "dp_replicate=3 servers=1 updates=asynchronous"
    (_, served), *worked = pool.run(_asynchronous, plan, 60, world_size=4)
    assert all(distance < 0.01 for distance, _ in worked)
    assert served.updates == 3 * 60
    assert served.most_staleness >= 1
    counted = {}
    for _, report in worked:
        assert report.updates == 60
        for staleness, count in report.staleness.items():
            counted[staleness] = counted.get(staleness, 0) + count
    assert counted == served.staleness


@pytest.mark.dist
def test_max_staleness_bounds_the_lead_of_a_worker(pool: Pool) -> None:
    """None goes on before all have given the step before: others' updates between a worker's
    parameters and its gradients are then at most those of two steps."""
    plan = "dp_replicate=2 servers=2 updates=asynchronous max_staleness=0"
    results = [report for _, report in pool.run(_asynchronous, plan, 20, world_size=4)]
    assert [report.updates for report in results] == [40, 40, 20, 20]
    assert max(report.most_staleness for report in results) <= 2


def _a_step_in_bytes() -> tuple[tuple[int, int], tuple[int, int], int, int]:
    """Bytes that the kernel sent and received for a step, those of the report, the model's size."""
    reference, parallel, _, _ = trained("dp_replicate=1 servers=1", [4])
    batch = GPT.batch(4)

    def reported() -> tuple[int, int]:
        report = parallel.update_report
        assert report is not None
        return report.sent_bytes, report.received_bytes

    kernel, report = counts(), reported()
    parallel.train_step(batch)
    moved, report_after = since(kernel), reported()
    parameters = list(reference.parameters())
    return (
        moved,
        (report_after[0] - report[0], report_after[1] - report[1]),
        sum(p.nbytes for p in parameters),
        len(parameters),
    )


@pytest.mark.dist
def test_reported_bytes_equal_those_of_the_kernel(pool: Pool) -> None:
    """A worker sends gradients, four numbers and a flag for each tensor; it takes parameters and
    four numbers. Gloo wraps every message in a few of its own (48 bytes each)."""
    _, (kernel, reported, payload, tensors) = pool.run(_a_step_in_bytes, world_size=2)
    assert reported == (payload + 8 * (4 + tensors), payload + 8 * 4)
    for moved, said in zip(kernel, reported, strict=True):
        assert said <= moved <= said + 12 * 48


def _with_a_straggler(plan: str, steps: int) -> tuple[float, int, int, int, float]:
    """The last rank begins its first step when all others have done theirs."""
    _, parallel = spread(QUADRATIC, plan, optimizer=plain)
    store, rank = default_store(), dist.get_rank()
    batch = local_rows(parallel, _targets(6), 6)
    seconds = 0.0
    for step in range(steps):
        if rank == 3 and step == 0:

            def wait(module: nn.Module, args: object) -> None:
                store.wait(["done 1", "done 2"])

            hook = parallel.module.register_forward_pre_hook(wait)
        began = time.perf_counter()
        parallel.train_step(batch)
        seconds = max(seconds, time.perf_counter() - began)
        if rank == 3 and step == 0:
            hook.remove()
    store.set(f"done {rank}", "")
    report = parallel.update_report
    assert report is not None
    state = parallel.state_dict()
    return state["x"][0].item(), report.updates, report.dropped, report.skipped, seconds


@pytest.mark.dist
def test_backup_workers_hide_a_straggler(pool: Pool) -> None:
    """The straggler sleeps until the two others have made all five steps: without a backup nobody
    would ever wake it. Its gradient is dropped, and the steps that it missed are skipped."""
    plan = "dp_replicate=2 backup_workers=1 servers=1"
    server, first, second, straggler = pool.run(_with_a_straggler, plan, 5, world_size=4)
    wanted = 1 + 3 * 0.9**5  # each step goes a tenth of the way from 4 to 1
    for result in (server, first, second, straggler):
        assert result[0] == pytest.approx(wanted, rel=1e-5)
    assert first[1:4] == second[1:4] == (5, 0, 0)
    assert straggler[1:4] == (0, 1, 4)
    assert server[1:4] == (10, 1, 0)


def _sets_of_workers(steps: int) -> tuple[list[list[int]], Any, float]:
    """The workers of every update on this server, while all come in another order each step."""
    _, parallel = spread(QUADRATIC, "dp_replicate=1 servers=2 backup_workers=1", optimizer=plain)
    made: list[list[int]] = []
    exchange = parallel._exchange
    if isinstance(exchange, ServerExchange):
        use = exchange._core.use

        def noted(workers: list[int]) -> None:
            made.append(list(workers))
            use(workers)

        exchange._core.use = noted  # type: ignore[method-assign,assignment]
    dist.barrier()  # a server's threads take what workers send before it comes to its first step
    order = random.Random(dist.get_rank())

    def nap(*_: object) -> None:
        time.sleep(order.random() * 0.01)

    parallel.module.register_forward_pre_hook(nap)
    batch = local_rows(parallel, _targets(6), 6)
    for _ in range(steps):
        parallel.train_step(batch)
    state = parallel.state_dict()
    values = [state["x"][0].item() - 1, 3 * (state["y"][0].item() - 1)]
    return made, parallel.update_report, max(abs(v - 3 * 0.9**steps) for v in values)


@pytest.mark.dist
def test_all_servers_step_with_gradients_of_the_same_workers(pool: Pool) -> None:
    """The first one of two each time, whoever that is; both parts of the model go a tenth of the
    way to the optimum in every step, so that none was left out or made twice."""
    steps = 30
    first, second, *workers = pool.run(_sets_of_workers, steps, world_size=4)
    assert first[0] == second[0]
    assert len(first[0]) == steps
    assert all(len(workers) == 1 for workers in first[0])
    assert len({workers[0] for workers in first[0]}) > 1
    for _, report, away in (first, second, *workers):
        assert away < 1e-5
        assert report.most_staleness == 0
    assert sum(report.updates for _, report, _ in workers) == steps
    for _, report, _ in workers:
        assert report.updates + report.dropped + report.skipped == steps


class Recorded:
    """A link to a server that answers at once."""

    sent_bytes = received_bytes = 0

    def __init__(self, version: int) -> None:
        self.version = version
        self.numbers: list[float] = []

    def begin_to_send(self, numbers: list[float], _: object) -> Callable[[], None]:
        self.numbers = numbers
        return lambda: None

    def receive_numbers(self, _: int) -> list[float]:
        return ServerMessage(self.version, None, 0.0, None).numbers()

    def begin_to_receive(self, like: list[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        return lambda: like


def test_gradients_of_parts_of_two_steps_are_late_for_the_later_one() -> None:
    """A worker that came late to step 5 on the first server and in time on the second: taken there
    as early for step 6, its gradients would wait for others that may have none to give."""
    one, other = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([one, other], lr=1.0)
    links = {0: Recorded(5), 1: Recorded(4)}
    world = World(rank=2, size=4, device=torch.device("cpu"), timeout_s=1.0)
    working = WorkerExchange(
        links,  # type: ignore[arg-type]
        {0: [one], 1: [other]},
        optimizer,
        replica=0,
        replicas=1,
        skips=True,
        shares_loss=False,
        world=world,
    )
    length = WorkerMessage.LENGTH + 1
    for turn in (0, 4):  # the second time they have answered
        working.replace_step()
        optimizer.step()
        turns = [WorkerMessage.read(link.numbers[:length]).turn for link in links.values()]
        assert turns == [turn, turn]


def _scheduled() -> float:
    """A rate that falls with every step, on the servers' side and in one process."""
    reference, parallel = spread(GPT, "dp_replicate=1 servers=1")
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    schedules = [
        torch.optim.lr_scheduler.ExponentialLR(each, 0.5)
        for each in (parallel.optimizer, optimizer)
    ]
    batch = GPT.batch(4)
    assert GPT.loss_fn is not None
    for _ in range(4):
        parallel.train_step(batch)
        optimizer.zero_grad()
        GPT.loss_fn(reference(batch[0]), batch[1]).backward()  # type: ignore[index]
        optimizer.step()
        for schedule in schedules:
            schedule.step()
    return drift(parallel, reference)


@pytest.mark.dist
def test_a_learning_rate_changes_between_the_same_updates(pool: Pool) -> None:
    assert max(pool.run(_scheduled, world_size=2)) < 1e-6


def _steps(plan: str) -> int:
    _, parallel = spread(GPT, plan)
    rows = 4 * parallel.data_world_size
    for _ in range(3):
        parallel.train_step(local_rows(parallel, GPT.batch(rows), rows))
    parallel.state_dict()
    return parallel.step


@pytest.mark.dist
@pytest.mark.parametrize("updates", ["synchronous", "asynchronous"])
def test_servers_count_the_steps_that_workers_count(pool: Pool, updates: str) -> None:
    plan = f"dp_replicate=2 servers=1 updates={updates}"
    assert pool.run(_steps, plan, world_size=3) == [3, 3, 3]


def _refused() -> list[str]:
    _, parallel = spread(GPT, "dp_replicate=1 servers=1")
    batch = GPT.batch(4)
    messages = []

    def tell(call: Any, *args: Any) -> None:
        try:
            call(*args)
        except PlanError as error:
            messages.append(error.what)

    tell(parallel, batch[0])  # type: ignore[index]
    if dist.get_rank() == 0:
        tell(parallel.forward_backward, batch)
    with torch.no_grad():
        parallel(batch[0])  # type: ignore[index]
    return messages


@pytest.mark.dist
def test_a_classic_loop_on_a_worker_is_refused(pool: Pool) -> None:
    server, worker = pool.run(_refused, world_size=2)
    assert worker[0] == "servers step the parameters: a classic loop would step this rank's copy"
    assert server[-1] == "this rank serves parameters, it has no gradients"


def _loaded() -> float:
    reference, parallel, _, _ = trained("dp_replicate=1 servers=1", [4])
    other = copy.deepcopy(reference)
    parallel.load_state_dict(reference.state_dict())
    batch = GPT.batch(6)
    parallel.optimizer.state.clear()  # momentum of the step before
    parallel.train_step(batch)
    one_process(other, GPT, [batch])
    return drift(parallel, other)


@pytest.mark.dist
def test_training_continues_from_loaded_weights(pool: Pool) -> None:
    assert max(pool.run(_loaded, world_size=2)) < 1e-6


def _saved_and_trained_on(folder: str) -> tuple[float, float]:
    """Momentum is saved too: a step after loading is the next step of one process."""
    plan = "dp_replicate=2 servers=2"
    reference, parallel, _, batches = trained(plan, [8, 8])
    parallel.save(folder)
    one_process(reference, GPT, [*batches, GPT.batch(6)])
    away = []
    for other in (plan, "dp_replicate=4"):
        _, again = spread(GPT, other)
        again.load(folder)
        again.train_step(local_rows(again, GPT.batch(6), 6))
        away.append(drift(again, reference))
    return away[0], away[1]


@pytest.mark.dist
def test_a_checkpoint_of_servers_resumes_under_any_plan(pool: Pool, tmp_path: object) -> None:
    for away in pool.run(_saved_and_trained_on, f"{tmp_path}/kept", world_size=4):
        assert max(away) < 1e-5


def _parts(parallel: ParallelModel) -> list[int]:
    return [p.numel() for group in parallel.optimizer.param_groups for p in group["params"]]


def _an_optimizer_of_the_users_own() -> list[int]:
    model = CASES["gpt"].build()
    from engines.apply import apply_plan
    from tests.engines.cases import cpu_ranks, profile_of

    plan = Plan.parse("dp_replicate=1 servers=2")
    profile = profile_of(GPT, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel = apply_plan(
        model, plan, profile=profile, cluster=cpu_ranks(3), loss_fn=GPT.loss_fn, optimizer=optimizer
    )
    assert parallel.optimizer is optimizer
    parallel.train_step(GPT.batch(4))
    return _parts(parallel)


@pytest.mark.dist
def test_a_server_s_optimizer_has_its_part_of_the_parameters(pool: Pool) -> None:
    one, other, worker = pool.run(_an_optimizer_of_the_users_own, world_size=3)
    assert sorted(one + other) == sorted(worker)
    assert abs(sum(one) - sum(other)) <= max(worker)
