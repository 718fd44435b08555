"""Host time of stages: launches counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from advisor.cost import CostModel, estimate
from advisor.cost.estimates.stage_host import CALL, PASS, SPLIT_TENSOR, ZEROS, repeated_s
from advisor.inputs.bundled.gpt import GPT, GPTConfig, loss
from engines.plan import Plan, Schedule
from profiles.capture.capture import capture
from profiles.machine.cluster import ClusterProfile
from profiles.model.profile import ModelProfile
from tests.factories import chain, cpus, exact, facts, gpus

MICROBATCHES, LAUNCH_S = 8, 1.0


def launching(ranks: int) -> ClusterProfile:
    """Processors that take a second to launch an operation, and no time for it."""
    cluster = cpus(ranks)
    fast = {"float32": exact(1e30)}
    update = {"launch_s": exact(LAUNCH_S), "flop_per_s": fast}
    update["memory_bandwidth_bytes_per_s"] = exact(1e30)
    return cluster.model_copy(update={"device": cluster.device.model_copy(update=update)})


def launches(text: str, ranks: int = 4) -> float:
    """Of the busiest rank, in a step of eight equal units with one parameter each."""
    model = facts(chain(units=8), launching(ranks), batch=MICROBATCHES, precision="fp32")
    return estimate(Plan.parse(f"{text} microbatch_size=1"), model).time.launch_s


def test_a_stage_is_charged_its_units_two_passes_and_zeros_of_each_microbatch() -> None:
    whole = launches(f"accumulation={MICROBATCHES}", ranks=1)
    for schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B):
        stage = launches(f"pp=4 schedule={schedule} microbatches={MICROBATCHES}")
        host = 2 * PASS + 2 * CALL + 6 * ZEROS  # the last has two units, after six
        assert stage == pytest.approx(whole / 4 + MICROBATCHES * host * LAUNCH_S)


def test_a_split_backward_is_charged_for_each_parameter_of_its_stage() -> None:
    plain = launches(f"pp=4 schedule=1f1b microbatches={MICROBATCHES}")
    split = launches(f"pp=4 schedule=zero_bubble microbatches={MICROBATCHES}")
    assert split - plain == pytest.approx(MICROBATCHES * 2 * SPLIT_TENSOR * LAUNCH_S)


def captured_gpt() -> ModelProfile:
    config = GPTConfig(vocab_size=64, context=16, num_layers=4, num_heads=2, width=32)
    ids = torch.zeros(4, 16, dtype=torch.long)
    return capture(GPT(config), (ids, ids), loss_fn=loss)


STAGED = Plan.parse("pp=2 schedule=gpipe stages=blocks.2 microbatch_size=1 microbatches=4")


class Gated(nn.Module):
    """Ones are made of the batch alone; two kernels stand before each layer but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        ones = torch.ones_like(x)
        first, *others = self.layers
        x = first(x)
        for layer in others:
            x = layer(torch.tanh(x) * ones)
        return x


def test_a_stage_runs_code_between_earlier_modules_again() -> None:
    rows = torch.zeros(4, 8)
    model = capture(Gated(), (rows, rows), loss_fn=nn.functional.mse_loss)
    costs = CostModel(facts(model, launching(2), batch=4, precision="fp32"))
    starts = [unit.name for unit in model.units]
    again = dict(zip(starts, repeated_s(costs, STAGED), strict=True))
    for number in (1, 2, 3):
        kernels = 1 + 2 * (number - 1) + ZEROS * number
        assert again[f"layers.{number}"] == pytest.approx(kernels * LAUNCH_S)


def test_the_host_of_an_accelerator_runs_ahead() -> None:
    costs = CostModel(facts(captured_gpt(), gpus(1, 2), batch=4, precision="fp32"))
    assert not any(repeated_s(costs, STAGED))
    model = facts(chain(units=8), gpus(1, 4), batch=MICROBATCHES, precision="fp32")
    plan = Plan.parse(f"pp=4 schedule=1f1b microbatch_size=1 microbatches={MICROBATCHES}")
    assert estimate(plan, model).time.launch_s == 0.0
