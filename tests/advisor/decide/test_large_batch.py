"""The global batch: known limits, the documents' noise scale, and growing the batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from advisor.auto.growing_batch import GrowingBatch
from advisor.cli.main import cli
from advisor.decide.choose import choose
from advisor.decide.large_batch import (
    batch_advice,
    critical_tokens,
    noise_scale,
    steps_ratio,
)
from advisor.inputs.facts import Facts
from engines.runtime.learning_rate import ScalingRule
from profiles.errors import InputError
from profiles.workload.optimizers import OPTIMIZERS
from profiles.workload.workload import Workload
from tests.factories import chain, cpus, facts, gpus, transformer

IMAGENET = 1_281_167


def images(batch: int, **work: object) -> Facts:
    """Facts of samples that are not sequences, like images."""
    workload = Workload.build({"global_batch_size": batch, **work})
    return Facts(model=chain(), cluster=cpus(2), workload=workload)


class TestWarnings:
    @pytest.mark.parametrize(
        ("batch", "names"),
        [
            (8192, []),  # trained in an hour on 256 devices (Goyal et al. 2017)
            (8448, ["8,192 images", "256 devices", "LARS"]),
            (
                32768,
                ["8,192 images", "LARS", "RMSprop (1,024 devices"],
            ),  # in 15 minutes on 1,024 (Akiba et al. 2017)
            (65536, ["32,768 images", "1,024 devices", "loss of accuracy"]),
        ],
    )
    def test_image_batches_beyond_published_limits_warn(self, batch: int, names: list[str]) -> None:
        said = " ".join(batch_advice(images(batch)).warnings)
        assert bool(said) == bool(names)
        assert [name for name in names if name not in said] == []

    def test_token_batches_have_a_limit_of_their_own(self) -> None:
        """7.7 M tokens at a loss of 2: 2.1e8 / 2^(1/0.21) (Kaplan et al. 2020)."""
        assert critical_tokens(2.0) == pytest.approx(2.1e8 / 27.13, rel=1e-3)
        below, above = (batch_advice(facts(batch=batch)).warnings for batch in (1880, 1900))
        assert below == ()
        assert "7.78 M tokens, more than the 7.74 M" in above[0]

    def test_a_measured_critical_batch_takes_precedence(self) -> None:
        assert batch_advice(images(65536, critical_batch_size=1e6)).warnings == ()
        (said,) = batch_advice(images(512, critical_batch_size=128.0)).warnings
        # E / E_min = 1 + B / B_crit = 5; S falls from 1 + 1/4 to 1 + 1/8 of the fewest: by a tenth.
        assert "512 is 4.0 times the measured critical batch of 128" in said
        assert "5.0 times the fewest samples" in said
        assert "save 10% of the steps" in said

    def test_a_batch_larger_than_the_data_set_warns(self) -> None:
        (said,) = batch_advice(images(512, dataset_samples=500)).warnings
        assert "global batch 512 is more than the 500 samples of the training set" in said
        assert batch_advice(images(500, dataset_samples=500)).warnings == ()

    def test_the_report_shows_the_warnings(self) -> None:
        model = transformer(name="small", layers=2, hidden=256, ffn=512, vocab=100, tokens=64)
        inputs = facts(model, gpus(1, 8), batch=4096)
        work = inputs.workload.model_copy(update={"critical_batch_size": 1024.0})
        text = str(choose(inputs.model_copy(update={"workload": work})))
        assert "note: global batch 4,096 is 4.0 times the measured critical batch" in text

    def test_steps_at_the_critical_batch_are_twice_the_fewest(self) -> None:
        assert steps_ratio(1.0, 1e9) == pytest.approx(2.0)


class TestEffectiveBatch:
    def test_steps_per_epoch_of_imagenet_at_8192(self) -> None:
        """1,281,167 / 8,192 = 156.4."""
        advice = batch_advice(images(8192, dataset_samples=IMAGENET))
        assert advice.steps_per_epoch == 157
        assert next(advice.lines()) == "8192 samples a step; 157 steps per epoch"

    def test_tokens_of_sequence_models_are_counted(self) -> None:
        assert next(batch_advice(facts()).lines()) == "128 samples, 524 k tokens a step"

    @pytest.mark.parametrize(
        ("name", "rule", "words"),
        [
            ("sgd-momentum", ScalingRule.LINEAR, "B / 64"),
            ("adamw", ScalingRule.SQRT, "sqrt(B / 64)"),
        ],
    )
    def test_the_scaling_rule_is_that_of_the_optimizer(
        self, name: str, rule: ScalingRule, words: str
    ) -> None:
        advice = batch_advice(images(64, optimizer=OPTIMIZERS[name]))
        assert advice.rule is rule
        assert f"at batch B: {name}'s rate x {words}" in str(advice)

    def test_warm_up_is_five_epochs_of_sgd_and_two_thousand_steps_of_adam(self) -> None:
        sgd = images(256, optimizer=OPTIMIZERS["sgd"], dataset_samples=25_600)
        assert batch_advice(sgd).warm_up_steps == 5 * 100
        assert batch_advice(images(256)).warm_up_steps == 2000  # 2 / (1 - 0.999)


class TestNoiseScale:
    def test_equals_the_formula_of_the_documents(self) -> None:
        """0.1 / (1 - 0.9) x (50,000 / 128 - 1)."""
        assert noise_scale(0.1, momentum=0.9, samples=50_000, batch=128) == pytest.approx(389.625)
        assert noise_scale(0.1, samples=100, batch=1) == pytest.approx(9.9)

    @pytest.mark.parametrize("devices", [2, 16, 256])
    def test_stays_equal_when_the_rate_is_scaled_with_added_devices(self, devices: int) -> None:
        rate = 0.1 * ScalingRule.NOISE.factor(tuned_at=32, batch=32 * devices, samples=IMAGENET)
        before = noise_scale(0.1, momentum=0.9, samples=IMAGENET, batch=32)
        after = noise_scale(rate, momentum=0.9, samples=IMAGENET, batch=32 * devices)
        assert after == pytest.approx(before)
        # While the batch is a small part of the data: Goyal's linear rule.
        assert rate == pytest.approx(0.1 * devices, rel=0.01)

    def test_impossible_sizes_are_refused(self) -> None:
        with pytest.raises(InputError, match="from 1 to 100 samples, not 101"):
            noise_scale(0.1, samples=100, batch=101)
        with pytest.raises(InputError, match="0 <= m < 1"):
            noise_scale(0.1, momentum=1.0, samples=100, batch=10)
        with pytest.raises(InputError, match="no noise to keep"):
            ScalingRule.NOISE.factor(tuned_at=10, batch=100, samples=100)


class TestGrowingBatch:
    """The schedule of Smith et al. 2018, figure 1: a wide ResNet on 50,000 images of CIFAR-10, rate
    0.1 divided by five at epochs 60, 120 and 160, or batch 128, 640, 3,200 and 5,120 in its place.
    """

    GROWING = GrowingBatch(
        batch=128,
        learning_rate=0.1,
        factor=5,
        milestones=(60, 120, 160),
        largest=5120,
    )

    def test_grows_to_the_largest_batch_and_then_decays_the_rate(self) -> None:
        settings = [self.GROWING.at(epoch) for epoch in (0, 59, 60, 120, 160)]
        assert [setting.batch for setting in settings] == [128, 128, 640, 3200, 5120]
        assert settings[-1].learning_rate == pytest.approx(0.1 * 5120 / 16000)

    @pytest.mark.parametrize("epoch", [0, 70, 130, 190])
    def test_has_the_noise_scale_of_the_schedule_that_decays_the_rate(self, epoch: int) -> None:
        """Equal but for the part B / N, which decaying ignores: 10 % at the largest batch."""
        passed = sum(epoch >= milestone for milestone in (60, 120, 160))
        decayed = noise_scale(0.1 / 5**passed, momentum=0.9, samples=50_000, batch=128)
        now = self.GROWING.at(epoch)
        grown = noise_scale(now.learning_rate, momentum=0.9, samples=50_000, batch=now.batch)
        assert grown == pytest.approx(decayed, rel=now.batch / 50_000 + 1e-9)

    def test_takes_fewer_steps(self) -> None:
        """200 epochs: 391 steps each at 128; 60 x 391 + 60 x 79 + 40 x 16 + 40 x 10 grown."""
        assert self.GROWING.steps(samples=50_000, epochs=200) == 60 * 391 + 60 * 79 + 40 * 16 + 400
        assert self.GROWING.steps(samples=50_000, epochs=200) < 0.4 * 200 * 391

    def test_batches_are_multiples_of_the_replicas_and_the_rate_compensates(self) -> None:
        schedule = self.GROWING.model_copy(update={"factor": 3.0, "multiple": 64})
        batch, rate = schedule.at(60)
        assert batch == 384
        assert rate == pytest.approx(0.1)
        batch, rate = schedule.at(120)  # 1,152 = 18 x 64
        assert (batch, rate) == (1152, pytest.approx(0.1))
        odd = self.GROWING.model_copy(update={"factor": 2.3, "multiple": 64})
        assert odd.at(60) == (256, pytest.approx(0.1 * 2 / 2.3))  # 294 are not 64s

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"factor": 1.0}, "more than 1"),
            ({"milestones": (120, 60)}, "ascend"),
            ({"largest": 64}, "larger than 64"),
            ({"multiple": 48}, "no multiple of 48"),
        ],
    )
    def test_impossible_schedules_are_refused(self, changes: dict[str, object], said: str) -> None:
        with pytest.raises(InputError, match=said):
            GrowingBatch.build({**self.GROWING.model_dump(), **changes})


def test_the_command_prints_steps_per_epoch_and_warns_beyond_the_critical_batch(
    tmp_path: Path,
) -> None:
    """1,000,000 / 64 = 15,625 steps; 64 samples are twice the critical 32."""
    chain().save(tmp_path / "model.json")
    asked = ["--cluster", "8xH100-SXM-80GB", "--global-batch", "64"]
    asked += ["--samples", "1000000", "--critical-batch", "32"]
    run = CliRunner().invoke(cli, [str(tmp_path / "model.json"), *asked])
    assert run.exit_code == 0, run.stderr
    words = " ".join(run.stdout.split())
    assert "batch 64 samples a step; 15,625 steps per epoch" in words
    assert "note: global batch 64 is 2.0 times the measured critical batch of 32" in words
    # "you" is the source, in the other column.
    assert "1,000,000 samples in the training set, 32 you samples are the critical batch" in words
