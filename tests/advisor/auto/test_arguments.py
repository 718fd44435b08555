"""Arguments of `advise` and `auto_parallelize` in every form, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from advisor import advise, auto_parallelize, deferred
from advisor.auto.arguments import cluster_of, optimizer_of
from profiles.errors import AdvisorError, InputError, ModelError
from tests.engines.cases import CASES, cpu_ranks, token_loss


def test_an_optimizer_by_name_is_that_of_torch_with_its_defaults() -> None:
    assert optimizer_of("AdamW") is torch.optim.AdamW
    assert optimizer_of("sgd") is torch.optim.SGD
    assert optimizer_of(None) is None


def test_a_cluster_by_name_and_this_machine() -> None:
    named = cluster_of("2x8xH100-SXM-80GB")
    assert named is not None
    assert named.world_size == 16
    assert cluster_of("auto") is None


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"optimizer": "adamww"}, r"unknown optimizer `adamww`[\s\S]*did you mean `adamw`"),
        ({"optimizer": 3}, 'optimizer is an int[\\s\\S]*give "adamw"'),
        ({"cluster": 8}, r"a number of devices does not say which[\s\S]*8xH100-SXM-80GB"),
        ({"loss_fn": "mse"}, "loss_fn is a str, it must be callable"),
        ({"plan": 8}, 'plan is an int[\\s\\S]*give "dp_shard=8"'),
        ({"stack": 8}, "stack is an int[\\s\\S]*advise explain stacks"),
        ({"anchor": 8}, "anchor is an int[\\s\\S]*advise check --anchor"),
        ({"batch_dims": 0.5}, "batch_dims is a float[\\s\\S]*a number for each value"),
        ({"sample": None}, "a NoneType is not a batch"),
        ({"sample": ()}, "the batch holds no tensor"),
        (
            {"sample": (torch.ones(0, 12).long(), torch.ones(0, 12).long())},
            "the sample has no rows",
        ),
    ],
)
@pytest.mark.parametrize("call", [advise, auto_parallelize])
def test_an_argument_of_another_kind_says_what_to_give(
    call: Any, argument: dict[str, Any], message: str
) -> None:
    case = CASES["gpt"]
    given = {"sample": case.batch(2), "loss_fn": token_loss, "cluster": cpu_ranks(1), **argument}
    with pytest.raises(InputError) as caught:
        call(case.build(), **given)
    caught.match(message)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"loss_weight": 2}, "loss_weight is an int, it must be callable"),
        ({"outer_optimizer": "sgd"}, "outer_optimizer is a str, it must be callable"),
        ({"offload_folder": 0.5}, "offload_folder is a float[\\s\\S]*fast local disk"),
        ({"on_nonfinite": 7}, r"unknown reaction `7`[\s\S]*stop, skip, ignore"),
        ({"seed": "x"}, "`seed` wants a whole number of 64 bits, not `x`"),
        ({"seed": 2**64}, "`seed` wants a whole number of 64 bits"),
        ({"max_grad_norm": True}, "`max_grad_norm` wants a number, not True"),
        ({"global_batch_size": True}, "`global_batch_size` wants a number, not True"),
        ({"timeout_s": True}, "`timeout_s` wants a number above 0"),
        ({"learns": "no"}, "`learns` is a str, it must be True or False"),
        ({"precision": ""}, "unknown precision ``"),
    ],
)
def test_a_setting_of_another_kind_is_refused_before_the_training(
    argument: dict[str, Any], message: str
) -> None:
    case = CASES["gpt"]
    given = {"sample": case.batch(2), "loss_fn": token_loss, "cluster": cpu_ranks(1), **argument}
    with pytest.raises(InputError) as caught:
        auto_parallelize(case.build(), **{"learns": False, **given}, plan="")
    caught.match(message)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("gpt", "a torch.nn.Module is wanted, this is a str"),
        (nn.Linear, r"the model's function wants arguments[\s\S]*lambda: Model\(config\)"),
        (lambda: 3, "the model's function returns an int, no torch.nn.Module"),
    ],
)
def test_what_is_no_model_and_builds_none_is_refused(model: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        auto_parallelize(model, sample=CASES["gpt"].batch(2))


def test_a_function_in_place_of_a_model_is_called_without_memory_for_parameters() -> None:
    case, seen = CASES["gpt"], []

    def build() -> nn.Module:
        model = case.build()
        seen.extend(parameter.is_meta for parameter in model.parameters())
        return model

    options: Any = {"sample": case.batch(2), "loss_fn": token_loss, "cluster": cpu_ranks(1)}
    assert advise(build, **options).plan == advise(case.build(), **options).plan
    one = auto_parallelize(build, **options, learns=False, seed=5)
    assert seen
    assert all(seen)
    with deferred():
        model = case.build()
    other = auto_parallelize(model, **options, learns=False, seed=5)
    assert torch.equal(one.train_step(case.batch(2)), other.train_step(case.batch(2)))
    weights = case.build().state_dict()
    loaded = auto_parallelize(build, **options, learns=False, weights=weights).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())


class Loose(nn.Linear):
    """A parameter that its constructor alone can make."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.scale


class Detached(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).detach()


@pytest.mark.parametrize(
    ("model", "loss_fn", "message"),
    [
        (
            Detached(4, 4),
            F.mse_loss,
            "the loss has no gradient for any of the 2 trained parameters",
        ),
        (nn.Linear(4, 4), lambda o, t: (o - t).square(), r"the loss is \(2, 4\), it must be one"),
        (nn.Linear(4, 4), lambda o, t: 1.0, "the loss is float, it must be one number"),
        (
            Loose().to("meta"),
            F.mse_loss,
            "left `scale` without values|`scale` is on the meta device",
        ),
        (nn.Linear(4, 4).requires_grad_(False), F.mse_loss, "there is nothing to train"),
    ],
)
def test_a_training_that_cannot_learn_is_refused_before_its_first_step(
    model: nn.Module, loss_fn: Any, message: str
) -> None:
    sample = torch.ones(2, 4), torch.ones(2, 4)
    with pytest.raises(AdvisorError, match=message):
        auto_parallelize(model, sample=sample, loss_fn=loss_fn, cluster=cpu_ranks(1), learns=False)


@pytest.mark.parametrize("plan", [None, "dp_shard=4", {"dp_replicate": 4}, "tp=2", "pp=2", "pp=4"])
def test_the_global_batch_is_the_sample_times_the_devices_under_every_plan(plan: Any) -> None:
    case = CASES["gpt"]
    decision = advise(
        case.build(), sample=case.batch(2), loss_fn=token_loss, cluster=cpu_ranks(4), plan=plan
    )
    assert decision.plan.global_batch_size == 8
