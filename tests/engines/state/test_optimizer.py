"""Optimizers under a plan: carried over with their states, and clipping over all shards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from engines.apply import apply_plan
from engines.data.dense_gradients import require_dense
from engines.plan import Plan
from engines.state.optimizer_parts import sparse_alone
from profiles.errors import InputError, PlanError
from profiles.model.profile import ModelProfile
from tests.engines.cases import CASES, Case, cpu_ranks, profile_of
from tests.engines.parity import (
    KINDS,
    local_rows,
    parallelize,
    reference_loss,
    relative,
    spread,
    state_error,
)
from tests.nightly import half
from tests.workers import Pool


def _clip(plan: str) -> tuple[float, float, float]:
    """The norm that clipping reports, the true one, and the error of the clipped gradients."""
    case, reference, parallel = parallelize("gpt", plan)
    batch = case.batch(8)
    reference_loss(reference, case, batch).backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1).item()
    parallel.forward_backward(local_rows(parallel, batch, 8))
    norm = parallel.clip_grad_norm_(0.1).item()
    got = parallel.full_gradients()
    error = max(
        relative(got[n], p.grad) for n, p in reference.named_parameters() if p.grad is not None
    )
    return norm, expected, error


@pytest.mark.dist
@pytest.mark.parametrize("plan", [*KINDS, "dp_replicate=2 dp_shard=2", "dp_shard=2 offload=states"])
def test_clipping_sees_the_norm_over_all_shards(pool: Pool, plan: str) -> None:
    for norm, expected, error in pool.run(_clip, plan, world_size=Plan.parse(plan).world_size):
        assert norm == pytest.approx(expected, rel=1e-5)
        assert expected > 0.1
        assert error < 1e-5


def _carry_over(plan: str) -> tuple[bool, float, list[float]]:
    """Train alone with momentum, carry the optimizer over, train on: error against one process."""
    case = CASES["gpt"]
    torch.manual_seed(1)
    model = case.build()
    profile = profile_of(case, model)

    def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
        decayed = [p for p in module.parameters() if p.dim() > 1]
        rest = [p for p in module.parameters() if p.dim() == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)

    optimizer = optimizer_of(model)
    _steps(case, model, optimizer, range(2))
    reference = copy.deepcopy(model)
    reference_optimizer = optimizer_of(reference)
    reference_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    parallel = apply_plan(
        model,
        Plan.parse(plan),
        profile=profile,
        cluster=cpu_ranks(2),
        loss_fn=case.loss_fn,
        optimizer=optimizer,
    )
    for step in range(2, 4):
        batch = case.batch(4 + step)
        parallel.train_step(local_rows(parallel, batch, 4 + step))
    _steps(case, reference, reference_optimizer, range(2, 4))
    optimizer.step()  # tells the scheduler that the optimizer runs
    scheduler.step()
    after = parallel.state_dict()
    error = max(relative(after[n], value) for n, value in reference.state_dict().items())
    return parallel.optimizer is optimizer, error, [g["lr"] for g in optimizer.param_groups]


def _steps(case: Any, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        reference_loss(model, case, case.batch(4 + step)).backward()
        optimizer.step()


@pytest.mark.dist
@pytest.mark.parametrize("plan", half(KINDS))
def test_an_optimizer_that_was_already_built_is_carried_over(pool: Pool, plan: str) -> None:
    for same, error, rates in pool.run(_carry_over, plan, world_size=2):
        assert same
        assert error < 1e-5
        assert rates == [0.025, 0.01]  # groups and the scheduler's hold on them


def _carry_over_adam(plan: str, kind: str) -> tuple[float, set[str], bool]:
    """AdamW that stepped alone and goes on under a plan: error against one process."""
    case = CASES["gpt"]
    torch.manual_seed(1)
    model = case.build()
    profile = profile_of(case, model)
    build = ADAMS[kind]
    optimizer = build(list(model.parameters()))
    _steps(case, model, optimizer, range(2))
    reference = copy.deepcopy(model)
    reference_optimizer = build(list(reference.parameters()))
    reference_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    parallel = apply_plan(
        model,
        Plan.parse(plan),
        profile=profile,
        cluster=cpu_ranks(2),
        loss_fn=case.loss_fn,
        optimizer=optimizer,
    )
    batch = case.batch(6)
    parallel.train_step(local_rows(parallel, batch, 6))
    _steps(case, reference, reference_optimizer, range(2, 3))
    counts = {str(state["step"].item()) for state in optimizer.state.values()}
    return state_error(parallel, reference), counts, parallel.optimizer is optimizer


def _adam(**options: Any) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, **options)


ADAMS = {
    "foreach": _adam(foreach=True),
    "fused": _adam(fused=True),
    "amsgrad": _adam(amsgrad=True),
    "tensor-lr": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(1e-3)),
}


@pytest.mark.dist
@pytest.mark.parametrize("kind", ADAMS)
@pytest.mark.parametrize("plan", half(["dp_shard=2", "dp_replicate=2"]))
def test_every_implementation_of_adam_resumes_from_its_states(
    pool: Pool, plan: str, kind: str
) -> None:
    for error, counts, same in pool.run(_carry_over_adam, plan, kind, world_size=2):
        assert same
        assert counts == {"3.0"}
        # Adam divides by the gradient's size, so rounding shows in small ones; states that began
        # anew would make steps of lr, 1e-2 of these parameters.
        assert error < 1e-4


class RowMeans(torch.optim.Optimizer):
    """Steps element by element, and remembers the mean of every row."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["rows"] = parameter.grad.flatten(1).mean(1)
                    parameter -= 0.1 * parameter.grad


def _carried_row_means() -> str:
    """States that cannot be cut as the parameter is."""
    case = CASES["gpt"]
    model = case.build()
    profile = profile_of(case, model)
    optimizer = RowMeans([p for p in model.parameters() if p.dim() > 1])
    _steps(case, model, optimizer, range(1))
    return _refused("dp_shard=2", model, profile, optimizer)


def _refused(plan: str, model: nn.Module, profile: ModelProfile, optimizer: Any) -> str:
    try:
        apply_plan(
            model,
            Plan.parse(plan),
            profile=profile,
            cluster=cpu_ranks(2),
            optimizer=optimizer,
        )
    except InputError as error:
        return str(error)
    return "no error"


@pytest.mark.dist
def test_states_that_cannot_be_cut_are_refused_with_the_remedy(pool: Pool) -> None:
    for text in pool.run(_carried_row_means, world_size=2):
        assert "cannot be split like it" in text
        assert "pass a factory" in text


def _adafactor(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-3)  # a step changes parameters by 1e-3 of them


def _muon(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.02)


WHOLE = {"adafactor": _adafactor, "muon": _muon}


def _refuse_whole(name: str, plan: str) -> str:
    case = CASES["gpt"]
    model = case.build()
    return _refused(plan, model, profile_of(case, model), WHOLE[name])


@pytest.mark.dist
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("plan", [kind for kind in KINDS if kind != "dp_replicate=2"])
def test_optimizers_of_whole_matrices_are_refused_on_shards(
    pool: Pool, name: str, plan: str
) -> None:
    for text in pool.run(_refuse_whole, name, plan, world_size=2):
        assert "looks at a whole matrix at a time" in text
        assert "dp_replicate without zero" in text


class OwnRprop(torch.optim.Rprop):
    """Not torch's, whose steps are of a rank's own tensors."""


def _rprop(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return OwnRprop(parameters, lr=1e-3)


def _refuse_rprop(plan: str) -> str:
    case = CASES["gpt"]
    model = case.build()
    return _refused(plan, model, profile_of(case, model), _rprop)


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_shard=2", "dp_replicate=2 zero=1"])
def test_an_optimizer_that_torch_cannot_step_on_shards_is_refused_before_it_steps(
    pool: Pool, plan: str
) -> None:
    for text in pool.run(_refuse_rprop, plan, world_size=2):
        assert "`OwnRprop` cannot step shards: RuntimeError: aten.index_put_" in text
        assert "dp_replicate without zero" in text


class Bag(nn.Module):
    """Ids to logits, by a table whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(31, 5, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.table(ids).mean(1)
        return out


def _bag_batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(31, (rows, 3), generator=generator), torch.arange(rows) % 5


BAG = Case(Bag, _bag_batch, nn.functional.cross_entropy)


def _step_bag() -> tuple[float, str]:
    """Error of two steps of replicas against one process's, and what shards are refused for."""
    reference, parallel = spread(BAG, "dp_replicate=2", optimizer=torch.optim.SparseAdam)
    optimizer = torch.optim.SparseAdam(reference.parameters())
    for rows in (8, 6):
        parallel.train_step(local_rows(parallel, _bag_batch(rows), rows))
        optimizer.zero_grad()
        reference_loss(reference, BAG, _bag_batch(rows)).backward()
        optimizer.step()
    after = parallel.state_dict()["table.weight"]
    error = relative(after, reference.state_dict()["table.weight"])
    try:
        spread(BAG, "dp_shard=2", optimizer=torch.optim.SparseAdam)
    except PlanError as refused:
        return error, str(refused)
    return error, ""


@pytest.mark.dist
def test_an_optimizer_of_sparse_gradients_steps_replicas_and_is_refused_on_shards(
    pool: Pool,
) -> None:
    for error, text in pool.run(_step_bag, world_size=2):
        assert error < 1e-6
        assert "SparseAdam steps sparse gradients alone" in text
        assert "dp_replicate without zero" in text


def test_an_optimizer_of_sparse_gradients_is_refused_wherever_they_become_dense() -> None:
    """torch's own error, in the first step, names neither the plan nor a way out."""
    table = Bag()
    optimizer = torch.optim.SparseAdam(table.parameters())
    table.table.weight.grad = torch.ones(31, 5)
    with pytest.raises(RuntimeError, match="does not support dense gradients"):
        optimizer.step()
    for plan in (
        "pp=2 microbatches=2 stages=x",
        "cp=2",
        "dp_replicate=2 zero=1",
        "ep=2 dp_shard=2",
    ):
        with pytest.raises(PlanError, match="SparseAdam steps sparse gradients alone") as refused:
            require_dense(table, Plan.parse(plan), [], sparse_alone=sparse_alone(optimizer))
        assert "take torch.optim.Adam" in str(refused.value)
    require_dense(table, Plan.parse("dp_replicate=2"), [], sparse_alone=sparse_alone(optimizer))


def _on_shards(name: str) -> float | str:
    """torch's own result for a refused plan: error against one process, or torch's error."""
    case = CASES["gpt"]
    torch.manual_seed(1)
    model = case.build()
    reference = copy.deepcopy(model)
    fully_shard(model)
    optimizers = [WHOLE[name](list(module.parameters())) for module in (reference, model)]
    batch = case.batch(4)
    for module in (reference, model):
        reference_loss(module, case, batch).backward()
    try:
        for optimizer in optimizers:
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(relative(mine.full_tensor(), theirs) for mine, theirs in pairs)


@pytest.mark.dist
def test_torch_itself_does_not_step_them_on_shards_as_on_one_process(pool: Pool) -> None:
    for result in pool.run(_on_shards, "muon", world_size=2):
        assert result > 1e-4  # ten times what parity asks for
    for result in pool.run(_on_shards, "adafactor", world_size=2):
        assert "in-place operations that require placement changes" in result


def _replicated(name: str) -> float:
    case, reference, parallel = parallelize("gpt", "dp_replicate=2", optimizer=WHOLE[name])
    optimizer = WHOLE[name](list(reference.parameters()))
    for step in range(3):
        batch = case.batch(4 + step)
        parallel.train_step(local_rows(parallel, batch, 4 + step))
    _steps(case, reference, optimizer, range(3))
    return state_error(parallel, reference)


@pytest.mark.dist
def test_adafactor_on_replicas_steps_as_on_one_process(pool: Pool) -> None:
    for error in pool.run(_replicated, "adafactor", world_size=2):
        assert error < 1e-5


class Slowly(torch.optim.Optimizer):
    """Follows another optimizer's steps by half (Lookahead), as wrappers are often written: the
    constructor of the base is left out."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.defaults = inner, inner.defaults
        self.param_groups, self.state = inner.param_groups, inner.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        before = [p.clone() for group in self.param_groups for p in group["params"]]
        self.inner.step()
        now = (p for group in self.param_groups for p in group["params"])
        for parameter, old in zip(now, before, strict=True):
            parameter.lerp_(old, 0.5)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


def _slowly(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Slowly(torch.optim.SGD(parameters, lr=0.1))


def _slow_drift(plan: str) -> float:
    reference, parallel = spread(CASES["gpt"], plan, optimizer=_slowly)
    optimizer = _slowly(list(reference.parameters()))
    for _ in range(2):
        batch = CASES["gpt"].batch(8)
        reference_loss(reference, CASES["gpt"], batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        parallel.train_step(local_rows(parallel, batch, 8))
    assert parallel.step == 2
    return state_error(parallel, reference)


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2"])
def test_a_wrapper_that_leaves_the_constructor_of_its_base_out_steps(pool: Pool, plan: str) -> None:
    assert max(pool.run(_slow_drift, plan, world_size=2)) < 1e-5
