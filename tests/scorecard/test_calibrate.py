"""A fit finds the constants that made-up runs were made with, from a closed form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from advisor.predict.rows import TableRow
from profiles.errors import UnknownNameError
from tests.scorecard.calibrate import MOST_SETTINGS, fit, settings
from tests.scorecard.made_up import MODEL, PRIORS, Device, runs
from tests.scorecard.model import MODEL as scored
from tests.scorecard.model import Model, with_values
from tests.scorecard.published import Published
from tests.scorecard.rules import Prior, load

TRUTH = Device(flop_per_s=0.83e14, launch_s=2.3e-3, context_gib=1.4)
READING = {"nvidia-smi": ("fullest", "reserved")}.__getitem__


def test_a_fit_recovers_rate_launch_and_context() -> None:
    fitted = fit(MODEL, runs("f", TRUTH), PRIORS, READING)
    assert fitted.flop_per_s == pytest.approx(TRUTH.flop_per_s, rel=1e-3)
    assert fitted.launch_s == pytest.approx(TRUTH.launch_s, rel=1e-3)
    assert fitted.context_gib == pytest.approx(TRUTH.context_gib, rel=1e-3)
    assert fitted.fixed == Device().fixed


def test_a_fit_is_not_moved_by_a_third_of_runs_that_waited_for_data() -> None:
    slow = runs("f", TRUTH, slower=(1.0, 1.0, 3.0))
    fitted = fit(MODEL, slow, PRIORS, READING)
    assert fitted.flop_per_s == pytest.approx(TRUTH.flop_per_s, rel=0.02)


def test_runs_of_low_reliability_take_no_part() -> None:
    wrong = [replace(one, reliability="low") for one in runs("g", Device(flop_per_s=1e12))]
    fitted = fit(MODEL, runs("f", TRUTH) + wrong, PRIORS, READING)
    assert fitted.flop_per_s == pytest.approx(TRUTH.flop_per_s, rel=1e-3)


def test_constants_without_evidence_stay_at_their_prior() -> None:
    timed = [replace(one, memory_gib=None) for one in runs("f", TRUTH)]
    assert fit(MODEL, timed, PRIORS, READING).context_gib == pytest.approx(0.7)
    assert fit(MODEL, [], PRIORS, READING).flop_per_s == 2e14


def test_a_prior_of_factor_one_fixes_a_constant_and_most_bounds_it() -> None:
    priors = {**PRIORS, "launch_s": Prior(prior=TRUTH.launch_s, factor=1.0, unit="s"),
              "flop_per_s": Prior(prior=6e13, factor=3.0, unit="FLOP/s", most=7e13)}  # fmt: skip
    fitted = fit(MODEL, runs("f", TRUTH), priors, READING)
    assert fitted.launch_s == TRUTH.launch_s
    assert fitted.flop_per_s == pytest.approx(7e13, rel=1e-5)


def test_a_memory_figure_is_compared_by_its_counter() -> None:
    def allocated(metric: str) -> tuple[str, str]:
        return "fullest", "allocated"

    # The allocator does not see the context: these figures do not say what it is.
    fitted = fit(MODEL, runs("f", TRUTH), PRIORS, allocated)
    assert fitted.context_gib == pytest.approx(0.7)


def test_a_prior_without_a_constant_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="unknown constant `rate`"):
        fit(MODEL, [], {"rate": Prior(prior=1.0, factor=2.0, unit="1")}, READING)


def test_repeated_runs_are_one_setting_and_files_weigh_by_the_root_of_theirs() -> None:
    few, many = runs("f", TRUTH, count=4), runs("g", TRUTH, count=100)
    chosen = settings(few + few + many)
    weights = [weight for one, weight in chosen if one.file == "f"]
    assert weights == [0.5] * 4
    assert MOST_SETTINGS / 2 < len(chosen) - 4 <= MOST_SETTINGS


@pytest.mark.slow
def test_each_constant_of_the_scored_model_is_recovered() -> None:
    """Predictions with one constant off by a fifth, fitted from its usual value, give it back."""
    constants = [name for name, prior in load().priors().items() if prior.is_fitted]
    model, exercised = replace(scored.remembering(), most_settings=40), []
    for name in constants:
        usual = getattr(model.calibration, name)
        # Fewer slots than a rate at its cap leaves open would change nothing.
        true = usual * (1.25 if name == "vector_slots" else 0.8)
        other = with_values(model.calibration, {name: true})
        made = [_run(row, model, other) for row in ROWS]
        if all(
            one.step_s == pytest.approx(then.step_s, rel=0.01)
            and one.memory_gib == pytest.approx(then.memory_gib, rel=0.01)
            for one, then in zip(
                made, (_run(r, model, model.calibration) for r in ROWS), strict=True
            )
        ):
            continue
        exercised.append(name)
        fitted = fit(model, made, {name: Prior(prior=usual, factor=10.0, unit="any")}, READING)
        assert getattr(fitted, name) == pytest.approx(true, rel=0.02), name
    assert exercised == constants


GPT = {"model_name": "gpt", "arch": "dense_gpt", "vocab": 50304, "seq_len": 2048, "dtype": "bf16",
       "gpus_per_node": 8, "gpu_type": "A100-SXM-80GB", "gpu_mem_gb": 80, "pp": 1, "cp": 1,
       "inter_gbps_per_node": 800, "zero_stage": "1", "recompute": "none"}  # fmt: skip
ROWS = [
    TableRow(row_id=f"made up {n}", n_layers=layers, hidden=hidden, n_heads=hidden // 128,
        ffn_hidden=4 * hidden, n_gpus=n, dp=n // tp, tp=tp, microbatch=2, global_batch=8 * n,
        **GPT)  # type: ignore[arg-type]
    for n, tp, layers, hidden in ((1, 1, 12, 768), (8, 1, 24, 2048), (8, 8, 32, 4096),
                                  (64, 2, 24, 2048), (256, 8, 32, 4096))
]  # fmt: skip

# One that each of the other constants decides a part of.
_ONE = ROWS[1]
_H100 = replace(
    _ONE,
    gpu_type="H100-SXM-80GB",
    hidden=8192,
    n_heads=64,
    ffn_hidden=32768,
    n_layers=4,
    seq_len=8192,
)
_IMAGES = TableRow(
    row_id="images",
    arch="resnet",
    model_name="resnet50-224px",
    seq_len=224,
    n_gpus=1,
    dp=1,
    microbatch=64,
    global_batch=64,
    gpu_type="V100-SXM2-16GB",
    dtype="fp32",
    source="pytorch ddp",
)
ROWS += [
    replace(_ONE, row_id="early flash", attention="flash", source_date="2022-10"),
    replace(_H100, row_id="second flash", attention="flash", stack="megatron-core-0.5"),
    replace(_H100, row_id="third flash", attention="flash", stack="megatron-core-0.12"),
    replace(_ONE, row_id="flash", attention="flash", source_date="2024-01"),
    replace(_H100, row_id="experts", arch="moe", n_experts=8, moe_topk=2, moe_ffn_hidden=8192,
            ep=8),
    replace(_ONE, row_id="cards", n_gpus=16, dp=16, global_batch=32, inter_gbps_per_node=400,
            inter_link="RoCE 4x100Gb per node"),
    replace(_ONE, row_id="unaligned", hidden=2000, n_heads=20, ffn_hidden=8000),
    replace(_ONE, row_id="small", n_gpus=1, dp=1, hidden=256, n_heads=4, ffn_hidden=1024,
            n_layers=96, seq_len=128, microbatch=1, global_batch=1),
    replace(_ONE, row_id="bridge", gpu_type="RTX-3090-24GB", gpu_mem_gb=24, intra_link="PCIe4",
            n_layers=2, zero_stage="0"),
    _IMAGES,
    replace(_IMAGES, row_id="images in 16 bits", gpu_type="A100-SXM-80GB", dtype="fp16"),
    replace(_IMAGES, row_id="images on one issue", gpu_type="1080Ti-11GB", microbatch=16,
            global_batch=16),
]  # fmt: skip


def _run(row: TableRow, model: Model, constants: object) -> Published:
    predicted = model.predict(row, constants)
    assert predicted.predicted_step_time_s is not None, predicted.note
    return Published(
        file="f", row=row, reliability="high", step_s=predicted.predicted_step_time_s,
        samples_per_s=None, memory_gib=predicted.predicted_reserved_gib,
        memory_metric="nvidia-smi", oom=None,
    )  # fmt: skip
