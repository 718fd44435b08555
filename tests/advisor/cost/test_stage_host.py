"""Host time of stages: launches counted by hand."""

from __future__ import annotations

import pytest
import torch

from advisor.cost import CostModel, estimate
from advisor.cost.stage_host import PASS, SPLIT_TENSOR, repeated_s
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


def test_a_stage_is_charged_its_units_and_two_passes_of_each_microbatch() -> None:
    whole = launches(f"accumulation={MICROBATCHES}", ranks=1)
    for schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B):
        stage = launches(f"pp=4 schedule={schedule} microbatches={MICROBATCHES}")
        assert stage == pytest.approx(whole / 4 + MICROBATCHES * 2 * PASS * LAUNCH_S)


def test_a_split_backward_is_charged_for_each_parameter_of_its_stage() -> None:
    plain = launches(f"pp=4 schedule=1f1b microbatches={MICROBATCHES}")
    split = launches(f"pp=4 schedule=zero_bubble microbatches={MICROBATCHES}")
    assert split - plain == pytest.approx(MICROBATCHES * 2 * SPLIT_TENSOR * LAUNCH_S)


def captured_gpt() -> ModelProfile:
    config = GPTConfig(vocab_size=64, context=16, num_layers=4, num_heads=2, width=32)
    ids = torch.zeros(4, 16, dtype=torch.long)
    return capture(GPT(config), (ids, ids), loss_fn=loss)


STAGED = Plan.parse("pp=2 schedule=gpipe stages=blocks.2 microbatch_size=1 microbatches=4")


def test_code_between_modules_is_charged_on_every_stage_after_the_first() -> None:
    model = captured_gpt()
    glue = next(unit for unit in model.units if unit.name == "(glue)")
    costs = CostModel(facts(model, launching(2), batch=4, precision="fp32"))
    kernels = glue.cost(model.numerics[0]).forward_kernels
    assert kernels > 0
    assert repeated_s(costs, STAGED) == pytest.approx(kernels * LAUNCH_S)


def test_the_host_of_an_accelerator_runs_ahead() -> None:
    costs = CostModel(facts(captured_gpt(), gpus(1, 2), batch=4, precision="fp32"))
    assert repeated_s(costs, STAGED) == 0.0
    model = facts(chain(units=8), gpus(1, 4), batch=MICROBATCHES, precision="fp32")
    plan = Plan.parse(f"pp=4 schedule=1f1b microbatch_size=1 microbatches={MICROBATCHES}")
    assert estimate(plan, model).time.launch_s == 0.0
