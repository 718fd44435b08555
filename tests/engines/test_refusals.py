"""Plans that cannot be applied are refused with the reason, before any work."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from engines.apply import apply_plan, require_plain
from engines.plan import Plan
from profiles.errors import InputError, ModelError, PlanError, RankError
from profiles.model.profile import ModelProfile
from tests.engines.cases import CASES, Case, cpu_ranks, profile_of
from tests.engines.parity import alone, parallelize, spread
from tests.workers import Pool


def test_a_model_on_the_meta_device_is_refused_with_the_remedy() -> None:
    case = CASES["gpt"]
    with torch.device("meta"):
        model = case.build()
    with pytest.raises(ModelError, match="on the meta device"):
        apply_plan(model, Plan(), profile=profile_of(case, model), cluster=cpu_ranks(1))


def test_a_plan_for_another_world_is_refused_before_any_work() -> None:
    with pytest.raises(PlanError, match=r"needs 4 ranks \(dp_shard=4\).* has 1"):
        alone("gpt", plan=Plan.parse("dp_shard=4"))


@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2"])
def test_a_plan_for_a_named_cluster_of_more_ranks_than_the_job_is_refused(plan: str) -> None:
    """As of `cluster="2xH100-SXM-80GB"` in a script without a launcher."""
    case = CASES["gpt"]
    model = case.build()
    with pytest.raises(PlanError, match="the plan is for 2 ranks, this job has 1 rank") as caught:
        apply_plan(model, Plan.parse(plan), profile=profile_of(case, model), cluster=cpu_ranks(2))
    assert caught.value.hints[0].startswith("start 2 ranks: torchrun")


def test_an_optimizer_of_another_model_is_refused() -> None:
    stranger = torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)
    with pytest.raises(InputError, match=r"shape \(3, 3\) that is not in the model"):
        alone("gpt", optimizer=stranger)


def _all_frozen() -> str:
    case, model = CASES["gpt"], CASES["gpt"].build()
    profile: ModelProfile = profile_of(case, model)
    model.requires_grad_(False)
    try:
        apply_plan(model, Plan.parse("dp_replicate=2"), profile=profile, cluster=cpu_ranks(2))
    except ModelError as error:
        return error.what
    return "no error"


@pytest.mark.dist
def test_a_model_with_nothing_to_train_is_refused(pool: Pool) -> None:
    assert "no trainable parameter" in pool.run(_all_frozen, world_size=2)[0]


def _parallel_already(plan: str) -> list[str]:
    """Applying the plan to what a plan was applied to: the wrapper, the module, DDP itself."""
    case, _, parallel = parallelize("gpt", plan)
    given: list[nn.Module] = [parallel]
    if "shard" in plan:
        given.append(parallel.module)
    else:
        given.append(parallel._runner)  # type: ignore[arg-type]
    messages = []
    profile = profile_of(case, case.build())
    for model in given:
        try:
            apply_plan(model, Plan.parse(plan), profile=profile, cluster=cpu_ranks(2))
        except ModelError as error:
            messages.append(error.what)
    return messages


@pytest.mark.dist
@pytest.mark.parametrize("plan", ["dp_replicate=2", "dp_shard=2"])
def test_a_model_that_is_parallel_already_is_refused(pool: Pool, plan: str) -> None:
    for wrapper, module in pool.run(_parallel_already, plan, world_size=2):
        assert wrapper == "the model is parallel already (a ParallelModel)"
        kind = "FSDPTinyGPT" if "shard" in plan else "DistributedDataParallel"
        assert module == f"the model is parallel already (a {kind})"


def test_a_model_made_in_inference_mode_is_refused_and_its_values_are_not() -> None:
    with torch.inference_mode():
        model = nn.Linear(4, 4)
    with pytest.raises(ModelError, match=r"`weight` was made in inference mode"):
        require_plain(model)
    anew = nn.Linear(4, 4)
    anew.load_state_dict(model.state_dict())
    require_plain(anew)


class Slicing(nn.Module):
    """Returns a part of its input beside its output; or a copy of that part."""

    def __init__(self, *, copies: bool) -> None:
        super().__init__()
        self.layer, self.copies = nn.Linear(64, 16), copies

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        part = x.flatten(1)[:, :1]
        return self.layer(x.flatten(1)), part.clone() if self.copies else part


class Sliced(nn.Module):
    def __init__(self, *, copies: bool) -> None:
        super().__init__()
        self.first, self.second = Slicing(copies=copies), nn.Linear(16, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x, part = self.first(x)
        out: Tensor = self.head(self.second(x) * part)
        return out


def _staged(copies: bool) -> tuple[str, ...]:
    """The refusal of a pipeline, and its smallest change."""
    case = Case(partial(Sliced, copies=copies), CASES["resnet-group-norm"].batch)
    try:
        spread(case, "pp=2 schedule=1f1b microbatches=2 stages=second")
    except (ModelError, RankError) as error:
        return error.what, *error.hints
    return ("applied",)


@pytest.mark.dist
def test_a_stage_that_cannot_be_sent_what_it_needs_is_refused_before_any_step(pool: Pool) -> None:
    _, second = pool.run(_staged, False, world_size=2)
    assert second == (
        "`first` returns a part of the batch or of a buffer, which cannot be sent to stage 1,"
        " after it",
        "let it return its `.clone()`",
    )
    assert pool.run(_staged, True, world_size=2) == [("applied",)] * 2
