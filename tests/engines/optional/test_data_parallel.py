"""nn.DataParallel: where it is refused; on processors torch itself calls the module."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from engines.apply import apply_plan
from engines.legality import problems
from engines.optional.data_parallel import data_parallel, one_process_plan
from engines.plan import Plan
from engines.runtime.world import World
from profiles.capture.capture import capture
from profiles.errors import PlanError
from profiles.machine.clusters import cluster_from_name
from tests.engines.cases import cpu_ranks

FOUR = Plan.parse("data_parallel=threads dp_replicate=4 microbatch_size=2 accumulation=3")


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("tp=2 dp_replicate=2", "threads-alone"),
        ("dp_replicate=4 sync_batch_norm=true", "threads-alone"),
        ("dp_replicate=8", "threads-across-nodes"),
    ],
)
def test_threads_combine_with_no_other_axis_and_need_one_node(words: str, rule: str) -> None:
    model = capture(nn.Linear(2, 2), torch.zeros(2, 2))
    cluster = cluster_from_name("2x4xA100-SXM-80GB")
    refusals = problems(Plan.parse(f"data_parallel=threads {words}"), model, cluster)
    assert rule in [problem.rule for problem in refusals]


def test_threads_are_legal_on_accelerators_of_a_node_only() -> None:
    model = capture(nn.Linear(2, 2), torch.zeros(2, 2))
    assert problems(FOUR, model, cluster_from_name("4xA100-SXM-80GB")) == []
    assert [p.rule for p in problems(FOUR, model, cpu_ranks(4))] == ["threads-processors"]


def test_a_process_that_does_not_see_the_devices_is_refused() -> None:
    seen = torch.cuda.device_count()
    if seen >= 4:
        pytest.skip("this process sees four devices")
    model = nn.Linear(2, 2)
    with pytest.raises(PlanError, match=f"drives 4 accelerators: this process sees {seen}"):
        apply_plan(
            model,
            FOUR,
            profile=capture(model, torch.zeros(2, 2)),
            cluster=cluster_from_name("4xA100-SXM-80GB"),
        )


def test_the_process_takes_the_rows_of_all_devices() -> None:
    alone = one_process_plan(FOUR)
    assert (alone.world_size, alone.microbatch_size, alone.forwards) == (1, 8, 3)
    assert alone.global_batch_size == FOUR.global_batch_size == 24


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch would use the GPUs")
def test_on_cpu_torch_calls_the_module_itself() -> None:
    model = nn.Linear(2, 2)
    world = World(rank=0, size=1, device=torch.device("cpu"), timeout_s=1.0)
    runner = data_parallel(model, FOUR, world, None)
    x = torch.randn(8, 2)
    assert runner.module is model
    assert torch.equal(runner(x), model(x))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_train_as_one() -> None:
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    torch.manual_seed(0)
    reference = nn.Linear(4, 2)
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    parallel = apply_plan(
        model,
        Plan.parse("data_parallel=threads dp_replicate=2 microbatch_size=4"),
        profile=capture(model, (x, y), loss_fn=nn.functional.mse_loss),
        cluster=cluster_from_name("2xA100-SXM-80GB"),
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    parallel.train_step((x, y))
    nn.functional.mse_loss(reference(x), y).backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    results = [p.detach().cpu() for p in model.parameters()]
    torch.testing.assert_close(results, list(reference.parameters()))


def test_a_thread_computes_in_the_plan_s_dtype_and_not_in_its_own_default() -> None:
    model, computed = nn.Linear(2, 2), []

    def compute() -> None:  # as `nn.parallel.parallel_apply` does in each of its threads
        with torch.amp.autocast("cpu", enabled=True):
            computed.append(model(torch.zeros(2, 2)).dtype)

    data_parallel(model, FOUR, World(0, 1, torch.device("cpu"), timeout_s=1.0), torch.float16)
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert computed == [torch.float16]  # the default on CPUs is bfloat16
