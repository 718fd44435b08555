"""Memory that was published elsewhere, which no constant was fitted on.

pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, Tables 1 to 5, and
llama3-8b_h200_202506_trainy-whitefiber.md: GiB of the fullest device, as it reports them reserved.
huggingface.co/nanotron/old_bench, llama-1B, log_metrics.csv: MiB that the allocator peaked at.
"""

from __future__ import annotations

import pytest

from advisor.predict.prediction import predict
from advisor.predict.rows import row_of

H100 = {
    "row_id": "x", "source": "torchtitan", "source_date": "2024-12", "arch": "llama",
    "model_name": "llama-3-8b", "seq_len": "8192", "gpu_type": "H100-SXM-96GB",
    "gpus_per_node": "8", "dtype": "bf16", "zero_stage": "3", "attention": "sdpa", "tp": "1",
    "pp": "1",
}  # fmt: skip
ONE = {"n_gpus": "8", "dp": "8", "microbatch": "2", "global_batch": "16"}
MANY = {"n_gpus": "128", "dp": "128", "microbatch": "2", "global_batch": "256"}
LONG = {"dtype": "fp8", "compile": "y", "recompute": "full", "microbatch": "1"}
TWO_D = {
    "model_name": "llama-3-70b", "n_gpus": "256", "dp": "32", "tp": "8", "global_batch": "512",
    "dtype": "fp8", "compile": "y", "recompute": "full", "microbatch": "16",
}  # fmt: skip
THREE_D = {
    "model_name": "llama-3-405b", "n_gpus": "512", "dp": "8", "tp": "8", "pp": "8", "dtype": "fp8",
    "compile": "y", "recompute": "full", "microbatch": "4", "global_batch": "256",
}  # fmt: skip
H200 = {
    "gpu_type": "H200-SXM", "source_date": "2025-06", "n_gpus": "32", "dp": "32", "dtype": "fp8",
    "compile": "y", "recompute": "selective", "microbatch": "2", "global_batch": "64",
}  # fmt: skip


@pytest.mark.parametrize(
    ("cells", "published", "within"),
    [
        ({**ONE, "recompute": "selective"}, 82.4, 0.05),
        ({**MANY, "recompute": "selective"}, 67.0, 0.05),
        ({**LONG, "n_gpus": "8", "dp": "8", "seq_len": "32768", "global_batch": "8"}, 83.9, 0.05),
        (
            {**LONG, "n_gpus": "8", "dp": "2", "cp": "4", "seq_len": "131072", "global_batch": "2"},
            84.0,
            0.05,
        ),
        (TWO_D, 71.9, 0.05),
        ({**THREE_D, "pp_schedule": "1f1b"}, 82.5, 0.12),
        ({**THREE_D, "pp_schedule": "interleaved_1f1b", "virtual_stages": "2"}, 72.7, 0.12),
        (H200, 48.0, 0.2),
    ],
)
def test_tables_that_no_constant_saw_are_met(
    cells: dict[str, str], published: float, within: float
) -> None:
    predicted = predict(row_of({**H100, **cells})).predicted_reserved_gib
    assert predicted == pytest.approx(published, rel=within)


@pytest.mark.parametrize(
    ("dp", "tp", "pp", "published_mib"), [(2, 4, 1, 25808), (1, 4, 2, 25707), (1, 8, 2, 16550)]
)
def test_logs_of_a_program_with_gathered_inputs_are_met(
    dp: int, tp: int, pp: int, published_mib: int
) -> None:
    """huggingface/bench_cluster's llama-1B, eight sequences of 4096 at a time, 1024 a step."""
    cells = {
        **H100, "source": "nanotron", "source_date": "2024-07", "model_name": "llama-1b",
        "n_layers": "24", "hidden": "2048", "n_heads": "32", "n_kv_heads": "32",
        "ffn_hidden": "4096", "vocab": "50257", "seq_len": "4096", "gpu_type": "H100-SXM-80GB",
        "zero_stage": "1", "recompute": "none", "microbatch": "8", "global_batch": "1024",
        "n_gpus": str(dp * tp * pp), "dp": str(dp), "tp": str(tp), "pp": str(pp),
    }  # fmt: skip
    predicted = predict(row_of(cells)).predicted_peak_mem_gib
    assert predicted == pytest.approx(published_mib / 1024, rel=0.15)


def test_a_blank_recompute_is_torchtitans_own_then_what_fits() -> None:
    blank = predict(row_of({**H100, **ONE}))
    selective = predict(row_of({**H100, **ONE, "recompute": "selective"}))
    assert blank.predicted_peak_mem_gib == selective.predicted_peak_mem_gib
    # 15 GiB of states and 62 of selected outputs and a loss of 47: only whole layers are left.
    long = predict(row_of({**H100, **ONE, "seq_len": "32768", "microbatch": "1"}))
    assert "recompute full, the least that fits" in long.note
    assert long.predicted_fits
