"""torch.compile of blocks, in a pipeline: the same gradients, and only the blocks of a rank."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
from torch import Tensor, nn

from engines.blocks.compile import require_compilable
from engines.legality import problems
from engines.plan import Plan
from profiles.errors import PlanError
from tests.engines.cases import CASES, Case, cpu_ranks, profile_of
from tests.engines.parity import gradient_error, reference_loss, relative, spread
from tests.workers import Pool


class Stack(nn.Module):
    """Three equal blocks, quickly compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)) for _ in range(3)
        )
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mean(1)
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


class Annealed(nn.Module):
    """Counts its forwards in a buffer and halves a number, in place, and computes with both."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.heat = nn.Linear(6, 6), torch.tensor(1.0)
        self.register_buffer("calls", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("calls").add_(1)
        self.heat.mul_(0.5)
        y: Tensor = torch.tanh(self.inner(x)) * self.get_buffer("calls")
        return y * self.heat


class AnnealedStack(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Annealed() for _ in range(3))


STACK = Case(Stack, CASES["lstm"].batch)
CPU = torch.device("cpu")
PLAN = "pp=2 schedule=1f1b microbatches=2 stages=blocks.1 compile=true recompute=full"


def compiled() -> tuple[float, float, list[bool], int]:
    """Differences from eager code, which blocks compile, and how many graphs were made."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no processes that outlive the test
    warnings.simplefilter("default")  # torch's inductor imports what torch itself deprecates
    from torch._dynamo.utils import counters

    reference, parallel = spread(STACK, PLAN)
    batch = STACK.batch(4)
    expected = reference_loss(reference, STACK, batch)
    expected.backward()
    loss = parallel.forward_backward(batch)
    blocks = parallel.module.get_submodule("blocks").children()
    compiles = [block._compiled_call_impl is not None for block in blocks]
    error = gradient_error(parallel, reference)
    return relative(loss, expected.detach()), error, compiles, counters["stats"]["unique_graphs"]


@pytest.mark.dist
def test_blocks_of_a_ranks_stages_are_compiled_and_train_the_same(pool: Pool) -> None:
    first, second = pool.run(compiled, world_size=2, timeout_s=180)
    for loss, gradient, _, graphs in (first, second):
        assert max(loss, gradient) < 1e-5
        assert graphs > 0
    assert first[2] == [True, False, False]
    assert second[2] == [False, True, True]


def test_gradients_of_a_compiled_block_see_the_state_that_its_forward_saw() -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    warnings.simplefilter("default")
    case = Case(AnnealedStack, STACK.batch)
    reference, parallel = spread(case, "compile=true")
    errors = []
    for _ in range(2):
        reference_loss(reference, case, case.batch(4)).backward()
        parallel.forward_backward(case.batch(4))
        errors.append(gradient_error(parallel, reference))
        reference.zero_grad()
        parallel.optimizer.zero_grad()
    assert max(errors) < 1e-5


def test_a_missing_compiler_is_refused_with_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["gpt"]
    model = case.build()
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(PlanError, match=r"needs a C\+\+ compiler on a CPU") as caught:
        require_compilable(model, Plan(compile=True), profile=profile_of(case, model), device=CPU)
    assert "set compile=false" in str(caught.value)


def test_compile_with_recompute_refuses_batch_statistics_by_name() -> None:
    case = CASES["resnet-batch-norm"]
    model, plan = case.build(), Plan.parse("compile=true recompute=full")
    with pytest.raises(PlanError, match=r"`layers\.0` has buffers that its forward might change"):
        require_compilable(model, plan, profile=profile_of(case, model), device=CPU)


class Counting(nn.Module):
    """Leaves its output behind, and changes what `keeps` says before it computes with it."""

    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.inner, self.keeps = nn.Linear(6, 6), keeps
        self.calls, self.mean, self.past = 0, torch.zeros(6), {"heats": [1.0]}
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.keeps == "calls":
            self.calls += 1
        elif self.keeps == "mean":
            self.mean = 0.5 * self.mean + x.detach().mean(0)
        elif self.keeps == "past":
            self.past["heats"].append(0.5 * self.past["heats"][-1])
        y: Tensor = (
            torch.tanh(self.inner(x - self.mean)) * (1 + self.calls) * self.past["heats"][-1]
        )
        self.last = y
        return y


class CountingStack(Stack):
    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting(keeps) for _ in range(3))


@pytest.mark.parametrize("keeps", ["calls", "mean", "past"])
def test_compile_with_recompute_refuses_what_a_block_keeps_by_name(keeps: str) -> None:
    case = Case(lambda: CountingStack(keeps), STACK.batch)
    for recompute in ("full", "selective"):
        with pytest.raises(
            PlanError, match=rf"the forward of `blocks\.0` changes `{keeps}`: torch"
        ):
            spread(case, f"compile=true recompute={recompute}")


def test_compile_with_recompute_takes_blocks_that_leave_results_behind() -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    warnings.simplefilter("default")
    case = Case(lambda: CountingStack("nothing"), STACK.batch)
    reference, parallel = spread(case, "compile=true recompute=full")
    for _ in range(2):
        reference.zero_grad()
        parallel.optimizer.zero_grad()
        reference_loss(reference, case, case.batch(4)).backward()
        parallel.forward_backward(case.batch(4))
    assert gradient_error(parallel, reference) < 1e-5


def test_a_model_without_blocks_has_nothing_to_compile() -> None:
    case = CASES["lstm"]
    refusals = problems(Plan.parse("compile=true"), profile_of(case, case.build()), cpu_ranks(1))
    assert [problem.rule for problem in refusals] == ["compile-without-blocks"]
