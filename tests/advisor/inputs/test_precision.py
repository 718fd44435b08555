"""Default precision: bf16 where the device has units for it, but never for a training."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from advisor import advise
from advisor.auto.facts_from_module import facts_from_module
from advisor.cli.main import cli
from advisor.decide.decision import Decision
from advisor.inputs.precision import hint, reduced_precision
from profiles.machine import catalogue
from profiles.machine.clusters import resolve_cluster
from tests.factories import exact, gpu


def plan(model: str, cluster: str, *options: str) -> Decision:
    asked = ["plan", model, "--cluster", cluster, "--global-batch", "64", *options, "--json"]
    run = CliRunner().invoke(cli, asked)
    assert run.exit_code == 0, run.stderr
    return Decision.from_json(run.stdout)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("H100-SXM-80GB", "bf16"),
        ("A100-SXM-40GB", "bf16"),
        ("RTX-3090-24GB", "bf16"),
        ("MI300X", "bf16"),
        # Compute capability 6.0, 7.0 and 7.5: bfloat16 is emulated.
        ("P100-16GB", "fp16"),
        ("V100-SXM2-16GB", "fp16"),
        ("T4-16GB", "fp16"),
        # 6.1: float16 at 1/64 of the rate.
        ("P40-24GB", None),
        # AMX multiplies bfloat16 faster, but a processor's model stays as it is built.
        ("Xeon-8488C-CPU", None),
    ],
)
def test_units_for_16_bits_are_those_of_the_data_sheets(name: str, precision: str | None) -> None:
    device = catalogue.accelerator(name)
    assert reduced_precision(device) == precision


def test_a_timed_device_that_emulates_bf16_has_no_units_for_it() -> None:
    emulated = {"float32": exact(14e12), "bfloat16": exact(9e12)}
    device = gpu().model_copy(update={"flop_per_s": emulated})
    assert reduced_precision(device) is None


def test_bf16_is_planned_where_the_device_has_units_and_fp32_is_priced() -> None:
    decision = plan("gpt-125m", "1x8xH100-SXM-80GB")
    assert decision.plan.precision == "bf16"
    assert "precision" not in decision.facts.workload.given
    (line,) = [s for s in decision.suggestions if "as no precision was named" in s]
    plain = plan("gpt-125m", "1x8xH100-SXM-80GB", "--precision", "fp32")
    times = plain.estimate.step_s / decision.estimate.step_s
    # 989 against 67 TFLOP/s; what is bound by memory or launches gains less.
    assert 2 < times < 989 / 67
    assert f"({times:.1f} times as long)" in line
    assert not [s for s in plain.suggestions if "fp32" in s]


def test_auto_plans_fp16_where_the_device_has_units_for_it_alone() -> None:
    decision = plan("gpt-125m", "1x8xV100-SXM2-32GB", "--precision", "auto")
    assert decision.plan.precision == "fp16"
    plain = plan("gpt-125m", "1x8xV100-SXM2-32GB")
    assert plain.plan.precision == "fp32"
    assert any("`--precision fp16`) keeps fp32 masters, and sc" in s for s in plain.suggestions)
    # 125 against 15.7 TFLOP/s; what is bound by memory or launches gains less.
    assert 2 < plain.estimate.step_s / decision.estimate.step_s < 125 / 15.7


@pytest.mark.parametrize("cluster", ["1x8xV100-SXM2-32GB", "1x4xT4-16GB", "1x2xXeon-8488C-CPU"])
def test_without_units_for_bf16_a_model_is_planned_as_it_is_built(cluster: str) -> None:
    decision = plan("gpt-125m", cluster)
    assert decision.plan.precision == "fp32"
    assert not [s for s in decision.suggestions if "bf16" in s]


def test_the_loss_scale_costs_a_pass_over_the_gradients() -> None:
    """Of 8 bytes a parameter, all that differs on a device that multiplies both as fast."""
    fp16, bf16 = (
        plan("gpt-125m", "1xA100-SXM-80GB", "--precision", name) for name in ("fp16", "bf16")
    )
    assert fp16.plan.model_copy(update={"precision": "bf16"}) == bf16.plan
    more = fp16.estimate.step_s - bf16.estimate.step_s
    bandwidth = bf16.facts.cluster.device.memory_bandwidth_bytes_per_s.value
    least = 8 * bf16.facts.model.parameters / bandwidth
    assert least <= more < 1.5 * least


def test_a_training_on_fp16_units_stays_in_fp32_and_is_told() -> None:
    module, sample = nn.Linear(256, 256), (torch.zeros(8, 256), torch.zeros(8, 256))
    cluster = resolve_cluster("1x8xV100-SXM2-32GB")
    facts = facts_from_module(module, sample, loss_fn=loss, cluster=cluster)
    assert facts.workload.precision == "fp32"
    auto = facts_from_module(module, sample, loss_fn=loss, cluster=cluster, precision="auto")
    assert (auto.workload.precision, hint(auto)) == ("fp16", None)
    assert hint(facts) == (
        "planned in fp32, as the model is built; V100-SXM2-32GB does 125 TFLOP/s in fp16 and 15.7"
        ' TFLOP/s in fp32: `precision="fp16"` (`--precision fp16`) keeps fp32 masters, and scales'
        " the loss"
    )


class NoBf16(nn.Module):
    """A layer that raises an error where its weight is not float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.layer.weight.dtype is not torch.float32:
            raise TypeError("float32 alone")
        return self.layer(x)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.float() - target).square().mean()


def test_advise_plans_bf16_and_a_training_stays_as_it_is_built() -> None:
    module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    sample = (torch.zeros(8, 256), torch.zeros(8, 256))
    cluster = resolve_cluster("1x8xH100-SXM-80GB")
    assert advise(module, sample=sample, loss_fn=loss, cluster=cluster).plan.precision == "bf16"
    # What `auto_parallelize` decides from.
    assert (
        facts_from_module(module, sample, loss_fn=loss, cluster=cluster).workload.precision
        == "fp32"
    )
    named = advise(module, sample=sample, loss_fn=loss, cluster=cluster, precision="fp32")
    assert named.plan.precision == "fp32"
    pinned = advise(module, sample=sample, loss_fn=loss, cluster=cluster, plan="precision=fp32")
    assert pinned.plan.precision == "fp32"


def test_a_model_that_does_not_run_in_bf16_is_planned_as_built() -> None:
    sample = (torch.zeros(8, 8), torch.zeros(8, 8))
    decision = advise(NoBf16(), sample=sample, loss_fn=loss, cluster="1x8xH100-SXM-80GB")
    assert decision.plan.precision == "fp32"
    assert any("planned in fp32" in line for line in decision.suggestions)


def test_the_json_of_the_command_keeps_the_suggestions() -> None:
    asked = ["plan", "gpt-125m", "--cluster", "1x8xH100-SXM-80GB", "--global-batch", "64", "--json"]
    saved = json.loads(CliRunner().invoke(cli, asked).stdout)
    assert any("--precision fp32" in line for line in saved["suggestions"])
