"""Rates follow the batch: by the optimizer's rule, once, and with every group in proportion."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engines.plan import Plan
from engines.runtime.learning_rate import Rates, ScalingRule
from profiles.errors import InputError, UnknownNameError
from tests.engines.parity import alone


def groups() -> list[dict[str, object]]:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    return [{"params": first.parameters(), "lr": 0.1}, {"params": second.parameters(), "lr": 0.01}]


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def test_sgd_from_256_to_8192_is_32_times_the_rate() -> None:
    """Goyal et al. 2017: 0.1 becomes 3.2."""
    optimizer = torch.optim.SGD(groups(), momentum=0.9)
    actual = Rates(optimizer).scale(tuned_at=256, batch=8192, samples=1_281_167)
    assert rates_of(optimizer) == pytest.approx([3.2, 0.32])
    assert (actual.rule, actual.factor) == (ScalingRule.LINEAR, 32)
    assert actual.warm_up_steps == 5 * 157
    assert str(actual) == (
        "rate x 32 (linear: tuned at 256, batch 8192): 0.1 -> 3.2, 0.01 -> 0.32;"
        " warm up over 785 steps"
    )


def test_adam_rates_scale_with_the_square_root() -> None:
    optimizer = torch.optim.AdamW(groups(), betas=(0.9, 0.99))
    actual = Rates(optimizer).scale(tuned_at=64, batch=1024)
    assert rates_of(optimizer) == pytest.approx([0.4, 0.04])
    assert actual.warm_up_steps == 200  # 2 / (1 - 0.99)


def test_a_subclass_of_sgd_scales_as_sgd_and_the_rule_can_be_named() -> None:
    class Nudged(torch.optim.SGD):
        pass

    assert Rates(Nudged(groups())).scale(tuned_at=1, batch=4).factor == 4
    assert Rates(Nudged(groups())).scale(tuned_at=1, batch=4, rule="sqrt").factor == 2
    with pytest.raises(UnknownNameError, match="unknown scaling rule `linera`"):
        Rates(Nudged(groups())).scale(tuned_at=1, batch=4, rule="linera")


def test_the_noise_rule_keeps_the_noise_scale_and_needs_the_dataset_size() -> None:
    """g = eps / (1 - m) (N / B - 1): 0.1 x 99 at a batch of 10, 1.1 x 9 at 100, of 1,000."""
    optimizer = torch.optim.SGD(groups())
    Rates(optimizer).scale(tuned_at=10, batch=100, rule="noise", samples=1000)
    assert rates_of(optimizer) == pytest.approx([1.1, 0.11])
    with pytest.raises(InputError, match="depends on the size of the training set"):
        Rates(optimizer).scale(tuned_at=10, batch=100, rule="noise")


def test_the_same_call_again_changes_nothing_and_another_batch_starts_from_the_tuned_rate() -> None:
    optimizer = torch.optim.SGD(groups())
    rates = Rates(optimizer)
    for _ in range(2):
        rates.scale(tuned_at=32, batch=128)
        assert rates_of(optimizer) == pytest.approx([0.4, 0.04])
    assert rates.scale(tuned_at=32, batch=64).factor == 2
    assert rates_of(optimizer) == pytest.approx([0.2, 0.02])
    assert "warm up" not in str(rates.scale(tuned_at=32, batch=32))
    assert rates_of(optimizer) == pytest.approx([0.1, 0.01])


def test_a_second_batch_of_tuning_is_refused() -> None:
    rates = Rates(torch.optim.SGD(groups()))
    rates.scale(tuned_at=32, batch=128)
    with pytest.raises(InputError, match="tuned at batch 32, as an earlier call said"):
        rates.scale(tuned_at=128, batch=256)
    with pytest.raises(InputError, match="at least one sample"):
        rates.scale(tuned_at=32, batch=-1)
    with pytest.raises(InputError, match="at least one sample, not nan"):
        Rates(torch.optim.SGD(groups())).scale(tuned_at=float("nan"), batch=32)  # type: ignore[arg-type]


def test_a_decayed_rate_is_scaled_from_its_current_value() -> None:
    optimizer = torch.optim.SGD(groups())
    rates = Rates(optimizer)
    rates.scale(tuned_at=32, batch=64)
    for group in optimizer.param_groups:
        group["lr"] /= 10
    rates.scale(tuned_at=32, batch=128)
    assert rates_of(optimizer) == pytest.approx([0.04, 0.004])


def test_an_existing_scheduler_continues_from_the_scaled_rates() -> None:
    _, parallel = alone("lstm", optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    scheduler = torch.optim.lr_scheduler.LambdaLR(parallel.optimizer, lambda step: 0.5**step)
    parallel.scale_learning_rate(tuned_at=4, batch=16, scheduler=scheduler)
    parallel.optimizer.step()
    scheduler.step()
    assert rates_of(parallel.optimizer) == pytest.approx([0.2])  # 0.1 x 4 / 2


def test_the_batch_of_the_plan_is_the_default() -> None:
    plan = Plan.parse("microbatch_size=2 accumulation=4")
    _, parallel = alone("lstm", plan=plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    assert parallel.scale_learning_rate(tuned_at=2).batch == 8
    assert rates_of(parallel.optimizer) == pytest.approx([0.4])
    _, without = alone("lstm")
    with pytest.raises(InputError, match="the plan leaves the microbatch open"):
        without.scale_learning_rate(tuned_at=2)


def test_a_rate_that_is_a_tensor_is_changed_in_place() -> None:
    """Captured steps read that place."""
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam(nn.Linear(2, 2).parameters(), lr=rate)
    Rates(optimizer).scale(tuned_at=1, batch=4)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.2)
