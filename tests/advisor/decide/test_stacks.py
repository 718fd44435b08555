"""Memory of published programs, by their code: figures worked out by hand."""

from __future__ import annotations

import pytest

from advisor.cost import CostModel
from advisor.cost.load.loads import loads_of
from advisor.cost.memory.allocator import HOPPER_WORKSPACE_BYTES, WORKSPACE_BYTES, workspace_bytes
from advisor.inputs.facts import Facts
from advisor.predict.case import tensor_styles
from advisor.predict.resolve import resolve
from advisor.predict.rows import row_of
from advisor.predict.setup import Setup
from engines.plan import Plan, Precision
from profiles.closed_forms.transformer import TransformerShape, transformer_profile
from profiles.machine import catalogue
from profiles.machine.clusters import cluster_from_name
from profiles.model.profile import Numerics
from profiles.workload.stack import stack_named
from profiles.workload.under_stack import under_stack
from profiles.workload.workload import Workload

MIXTURE = TransformerShape(
    kind="moe", layers=4, hidden=512, heads=8, kv_heads=8, ffn=2048, vocab=32000, length=512,
    gated=False, tied=True, head_width=64, experts=8, topk=2, expert_ffn=2048,
)  # fmt: skip
LOGITS = 512 * 32000


def setup_of(**cells: object) -> Setup:
    text = {name: str(value) for name, value in cells.items()}
    resolved = resolve(row_of({"row_id": "1", "gpu_type": "A100-SXM-80GB", **text}))
    assert isinstance(resolved, Setup)
    return resolved


def test_split_logits_are_passed_to_the_loss_as_shards() -> None:
    setup = setup_of(
        framework="Megatron-LM", arch="dense_gpt", n_layers=2, hidden=512, n_heads=8, vocab=32000,
        seq_len=512, n_gpus=4, tp=4, microbatch=1, global_batch=1,
    )  # fmt: skip
    assert setup.shape is not None
    model = transformer_profile(setup.shape, name="gpt")
    styles = tensor_styles(setup)
    head = loads_of(model, numerics=Numerics.BF16, samples=1, tp=4, styles=styles).runs[-2]
    assert head.name == "head"
    assert head.output_bytes == 2 * LOGITS / 4


@pytest.mark.parametrize(
    ("stack", "share"), [("megatron-core-0.12", 1 / 8), ("nemo", 1 / 4), ("torch", 1 / 4)]
)
def test_experts_are_split_over_tensor_ranks_where_the_program_does(
    stack: str, share: float
) -> None:
    """8 experts on ep=4: two whole ones, or halves of them at tp=2."""
    model = transformer_profile(MIXTURE, name="mixture")
    loads = loads_of(
        model, numerics=Numerics.BF16, samples=1, tp=2, ep=4, stack=stack_named(stack),
        styles=(("layers.*.attention.qkv", "column"), ("layers.*.attention.output", "row")),
    )  # fmt: skip
    block = next(run for run in loads.runs if run.is_block)
    assert block.expert_bytes == pytest.approx(share * 8 * 2 * 512 * 2048 * 4)


def test_experts_stay_whole_where_ep_spans_the_tp_ranks() -> None:
    setup = setup_of(
        framework="Megatron-LM", source_date="2025-06", arch="moe", n_layers=4, hidden=512,
        n_heads=8, vocab=32000, n_experts=8, moe_topk=2, seq_len=512, n_gpus=8, dp=4, tp=2, ep=8,
        microbatch=1, global_batch=4,
    )  # fmt: skip
    assert setup.software.stack.folds_experts
    assert not setup.software.stack.splits_experts


def test_buffers_of_deepspeeds_pipeline_hold_logits_of_two_microbatches() -> None:
    """Its last stage has two buffers, and their outputs are in fp32."""
    shape = MIXTURE.model_copy(update={"kind": "dense_gpt", "experts": 0, "topk": 0})
    plain = stack_named("megatron-deepspeed").model_copy(
        update={"holds_outputs": False, "name": "plain"}
    )
    peaks = []
    for stack in (plain, stack_named("megatron-deepspeed")):
        model = under_stack(transformer_profile(shape, name="gpt"), stack)
        inputs = Facts(
            model=model,
            cluster=cluster_from_name("1x2xV100-SXM2-32GB"),
            workload=Workload(global_batch_size=32, precision="bf16"),
            stack=stack,
        )
        plan = Plan(
            pp=2, microbatch_size=4, microbatches=8, schedule="1f1b", stages=("layers.2",),
            recompute="full", precision=Precision.BF16,
        )  # fmt: skip
        last = max(CostModel(inputs).estimate(plan).stages, key=lambda stage: stage.rank)
        peaks.append(last.peak_bytes)
    border = 4 * 512 * 512 * 2
    # In addition to the logits: an idle buffer and a clone of the received tensor.
    more = peaks[1] - peaks[0] - 2 * 4 * 4 * LOGITS
    assert 0 <= more <= 4 * border


@pytest.mark.parametrize(
    ("device", "stack", "nbytes"),
    [
        ("A100-SXM-80GB", "torch", 2 * WORKSPACE_BYTES),
        ("H100-SXM-80GB", "torch", 2 * HOPPER_WORKSPACE_BYTES),
        ("H100-SXM-80GB", "megatron-core-0.12", 3 * HOPPER_WORKSPACE_BYTES),
    ],
)
def test_every_handle_has_a_workspace(device: str, stack: str, nbytes: int) -> None:
    assert workspace_bytes(catalogue.accelerator(device), stack_named(stack)) == nbytes
