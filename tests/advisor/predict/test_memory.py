"""Memory of rows: closed forms of the literature, and monotonicity."""

from __future__ import annotations

import csv

import pytest

from advisor.cost import CostModel
from advisor.cost.load.unit_load import UnitLoad
from advisor.predict.case import Case, case_of
from advisor.predict.prediction import predict_setup
from advisor.predict.resolve import resolve
from advisor.predict.rows import row_of
from advisor.predict.setup import Setup
from tests.scorecard.published import FOLDER

GIB = 2**30
ANALYTIC = FOLDER.parent / "reference" / "activation_memory_analytic.csv"
# "22B" of arXiv 2205.05198, Table 3; its sequences have 2048 tokens.
BASE = {
    "row_id": "x", "source": "megatron", "source_date": "2022-03", "arch": "dense_gpt",
    "n_layers": "48", "hidden": "6144", "n_heads": "64", "vocab": "51200", "seq_len": "2048",
    "gpu_type": "A100-SXM-80GB", "n_gpus": "8", "gpus_per_node": "8", "dtype": "bf16", "dp": "1",
    "tp": "8", "pp": "1", "microbatch": "4", "grad_accum": "1", "recompute": "none",
    "sequence_parallel": "n", "attention": "unfused", "stack": "megatron-2022",
}  # fmt: skip
# s b h of the base setup, and 5 a s / h.
SBH = 2048 * 4 * 6144
SCORES = 5 * 64 * 2048 / 6144


def setup_of(**cells: object) -> Setup:
    setup = resolve(row_of({**BASE, **{key: str(value) for key, value in cells.items()}}))
    assert isinstance(setup, Setup), setup.reason
    return setup


def case(**cells: object) -> Case:
    return case_of(setup_of(**cells))


def block(**cells: object) -> UnitLoad:
    """Return the load of the first transformer layer on one rank."""
    layout = case(**cells)
    loads = CostModel(layout.facts).loads(layout.plan)
    return next(unit for unit in loads.runs if unit.is_block)


def test_a_layer_saves_the_bytes_of_korthikanti_without_parallelism() -> None:
    assert block(tp=1, dp=8).activation_bytes == pytest.approx(SBH * (34 + SCORES))


def test_tensor_parallelism_leaves_norms_and_dropout_whole() -> None:
    assert block(tp=8).activation_bytes == pytest.approx(SBH * (10 + 24 / 8 + SCORES / 8))


def test_sequence_parallelism_divides_the_rest_too() -> None:
    activations = block(sequence_parallel="y").activation_bytes
    assert activations == pytest.approx(SBH / 8 * (34 + SCORES))


def test_selective_recompute_drops_the_scores_and_full_recompute_all_but_the_input() -> None:
    layer = block(sequence_parallel="y")
    assert layer.selective_bytes == pytest.approx(SBH / 8 * 34)
    assert block().input_bytes == 2 * SBH


def test_flash_attention_saves_one_sum_per_head_and_token() -> None:
    activations = block(tp=1, dp=8, attention="flash").activation_bytes
    assert activations == pytest.approx(SBH * 34 + 4 * 2048 * 4 * 64)


@pytest.mark.skipif(not ANALYTIC.is_file(), reason=f"no {ANALYTIC}")
@pytest.mark.parametrize("model", ["22B", "175B", "530B", "1T"])
def test_states_and_activations_of_the_first_stage_equal_korthikantis_figures(model: str) -> None:
    """Figure 1 of arXiv 2205.05198: 18 bytes a parameter, and activations of p microbatches."""
    with ANALYTIC.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == model]
    for row in rows:
        if row["variant"] != "no_recompute_no_sp" or row["unit"] != "GiB":
            continue
        pp, tp = int(row["pp"]), int(row["tp"])
        cells = {
            "n_layers": row["n_layers"], "hidden": row["hidden"], "n_heads": row["n_heads"],
            "tp": tp, "pp": 1, "n_gpus": tp, "microbatch": row["microbatch"],
        }  # fmt: skip
        each = block(**cells)
        layers = int(row["n_layers"]) / pp
        if row["quantity"].startswith("activations"):
            # Interleaving with m chunks saves L (1 + (p - 1) / (p m)) layers (section 4.2.3).
            chunks = float(row["virtual_stages"] or 1)
            count = (
                int(row["n_layers"]) * (1 + (pp - 1) / (pp * chunks))
                if chunks > 1
                else (int(row["n_layers"]))
            )
            activations_gib = count * each.activation_bytes / GIB
            assert activations_gib == pytest.approx(float(row["value"]), rel=0.03)
        else:
            # The paper's figure leaves the embedding out or in by a few per cent.
            states = layers * each.parameter_bytes / 4 * 18 / GIB
            assert states == pytest.approx(float(row["value"]), rel=0.06)


def test_states_follow_the_stack_and_the_zero_stage() -> None:
    """16 bytes a parameter where gradients have 2 (arXiv 1910.02054, section 3.1): 2 + 2 + 12 / n
    with ZeRO-1, 2 + (2 + 12) / n with ZeRO-2, 16 / n with ZeRO-3."""
    cells = {"tp": 1, "dp": 8, "stack": "deepspeed", "n_layers": 12, "hidden": 2048, "n_heads": 16}
    for zero, expected in ((0, 16.0), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)):
        sharded = case(**cells, zero_stage=zero)
        memory = sharded.estimate().memory
        parameters = sharded.facts.model.parameters
        states = memory.parameters + memory.gradients + memory.optimizer
        assert states / parameters == pytest.approx(expected, rel=1e-6), zero


def test_more_layers_or_longer_sequences_never_take_less() -> None:
    base = predict_setup(setup_of()).predicted_peak_mem_gib
    assert base is not None
    for change in ({"n_layers": 56}, {"seq_len": 4096}, {"microbatch": 8}, {"vocab": 102400}):
        more = predict_setup(setup_of(**change)).predicted_peak_mem_gib
        assert more is not None
        assert more > base


def test_the_first_of_the_stages_holds_most_microbatches() -> None:
    cost = case(tp=1, pp=4, dp=2, grad_accum=8, microbatch=1).estimate()
    activations = {stage.rank: stage.peak_bytes for stage in cost.stages}
    assert max(activations, key=activations.__getitem__) == 0
