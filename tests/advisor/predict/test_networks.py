"""Networks on images in the cost model: dtypes, stages and recompute."""

from __future__ import annotations

import pytest

from advisor.predict.networks import network_case
from advisor.predict.resolve import resolve
from advisor.predict.rows import TableRow
from advisor.predict.setup import Setup
from engines.plan import Precision, Recompute, Schedule
from profiles.model.profile import Numerics
from profiles.model.work import FusibleKind


def setup(**cells: object) -> Setup:
    given: dict[str, object] = {
        "row_id": "row",
        "framework": "PyTorch",
        "source_date": "2022-06",
        "model_name": "resnet50-224px",
        "arch": "resnet",
        "gpu_type": "V100-SXM2-16GB",
        "gpus_per_node": 8,
        "n_gpus": 1,
        "dtype": "fp32",
        "microbatch": 64,
        "recompute": "none",
    }
    resolved = resolve(TableRow(**{**given, **cells}))  # type: ignore[arg-type]
    assert isinstance(resolved, Setup)
    return resolved


@pytest.mark.parametrize(
    ("device", "dtype", "products"),
    [
        ("GTX-1080Ti-11GB", "fp16", "float32"),  # a 64th of the fp32 rate in 16 bits
        ("RTX-3090-24GB", "tf32", "float32"),  # 35.6 TFLOP/s either way
        ("A100-SXM-40GB", "fp32", "tfloat32"),
        ("V100-SXM2-16GB", "fp16", "float16"),
    ],
)
def test_products_run_in_the_fastest_dtype_of_the_device(
    device: str, dtype: str, products: str
) -> None:
    case = network_case(setup(gpu_type=device, dtype=dtype))
    assert case.stack.product_dtype == products
    # Feature maps are transposed for matrix units only.
    assert (FusibleKind.LAYOUT in case.stack.fused) == (products == "float32")
    assert case.plan["precision"] is (Precision.BF16 if dtype == "fp16" else Precision.FP32)


def test_a_pipeline_with_recompute_saves_inputs_of_stages_only() -> None:
    row = {"pp": 2, "n_gpus": 2, "recompute": "full", "pp_schedule": "gpipe", "grad_accum": 4}
    case = network_case(setup(**row, microbatch=8, global_batch=32))
    assert case.plan["schedule"] is Schedule.GPIPE
    assert case.plan["recompute"] is Recompute.FULL
    (border,) = case.plan["stages"]
    names = [unit.name for unit in case.model.units]
    at = names.index(border)
    again = [unit.cost(Numerics.AS_BUILT) for unit in case.model.units]
    plain = [unit.cost(Numerics.AS_BUILT) for unit in network_case(setup()).model.units]
    saved = [cost.input_bytes.at(8) > 0 for cost in again]
    assert [n for n, is_saved in enumerate(saved) if is_saved] == [0, at]
    # During the backward of a stage's last block the activations of all blocks before it are alive.
    extra = again[at - 1].backward_transient_bytes.per_sample
    extra -= plain[at - 1].backward_transient_bytes.per_sample
    activations = sum(cost.activation_bytes.per_sample for cost in plain[: at - 1])
    assert extra == pytest.approx(activations, rel=1e-9)
