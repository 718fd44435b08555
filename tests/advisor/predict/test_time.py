"""Seconds of a step, against closed forms and published runs."""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import fields, replace
from pathlib import Path
from statistics import median

import pytest

from advisor.predict.basis import PLAIN_MODULES, basis_of
from advisor.predict.constants import CONSTANTS
from advisor.predict.generations import power_share
from advisor.predict.ranges import time_range
from advisor.predict.resolve import resolve
from advisor.predict.rows import row_of
from advisor.predict.setup import Setup
from advisor.predict.time import step_time, time_of
from advisor.predict.work import work_of
from profiles.catalogue import accelerator
from tests.advisor.predict.test_resolve import CELLS, setup_of

ALONE = {"n_gpus": "8", "dp": "1", "tp": "8", "pp": "1", "global_batch": "1"}


def test_products_count_the_flop_of_the_published_formula() -> None:
    # 72 B s L h^2 (1 + s / 6h + V / 12 L h) forward and backward: arXiv 2104.04473, equation 3.
    work = work_of(setup_of(**ALONE))
    forward = sum(p.flop * count for layer, count in work.layers for p in layer.products)
    forward += sum(p.flop for p in work.head.products)
    s, layers, h, vocab = 2048, 96, 12288, 51200
    published = 72 * s * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h))
    assert 3 * forward * 8 == pytest.approx(published, rel=1e-6)


def test_attention_that_keeps_no_scores_leaves_out_what_it_masks() -> None:
    kept = work_of(setup_of(attention="unfused", **ALONE)).layers[0][0]
    flash = work_of(setup_of(attention="flash", **ALONE)).layers[0][0]
    both = sum(p.flop for p in kept.products if not p.linear)
    assert flash.flash_flop == pytest.approx(both / 2)
    assert flash.score_bytes == 0 < kept.score_bytes


def test_ranks_of_a_tensor_group_hold_equal_parts() -> None:
    # 12 h^2 a layer and the embedding, over 8 ranks.
    held = work_of(setup_of(**ALONE)).parameters
    assert held == pytest.approx((96 * 12 * 12288**2 + 51200 * 12288) / 8)


def test_parts_add_up_to_the_step() -> None:
    time = time_of(setup_of())
    assert sum(getattr(time, field.name) for field in fields(time)) == pytest.approx(time.step_s)


def test_filling_a_pipeline_takes_what_the_textbook_says() -> None:
    # (p - 1) / m of the ideal time, (p - 1) / (v m) interleaved; links as fast as nothing.
    setup = setup_of(vocab="128", global_batch="256")
    basis = replace(basis_of(setup), boundary_s=0.0)
    time = step_time(basis, CONSTANTS)
    ideal = time.compute_s + time.recompute_s + time.tensor_s
    assert time.bubble_s / ideal == pytest.approx(7 / 32, rel=0.02)
    chunks = step_time(replace(basis, virtual=4), CONSTANTS)
    assert chunks.bubble_s == pytest.approx(time.bubble_s / 4, rel=0.01)


def test_recompute_costs_a_third_of_what_it_repeats() -> None:
    # Forward once more beside forward and a backward of two: 1/3 of the products.
    again = time_of(setup_of(recompute="full"))
    assert again.recompute_s == pytest.approx(again.compute_s / 3, rel=0.08)
    assert time_of(setup_of(recompute="none")).recompute_s == 0


def test_updates_of_split_states_shrink_with_the_replicas() -> None:
    whole = time_of(setup_of(zero_stage="0"))
    split = time_of(setup_of(zero_stage="1"))
    assert split.update_s == pytest.approx(whole.update_s / 8)


def test_sizes_off_the_line_are_slower() -> None:
    # 14,400 over 8 ranks is 1,800, no multiple of 64; 14,336 over 8 is 1,792, one.
    odd = time_of(setup_of(hidden="14400", n_heads="72"))
    even = time_of(setup_of(hidden="14336", n_heads="112"))
    assert odd.compute_s > 1.2 * even.compute_s


# arXiv 2104.04473, Table 1 (end-to-end iteration) and arXiv 2205.05198, Table 5; llm-foundry's
# benchmarking README (tokens a second and device at 8 x 2048 tokens).
@pytest.mark.parametrize(
    ("cells", "seconds"),
    [
        ({"n_gpus": "64", "dp": "1", "global_batch": "64", "recompute": "full",
          "pp_schedule": "interleaved_1f1b", "virtual_stages": "3",
          "source_date": "2022-05"}, 18.13),
        ({"n_gpus": "64", "dp": "1", "global_batch": "64", "recompute": "selective",
          "pp_schedule": "interleaved_1f1b", "virtual_stages": "3", "sequence_parallel": "y",
          "source_date": "2022-05"}, 13.75),
        ({"n_layers": "128", "hidden": "25600", "n_heads": "160", "n_gpus": "512", "dp": "1",
          "pp": "64", "global_batch": "512", "recompute": "full",
          "source_date": "2022-05"}, 94.42),
    ],
)  # fmt: skip
def test_published_steps_are_met(cells: dict[str, str], seconds: float) -> None:
    assert time_of(setup_of(**cells)).step_s == pytest.approx(seconds, rel=0.15)


def test_a_fit_may_move_any_constant_and_the_step_follows() -> None:
    faster = step_time(basis_of(setup_of()), replace(CONSTANTS, sustained=2 * CONSTANTS.sustained))
    assert faster.step_s < time_of(setup_of()).step_s


def test_ranges_are_wider_for_devices_that_nobody_timed() -> None:
    def width(device: str) -> float:
        span = time_range(setup_of(gpu_type=device, dtype="bf16"), 1.0)
        return span.high - span.low

    assert width("MI300X") > width("A100-SXM-80GB")


def test_operators_recomputed_selectively_cost_less_than_layers() -> None:
    cells = {"source": "torchtitan", "zero_stage": "3", "dp": "512", "tp": "1", "pp": "1"}
    some = time_of(setup_of(recompute="selective", **cells))
    whole = time_of(setup_of(recompute="full", **cells))
    assert 0 < some.recompute_s < whole.recompute_s


def test_gradients_that_are_split_leave_in_every_microbatch() -> None:
    cells = {"source": "deepspeed", "dp": "512", "tp": "1", "pp": "1", "microbatch": "1"}
    once = time_of(setup_of(zero_stage="1", global_batch="4096", **cells))
    often = time_of(setup_of(zero_stage="2", global_batch="4096", **cells))
    assert often.data_s > 2 * once.data_s


def test_a_layer_by_itself_has_no_update() -> None:
    cells = {**CELLS, **ALONE, "n_layers": "1", "vocab": "", "params_b": ""}
    setup = resolve(row_of(cells))
    assert isinstance(setup, Setup)
    assert time_of(setup).update_s == 0


def test_a_board_with_more_power_is_faster_by_as_much_where_power_is_the_limit() -> None:
    # 1400 W and 1200 W for the same 2500 TFLOP/s.
    shares = [power_share(accelerator(name)) for name in ("GB300", "GB200", "A100-SXM-80GB")]
    assert shares == pytest.approx([1400 / 1200, 1.0, 1.0])


def test_hosts_of_an_a100_take_longer_to_launch_than_those_of_an_h100() -> None:
    # A small model on one device waits for its host alone: times are as the hosts', 1.45 to 1.
    small = {"n_gpus": "1", "dp": "1", "tp": "1", "pp": "1", "n_layers": "4", "hidden": "256",
             "n_heads": "4", "ffn_hidden": "1024", "vocab": "128", "seq_len": "128",
             "params_b": "", "global_batch": "1", "recompute": "none"}  # fmt: skip
    older, newer = (
        time_of(setup_of(gpu_type=name, **small)).step_s for name in ("A100-SXM-80GB", "H100-SXM")
    )
    assert older / newer == pytest.approx(1.45, rel=0.05)


def test_a_pipeline_gathers_split_weights_once_a_step() -> None:
    cells = {"source": "torchtitan", "source_date": "2024-12", "zero_stage": "3"}
    few = time_of(setup_of(global_batch="512", **cells))
    many = time_of(setup_of(global_batch="2048", **cells))
    assert many.data_s == pytest.approx(few.data_s)


def test_plain_modules_take_the_hosts_time_that_pairs_of_runs_say(shared: Path) -> None:
    """BERT and T5 of Megatron's functional tests, run with and without its engine's layers."""
    same = (
        "arch", "n_layers", "hidden", "n_gpus", "tp", "pp", "cp", "microbatch", "global_batch",
        "seq_len", "gpu_type", "dtype", "recompute", "virtual_stages", "sequence_parallel",
        "zero_stage", "model_name",
    )  # fmt: skip
    pairs: dict[tuple[str, ...], dict[bool, list[float]]] = defaultdict(lambda: defaultdict(list))
    with (shared / "data/measured/megatron_ci_memory.csv").open() as file:
        for row in csv.DictReader(file):
            if row["arch"] in ("bert", "t5") and row["measured_step_time_s"]:
                pair = pairs[tuple(row[key] for key in same)]
                pair[row["attention"] == "unfused"].append(float(row["measured_step_time_s"]))
    ratios = [median(pair[False]) / median(pair[True]) for pair in pairs.values() if len(pair) == 2]
    assert len(ratios) >= 6
    assert median(ratios) == pytest.approx(PLAIN_MODULES, abs=0.05)
