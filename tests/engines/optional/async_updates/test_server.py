"""The arithmetic of a parameter server: delays are simulated, the server is the real one."""

from __future__ import annotations

from math import pi, sin

import pytest
import torch
from torch import Tensor, nn

from engines.optional.async_updates.partition import partition
from engines.optional.async_updates.report import UpdateReport
from engines.optional.async_updates.server import ParameterServer


def a_server(
    value: float = 1.0,
    *,
    rate: float = 0.1,
    workers: int = 2,
    needed: int | None = None,
    max_staleness: int | None = None,
) -> ParameterServer:
    """One number, stepped by plain gradient descent."""
    x = nn.Parameter(torch.tensor([value], dtype=torch.float64))
    return ParameterServer(
        [x],
        torch.optim.SGD([x], lr=rate),
        workers=range(workers),
        needed=needed,
        max_staleness=max_staleness,
    )


def gradient(value: float) -> list[Tensor]:
    return [torch.tensor([value], dtype=torch.float64)]


def number(server: ParameterServer) -> float:
    return server.parameters[0].item()


def descend(server: ParameterServer, *, curvature: float, delay: int, updates: int) -> list[float]:
    """Workers in turn, `delay` + 1 of them, each with the parameters of its last turn: gradients of
    curvature / 2 x^2 are then `delay` updates old. The number after each update."""
    workers = delay + 1
    pulled = [(server.version, number(server))] * workers
    results = []
    for turn in range(updates):
        version, x = pulled[turn % workers]
        server.push(turn % workers, version, gradient(curvature * x))
        pulled[turn % workers] = server.version, number(server)
        results.append(abs(number(server)))
    return results


@pytest.mark.parametrize("delay", [0, 1, 3, 7])
def test_stale_descent_is_stable_up_to_the_known_step_and_no_further(delay: int) -> None:
    """x' = x - a x(-d) on a quadratic of curvature 1 is stable for a < 2 sin(pi / (2 (2 d + 1))):
    the roots of z^(d+1) - z^d + a leave the unit circle there (Levin & May 1976; 2 for d = 0)."""
    threshold = 2 * sin(pi / (2 * (2 * delay + 1)))
    for factor, grows in ((0.95, False), (1.05, True)):
        server = a_server(rate=factor * threshold, workers=delay + 1)
        losses = descend(server, curvature=1.0, delay=delay, updates=1200)
        late, early = max(losses[-50:]), max(losses[100:150])
        assert (late > 100 * early) == grows, (factor, early, late)
        assert (late < early / 100) == (not grows), (factor, early, late)
        report = server.tally.report(sent_bytes=0, received_bytes=0)
        assert report.most_staleness == delay


def test_stability_depends_on_rate_times_curvature() -> None:
    threshold = 2 * sin(pi / 6)  # of a delay of one: 1
    shallow, steep = (
        descend(a_server(rate=rate), curvature=curvature, delay=1, updates=300)[-1]
        for rate, curvature in ((0.9 * threshold, 1.0), (0.9 * threshold, 1.3))
    )
    assert shallow < 1e-3
    assert steep > 1e3


def test_staleness_slows_stable_descent() -> None:
    """At a rate that is stable for both, fresh gradients need fewer updates to the same place: with
    a = 0.35 the roots are 0.65 without delay, and by z^3 - z^2 + a = 0 of modulus 0.86 with two."""
    after = [
        descend(a_server(rate=0.35, workers=3), curvature=1.0, delay=d, updates=60) for d in (0, 2)
    ]
    fresh, stale = ((max(xs[-12:]) / max(xs[12:24])) ** (1 / 36) for xs in after)
    roots = abs(torch.linalg.eigvals(torch.tensor([[1.0, 0, -0.35], [1, 0, 0], [0, 1, 0]])))
    assert fresh == pytest.approx(0.65, abs=0.01)
    assert stale == pytest.approx(float(roots.max()), abs=0.02)
    assert stale > fresh


def test_a_step_is_the_mean_over_all_samples_of_the_gradients_it_waited_for() -> None:
    server = a_server(0.0, rate=1.0, needed=2)
    assert server.push(0, 0, gradient(1.0), count=1, loss=10.0) == 0
    assert (server.version, server.may_go_on(0)) == (0, False)
    server.push(1, 0, gradient(4.0), count=3, loss=2.0)
    assert (server.version, server.may_go_on(0)) == (1, True)
    assert number(server) == -(1 * 1.0 + 3 * 4.0) / 4
    assert server.loss == (1 * 10.0 + 3 * 2.0) / 4


def test_unused_parameters_are_not_stepped() -> None:
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=1.0, weight_decay=0.5)
    server = ParameterServer(parameters, optimizer, workers=[3], needed=1)
    server.push(3, 0, [None, torch.zeros(1)])
    assert [p.item() for p in parameters] == [1.0, 0.5]


def test_a_late_backup_worker_is_dropped_for_the_step_and_stays_in_the_job() -> None:
    server = a_server(0.0, rate=1.0, workers=3, needed=2)
    for version in range(3):
        for worker in (0, 1):
            server.push(worker, version, gradient(1.0))
    before = number(server)
    assert server.push(2, 0, gradient(100.0)) is None
    assert number(server) == before
    assert server.may_go_on(2)
    assert server.clocks == {0: 3, 1: 3, 2: 3}
    report = server.tally.report(sent_bytes=0, received_bytes=0)
    assert (report.updates, report.dropped, report.most_staleness) == (6, 1, 0)
    assert server.push(2, 3, gradient(1.0)) == 0  # and counts again


def test_a_server_uses_gradients_of_the_named_workers_only() -> None:
    x = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([x], lr=1.0)
    server = ParameterServer([x], optimizer, workers=range(3), needed=2, decides=False)
    for worker in range(3):
        assert server.push(worker, 0, [torch.full((1,), 2.0**worker)]) == 0
        assert server.version == 0
    server.use([2, 0])
    assert (server.version, x.item()) == (1, -(4 + 1) / 2)
    assert [server.is_used(worker, 0) for worker in range(3)] == [True, False, True]
    assert [server.may_go_on(worker) for worker in range(3)] == [True] * 3
    report = server.tally.report(sent_bytes=0, received_bytes=0)
    assert (report.updates, report.dropped) == (2, 1)


def test_a_worker_that_pulls_late_counts_the_steps_made_meanwhile() -> None:
    """It skips them: who counted on its gradients of them would wait for ever."""
    server = a_server(needed=1)
    server.push(0, 0, gradient(0.0))
    for version in (1, 2):
        server.push(1, version, gradient(0.0))
    assert server.clocks == {0: 1, 1: 3}
    assert server.catch_up(0) == server.clocks[0] == 3
    asynchronous = a_server()
    asynchronous.push(0, 0, gradient(0.0))
    asynchronous.push(1, 1, gradient(0.0))
    assert asynchronous.catch_up(0) == 1


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_worker_is_never_further_ahead_than_its_bound(bound: int) -> None:
    """The fast one asks ten times for each time that the slow one does."""
    server = a_server(max_staleness=bound)
    lead = 0
    for _ in range(5):
        for _ in range(10):
            if server.may_go_on(0):
                server.push(0, server.version, gradient(0.0))
                lead = max(lead, server.clocks[0] - server.clocks[1])
        server.push(1, server.version, gradient(0.0))
    assert lead == bound + 1  # it has given the step with which it is too far ahead, and waits
    assert not a_server(max_staleness=None).lacks_workers


def test_a_lost_worker_does_not_block_the_others() -> None:
    server = a_server(max_staleness=0)
    server.push(0, 0, gradient(0.0))
    assert not server.may_go_on(0)
    server.lose(1)
    assert server.may_go_on(0)
    assert not server.lacks_workers
    synchronous = a_server(needed=2)
    synchronous.lose(1)
    assert synchronous.lacks_workers
    assert synchronous.tally.gone == [1]


def test_parameters_are_balanced_over_servers_in_whole_tensors() -> None:
    sizes = [100, 1, 70, 30, 60, 40, 1]
    parts = partition(sizes, 3)
    assert sorted(number for part in parts for number in part) == list(range(7))
    sums = [sum(sizes[number] for number in part) for part in parts]
    assert max(sums) == 101  # 302 / 3 rounded up: no partition is better
    assert partition(sizes, 1) == [list(range(7))]
    assert [len(part) for part in partition([5, 5], 4)] == [1, 1, 0, 0]


def test_a_report_counts_and_reads_as_a_sentence() -> None:
    report = UpdateReport(staleness={0: 1, 1: 2, 4: 1}, dropped=2, gone=(3,))
    assert (report.updates, report.mean_staleness, report.most_staleness) == (4, 1.5, 4)
    assert str(report) == (
        "4 updates, 1.5 stale on the average, 4 at most; 2 dropped; ranks gone: 3"
    )
    assert UpdateReport.model_validate_json(report.model_dump_json()) == report
    assert UpdateReport().mean_staleness == 0
