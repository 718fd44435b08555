"""Loops and code of one's own around a ParallelModel: each beside the same loop on one process."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from engines.parallel import ParallelModel
from engines.plan import Plan
from profiles.errors import InputError, PlanError
from tests.engines.cases import Case, TinyGPT, token_loss
from tests.engines.parity import (
    HSDP,
    KINDS,
    alone,
    gradient_error,
    local_rows,
    parallelize,
    reference_loss,
    relative,
    sgd,
    spread,
)
from tests.nightly import nightly
from tests.workers import Pool


class Generator(TinyGPT):
    """A language model with things of its own beside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"layers": 3}
        self.step = "ours"

    @torch.no_grad()
    def generate(self, ids: Tensor, *, tokens: int) -> Tensor:
        """The likeliest continuation, (B, T + tokens)."""
        for _ in range(tokens):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], 1)
        return ids


def _token_batch(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    ids = torch.randint(0, 61, (rows, 9))
    return ids[:, :-1], ids[:, 1:]


GENERATOR = Case(Generator, _token_batch, token_loss)
SPLIT = "tp=2 tensor_styles=blocks.*.mlp.0:column,blocks.*.mlp.2:row"


def _accumulated(plan: str) -> tuple[float, float, float, float]:
    """Three microbatches a step, two steps: differences of gradients, norm, parameters, sending."""
    case, reference, parallel = parallelize("gpt", plan)
    assert case.loss_fn is not None
    optimizer, errors, norms = sgd(list(reference.parameters())), [], []
    for step in range(2):
        batches = [case.batch(8 + 2 * step) for _ in range(3)]
        for number, batch in enumerate(batches):
            is_last = number == len(batches) - 1
            inputs, targets = local_rows(parallel, batch, 8 + 2 * step)
            with nullcontext() if is_last else parallel.no_sync():
                (case.loss_fn(parallel(inputs), targets) / 3).backward()
            (reference_loss(reference, case, batch) / 3).backward()
        errors.append(gradient_error(parallel, reference))
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        norms.append(abs(parallel.clip_grad_norm_(0.1).item() / norm.item() - 1))
        for one in (parallel.optimizer, optimizer):
            one.step()
            one.zero_grad()
    after = parallel.state_dict()
    drift = max(relative(after[n], value) for n, value in reference.state_dict().items())
    return max(errors), max(norms), drift, float(parallel.step - 2)


@pytest.mark.dist
@pytest.mark.parametrize("plan", [KINDS[0], *KINDS[2:], *nightly(KINDS[1], HSDP)])
def test_gradients_that_accumulate_in_a_loop_are_those_of_one_process(
    pool: Pool, plan: str
) -> None:
    for result in pool.run(_accumulated, plan, world_size=Plan.parse(plan).world_size):
        assert max(result) < 1e-5


def _steps_too_early() -> list[str]:
    case, _, parallel = parallelize("gpt", KINDS[0])
    assert case.loss_fn is not None
    inputs, targets = local_rows(parallel, case.batch(8), 8)
    messages = []
    with parallel.no_sync():
        case.loss_fn(parallel(inputs), targets).backward()
    for early in (parallel.optimizer.step, lambda: parallel.clip_grad_norm_(1.0)):
        with pytest.raises(InputError) as caught:
            early()
        messages.append(caught.value.what)
    with parallel.no_sync(), pytest.raises(InputError) as caught:
        parallel.train_step((inputs, targets))
    messages.append(caught.value.what)
    parallel.optimizer.zero_grad()
    parallel.train_step((inputs, targets))
    return messages


@pytest.mark.dist
def test_a_step_without_an_exchange_is_refused(pool: Pool) -> None:
    for local, again, own in pool.run(_steps_too_early, world_size=2):
        assert local == again
        assert local == (
            "the last backward was inside of `no_sync`: its gradients were not exchanged"
        )
        assert own == "`train_step` inside of `no_sync`: it exchanges gradients itself, once a step"


def _attributes(plan: str) -> tuple[object, ...]:
    """Things reached through a parallel model, and the texts of errors."""
    reference, parallel = spread(GENERATOR, plan)
    ids = _token_batch(2)[0]
    values: list[object] = [parallel.config, parallel.step, parallel.head is parallel.module.head]
    values += [hasattr(parallel, "no_such_thing"), hasattr(parallel, "generate")]
    for ask in (lambda: parallel.generate(ids, tokens=3), lambda: parallel.unwrap()):
        try:
            asked = ask()
        except PlanError as error:
            values.append(error.what)
        else:
            is_same = asked is parallel.module or torch.equal(asked, wanted(reference, ids))
            values.append(is_same)
    whole = parallel.unwrap(into=Generator())
    values.append(torch.equal(whole.generate(ids, tokens=3), wanted(reference, ids)))
    return tuple(values)


def wanted(reference: nn.Module, ids: Tensor) -> Tensor:
    assert isinstance(reference, Generator)
    return reference.generate(ids, tokens=3)


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2", SPLIT])
def test_the_model_s_own_attributes_are_reached_and_its_methods_where_it_is_whole(
    pool: Pool, plan: str
) -> None:
    refused = (
        "`generate` runs the whole model, this rank has a part of it",
        "there is no whole model on this rank to unwrap",
    )
    calls = (True, True) if plan == "dp_replicate=2" else refused
    seen = ({"layers": 3}, 0, True, False, True, *calls, True)
    assert pool.run(_attributes, plan, world_size=2) == [seen, seen]


def test_attributes_that_neither_has_are_missed_as_in_any_module() -> None:
    _, parallel = alone("gpt")
    parallel.module._hidden = 1  # of the module's own code
    with pytest.raises(AttributeError, match="_hidden"):
        _ = parallel._hidden
    with pytest.raises(AttributeError, match="'ParallelModel' object has no attribute 'colour'"):
        _ = parallel.colour
    with pytest.raises(AttributeError, match="_private"):
        _ = parallel._private


def _metrics(plan: str) -> tuple[dict[str, float], float]:
    case, reference, parallel = parallelize("gpt", plan)
    batch = case.batch(5)  # 3 rows and 2
    inputs, targets = local_rows(parallel, batch, 5)
    with torch.no_grad():
        hits = (parallel(inputs).argmax(-1) == targets).float().mean()
        wanted = (reference(batch[0]).argmax(-1) == batch[1]).float().mean()
    means = parallel.global_mean({"accuracy": hits, "rows": len(targets)}, count=len(targets))
    return means, wanted.item()


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_replicate=2", SPLIT])
def test_metrics_are_means_over_the_global_batch(pool: Pool, plan: str) -> None:
    (first, wanted), (second, _) = pool.run(_metrics, plan, world_size=2)
    assert first == second
    assert first["accuracy"] == pytest.approx(wanted, rel=1e-6)
    assert first["rows"] == ((3 * 3 + 2 * 2) / 5 if plan == "dp_replicate=2" else 5.0)


def test_a_metric_of_several_numbers_and_one_of_nothing_are_refused() -> None:
    _, parallel = alone("gpt")
    with pytest.raises(InputError, match=r"metric `hits` is \(3,\), it must be one number"):
        parallel.global_mean({"hits": torch.ones(3)}, count=3)
    with pytest.raises(InputError, match="no rank has anything to count"):
        parallel.global_mean({"hits": float("nan")}, count=0)


def test_a_pipeline_has_no_loop_to_accumulate_in() -> None:
    _, parallel = alone("gpt")
    parallel.plan = Plan.parse("pp=2 schedule=gpipe microbatches=2 stages=blocks.1")
    with pytest.raises(PlanError, match="a pipeline has no backward of its own"):
        _enter(parallel)


def _enter(parallel: ParallelModel) -> None:
    with parallel.no_sync():
        pass


class Scaled(nn.Module):
    """A loss with a factor that the loop sets."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.factor = nn.Linear(4, 4), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x).square().mean() * self.factor


def test_an_attribute_that_is_set_is_that_of_the_model() -> None:
    case = Case(Scaled, lambda rows: {"x": torch.ones(rows, 4)}, None)
    _, parallel = spread(case, "dp_replicate=1")
    before = parallel.eval_step(case.batch(2))
    parallel.factor = 0.5
    assert parallel.module.factor == 0.5
    assert torch.equal(parallel.eval_step(case.batch(2)), before / 2)
    parallel.factors = 3  # the model has none
    assert not hasattr(parallel.module, "factors")


def test_an_attribute_of_the_model_that_has_a_name_of_ours_stays_its_own() -> None:
    _, parallel = spread(GENERATOR, "dp_replicate=1")
    parallel.step = 5
    assert parallel.module.step == "ours"
    assert parallel.step == 5
