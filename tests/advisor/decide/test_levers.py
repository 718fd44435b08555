"""Levers: what each changes, by hand; and what of it a report says."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from advisor.cli.main import cli
from advisor.cost import CostModel
from advisor.decide import levers
from advisor.decide.choose import choose
from advisor.decide.decision import Decision
from advisor.inputs.facts import Facts
from advisor.inputs.stacks import is_of_engines
from engines.plan import PartialPlan
from profiles.closed_forms.transformer import TransformerShape, transformer_profile
from profiles.machine.clusters import cluster_from_name
from profiles.model.work import AttentionKernel
from profiles.workload.stack import TORCH, Stack, stack_named
from profiles.workload.workload import Workload
from tests.factories import facts, gpus, transformer

H, VOCAB, TOKENS, LAYERS = 1024, 32_000, 2048, 8
SHAPE = TransformerShape(
    kind="llama", layers=LAYERS, hidden=H, heads=8, kv_heads=8, ffn=4096, vocab=VOCAB,
    length=TOKENS, gated=True, tied=False, head_width=128,
)  # fmt: skip
MODEL = transformer_profile(SHAPE, name="llama")
# Fused query, key and value; output; gate and up in one; down.
LINEARS = [(H, 3 * H), (H, H), (H, 2 * 4096), (4096, H)]


def on(name: str = "8xH100-SXM-80GB", stack: Stack = TORCH, batch: int = 64) -> Facts:
    return Facts(
        model=MODEL,
        cluster=cluster_from_name(name),
        workload=Workload(global_batch_size=batch, precision="bf16"),
        stack=stack,
    )


def decided(
    whole: Facts, plan: str = "zero=0 dp_replicate=8 microbatch_size=8 recompute=none"
) -> Decision:
    return choose(whole, partial=PartialPlan.parse(plan))


def gain(decision: Decision, name: str) -> levers.Gain:
    return next(each for each in levers.gains(decision) if each.name == name)


def test_moments_in_bf16_are_half() -> None:
    decision = decided(on())
    found = gain(decision, "bf16 moments")
    assert found.estimate.memory.optimizer == decision.estimate.memory.optimizer / 2
    # AdamW in fp32: two moments of 4 bytes.
    assert decision.estimate.memory.optimizer == 8 * MODEL.parameters
    assert not found.settings
    assert not found.keeps_training


def test_lora_keeps_states_of_its_adapters_alone() -> None:
    found = gain(decided(on()), "LoRA").estimate.memory
    learning = LAYERS * sum(levers.RANK * (i + o) for i, o in LINEARS)
    assert found.optimizer == 8 * learning
    assert found.parameters == 2 * MODEL.parameters + 4 * learning
    # Two of each under DDP where microbatches add up, else one.
    assert found.gradients == 4 * learning
    quantised = gain(decided(on()), "QLoRA").estimate.memory
    weights = LAYERS * sum(i * o for i, o in LINEARS)
    smaller = found.parameters - quantised.parameters
    assert smaller == pytest.approx(weights * (2 - 4.127 / 8), rel=1e-6)


def test_a_chunked_loss_holds_an_eighth_of_the_logits() -> None:
    decision = decided(on())
    found = gain(decision, "chunked loss")
    logits = 8 * TOKENS * VOCAB  # of a microbatch
    # fp32 log-softmax and its fp32 and bf16 gradients; an eighth, and the gradient of the head's
    # input in bf16.
    assert decision.estimate.loss_bytes == (4 + 4 + 2) * logits
    saved = decision.estimate.peak_bytes - found.estimate.peak_bytes
    least = (4 + 4 + 2) * logits * (1 - 1 / 8) - 2 * 8 * TOKENS * H
    if found.estimate.phase == decision.estimate.phase:
        assert saved >= least
    assert 0 < saved <= decision.estimate.loss_bytes + 2 * logits
    assert found.keeps_training


def test_products_in_8_bits_need_units_for_them() -> None:
    found = gain(decided(on()), "fp8 products")
    before = decided(on()).estimate.time.compute_s
    # Twice the rate for products, the same for all else.
    assert 0.5 * before < found.estimate.time.compute_s < before
    names = [each.name for each in levers.gains(decided(on("8xA100-SXM-80GB")))]
    assert "fp8 products" not in names


def test_graphs_leave_no_launches() -> None:
    shape = SHAPE.model_copy(update={"hidden": 128, "head_width": 16, "ffn": 512, "length": 128})
    model = transformer_profile(shape, name="small")
    whole = on(batch=8).model_copy(update={"model": model})
    small = decided(whole, "zero=0 dp_replicate=8 microbatch_size=1")
    assert small.estimate.time.launch_s > 0
    assert gain(small, "CUDA graphs").estimate.time.launch_s == 0


def test_scores_are_computed_again_where_some_are_kept() -> None:
    names = [each.name for each in levers.gains(decided(on()))]
    assert "recompute of scores" not in names  # flash attention keeps none
    softmax = Stack(name="softmax", attention=AttentionKernel.FUSED_SOFTMAX)
    whole = on(stack=softmax)
    decision = decided(whole, "dp_replicate=8 microbatch_size=1 recompute=selective")
    found = gain(decision, "recompute of scores")
    # All else is kept: more memory, less work again.
    assert found.estimate.memory.activations > decision.estimate.memory.activations
    assert found.estimate.time.recompute_s < decision.estimate.time.recompute_s


def test_a_lever_of_our_engines_is_a_setting_that_a_plan_can_have() -> None:
    decision = decided(on())
    applied = [each for each in levers.gains(decision) if each.settings]
    assert {each.name for each in applied} == {"compile", "offload activations"}
    for each in applied:
        partial = decision.partial.fixing(**PartialPlan.parse(each.settings).fixed)
        assert choose(decision.facts, partial=partial).plan == each.plan


def test_what_is_priced_only_is_in_no_plan_of_ours() -> None:
    decision = decided(on())
    for each in levers.gains(decision):
        if not each.settings:
            assert each.plan == decision.plan
    for lever in levers.LEVERS:
        changed = lever.changed(decision.facts)
        if changed is not None and not lever.is_applied and changed.stack != TORCH:
            assert not is_of_engines(changed.stack)


def test_other_software_has_no_settings_of_ours() -> None:
    found = levers.gains(decided(on(stack=stack_named("megatron-2022"))))
    assert found
    assert not any(each.settings for each in found)


def test_another_plan_is_named_where_it_is_faster_then() -> None:
    """Of half the states a device has room to compute nothing again."""
    cluster = gpus(1, 8, memory_gib=40)
    whole = facts(MODEL, cluster, batch=64)
    decision = choose(whole)
    for each in levers.gains(decision):
        if each.best is not None and each.best_estimate is not None:
            changed = next(x for x in levers.LEVERS if x.name == each.name).changed(whole)
            assert changed is not None
            assert CostModel(changed).estimate(each.best) == each.best_estimate
            assert not each.fits or each.best_estimate.step_s <= each.estimate.step_s


class TestReport:
    def test_it_points_out_what_is_notable_and_no_more(self) -> None:
        (hint,) = levers.hint(decided(on()))
        assert hint.startswith("levers on this plan: ")
        assert "fp8 products (-" in hint
        assert "priced only, our engines do not implement it" in hint
        assert "offload" not in hint  # it takes longer and saves nothing that is needed

    def test_models_whose_kernels_are_not_known_have_few(self) -> None:
        whole = facts(transformer(layers=4), gpus(1, 8), batch=64)
        names = {each.name for each in levers.gains(choose(whole))}
        assert {"LoRA", "chunked loss"} & names == set()

    def test_a_file_is_asked_for_all_of_them(self, tmp_path: Path) -> None:
        path = tmp_path / "plan.json"
        decision = decided(on())
        path.write_text(decision.to_json())
        shown = CliRunner().invoke(cli, ["explain", "levers", str(path)])
        assert shown.exit_code == 0
        for each in levers.gains(decision):
            assert f"{each.name} (" in shown.stdout
        assert "priced only: our engines do not implement it" in shown.stdout
