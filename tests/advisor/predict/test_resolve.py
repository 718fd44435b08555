"""Rows become setups by rule, or a reason says why they cannot."""

from __future__ import annotations

import pytest

from advisor.predict.machines import accelerator_of
from advisor.predict.resolve import resolve
from advisor.predict.rows import row_of
from advisor.predict.setup import Refusal, Setup
from profiles.workload.stack import Selective

# GPT-3 175B on 64 nodes as tables print it.
CELLS = {
    "row_id": "x-1",
    "source": "megatron-sc21",
    "source_date": "2021-04",
    "arch": "dense_gpt",
    "n_layers": "96",
    "hidden": "12288",
    "n_heads": "96",
    "vocab": "51200",
    "seq_len": "2048",
    "gpu_type": "A100-SXM-80GB",
    "gpus_per_node": "8",
    "n_gpus": "512",
    "dtype": "fp16",
    "dp": "8",
    "tp": "8",
    "pp": "8",
    "microbatch": "1",
    "global_batch": "512",
}


def setup_of(**cells: str) -> Setup:
    setup = resolve(row_of({**CELLS, **cells}))
    assert isinstance(setup, Setup), setup
    return setup


def reason_of(**cells: str) -> str:
    refusal = resolve(row_of({**CELLS, **cells}))
    assert isinstance(refusal, Refusal)
    return refusal.reason


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"dp": "4"}, "dp=4 * tp=8 * pp=8 * cp=1 is 256, not the 512 devices"),
        ({"dp": "", "tp": "7", "pp": "1"}, "tp=7 * pp=1 * cp=1 does not divide 512 devices"),
        ({"n_heads": "90"}, "tp=8 does not divide 90 heads"),
        ({"n_layers": "6"}, "6 layers cannot be cut into pp=8 stages"),
        ({"global_batch": "4"}, "global_batch=4 leaves some of dp=8 replicas without a sample"),
        ({"gpu_type": "TPU-v4"}, "`TPU-v4`"),
        ({"gpu_type": ""}, "`gpu_type` is blank"),
        ({"dtype": "int3"}, "`dtype` is `int3`"),
        ({"hidden": "", "params_b": ""}, "`hidden` and `params_b` are blank"),
        ({"arch": "moe", "n_experts": "6", "moe_topk": "2", "ep": "4"}, "ep=4 does not divide 6"),
        ({"n_layers": "", "hidden": "1024", "n_heads": "8", "params_b": "1000"}, "79,469 layers"),
    ],
)
def test_impossible_rows_are_refused_with_numbers(cells: dict[str, str], words: str) -> None:
    assert words in reason_of(**cells)


@pytest.mark.parametrize(
    ("printed", "memory", "known"),
    [
        ("V100-SXM3-32GB", 32, "V100-SXM2-32GB"),
        ("V100-SXM2 (memory not stated)", None, "V100-SXM2-16GB"),
        ("P100 (Pascal; model not stated)", None, "P100-SXM2-16GB"),
        ("A100-SXM-40GB", 40, "A100-SXM-40GB"),
        ("A100 40GB", 40, "A100-SXM-40GB"),
        ("h100", 80, "H100-SXM-80GB"),
        ("GB300", 288, "GB300"),
    ],
)
def test_devices_are_found_by_the_names_that_tables_use(
    printed: str, memory: float | None, known: str
) -> None:
    name = accelerator_of(printed, memory)
    assert name == known or name.startswith(known.split("-")[0])
    assert name.split("-")[0] == known.split("-")[0]


def test_the_default_recompute_follows_the_date() -> None:
    # Selective recompute was published in May 2022; kernels without scores came in 2023.
    assert setup_of(source_date="2021-04").software.recompute == "full"
    assert setup_of(source_date="2022-11").software.recompute == "selective"
    assert setup_of(source_date="2024-07").software.recompute == "none"


def test_selective_means_the_attention_core_in_megatron_and_operators_in_torchtitan() -> None:
    assert setup_of(recompute="selective").software.stack.selective is Selective.CORE
    other = setup_of(source="torchtitan", recompute="selective", zero_stage="3",
                     dp="512", tp="1", pp="1")  # fmt: skip
    assert other.software.stack.selective is Selective.OPERATORS


def test_an_unknown_source_gets_the_software_that_its_layout_needs() -> None:
    sharded = setup_of(source="somebody-2024", zero_stage="3", dp="512", tp="1", pp="1")
    assert sharded.software.family == "fsdp"
    assert setup_of(source="somebody-2024").software.family == "megatron"
    replicas = setup_of(source="", dp="512", tp="1", pp="1")
    assert replicas.software.family == "ddp"
    assert sharded.software.stack.is_generic
    assert not setup_of().software.stack.is_generic


def test_the_stack_column_takes_precedence() -> None:
    setup = setup_of(stack="torchtitan-compiled")
    assert setup.software.stack.compiled
    assert not setup.software.stack.is_generic
    assert not any("stack" in note for note in setup.assumed)
    assert "unknown stack `torchtitn`; did you mean" in reason_of(stack="torchtitn")


def test_a_framework_is_named_by_its_own_column_or_in_the_source() -> None:
    assert setup_of(source="a-lab", framework="NeMo 2.0").software.family == "nemo"
    assert setup_of(source="NVIDIA/Megatron-LM README").software.family == "megatron"


def test_presets_follow_the_date_of_the_release() -> None:
    names = [setup_of(source_date=date).software.stack.name.split(" ")[0]
             for date in ("2021-04", "2022-06", "2023-12", "2025-02")]  # fmt: skip
    assert names == ["megatron-2020", "megatron-2022", "megatron-core-0.5", "megatron-core-0.12"]


@pytest.mark.parametrize(
    ("cell", "dtype"),
    [("bf16 (amp)", "bfloat16"), ("fp16+loss-scale", "float16"), ("bf16-mixed", "bfloat16")],
)
def test_a_qualified_dtype_is_read_by_its_first_word(cell: str, dtype: str) -> None:
    setup = setup_of(dtype=cell)
    assert setup.dtype == dtype
    assert f"dtype {dtype}, of `{cell}`" in setup.assumed


def test_assumptions_for_blank_cells_are_named() -> None:
    assumed = " ".join(setup_of(recompute="", attention="").assumed)
    assert "recompute full" in assumed
    assert "attention" in assumed
    assert "recompute" not in " ".join(setup_of(recompute="full", attention="flash").assumed)


def test_microbatches_follow_from_the_batch_and_the_replicas() -> None:
    layout = setup_of(global_batch="1024", microbatch="2").layout
    assert (layout.microbatch, layout.accumulation) == (2, 1024 // (2 * 8))


def test_without_degrees_sharded_states_need_no_tensor_ranks_or_stages() -> None:
    """Of 175e9 x 18 bytes ZeRO-3 leaves each of 512 devices 6 GB, replicas hold all of them."""
    blank = {"dp": "", "tp": "", "pp": ""}
    layout = setup_of(**blank, zero_stage="3", framework="fsdp").layout
    assert (layout.dp, layout.tp, layout.pp) == (512, 1, 1)
    whole = setup_of(**blank).layout
    assert whole.tp == 8
    assert whole.pp > 8


def test_degrees_say_how_many_devices_there_are() -> None:
    assert setup_of(n_gpus="").cluster.world_size == 8 * 8 * 8


def test_a_rack_of_nvlink_is_one_domain() -> None:
    setup = setup_of(gpu_type="GB200", gpus_per_node="4", n_gpus="256", intra_link="NVLink5 NVL72",
                     dp="32", tp="8", pp="1", dtype="bf16")  # fmt: skip
    # 72 devices a rack; 64 is the most that divides 256.
    assert setup.cluster.devices_per_node == 64


def test_the_width_of_heads_follows_from_the_parameters() -> None:
    # Qwen3-30B-A3B: 32 heads of 128 on a hidden size of 2048 (its config.json); 64 by division.
    setup = setup_of(arch="moe", params_b="30.5", n_layers="48", hidden="2048", n_heads="32",
                     n_kv_heads="4", vocab="151936", n_experts="128", moe_topk="8",
                     moe_ffn_hidden="768", model_name="", dp="512", tp="1", pp="1",
                     dtype="bf16")  # fmt: skip
    assert setup.shape is not None
    assert setup.shape.head_width == 128


def test_the_container_dates_the_software() -> None:
    row = {"source": "nemo-megatron-bridge", "source_date": "067f987 2026-08-22"}
    read = setup_of(**row).software.year
    ran = setup_of(**row, source_ref="performance-summary-archive.md container 25.09").software.year
    assert (read, ran) == (pytest.approx(2026 + 8 / 12), pytest.approx(2025 + 9 / 12))
