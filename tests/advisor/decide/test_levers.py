"""Levers: the effect of each, by hand, and their place in a report."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from advisor.cli.main import cli
from advisor.cost import CostModel
from advisor.cost.compute.unit_times import unit_times
from advisor.cost.load.loads import loads_of
from advisor.decide import levers
from advisor.decide.choose import choose
from advisor.decide.decision import Decision
from advisor.inputs.facts import Facts
from advisor.inputs.stacks import is_of_engines
from engines.plan import PartialPlan, Plan, Precision
from profiles.capture.capture import capture
from profiles.closed_forms.transformer import TransformerShape, transformer_profile
from profiles.machine.clusters import cluster_from_name
from profiles.model.profile import Numerics
from profiles.model.work import AttentionKernel
from profiles.workload.stack import TORCH, Stack, stack_named
from profiles.workload.workload import Workload
from tests.engines.cases import cpu_ranks
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
    moments = gain(decision, "bf16 moments")
    assert moments.estimate.memory.optimizer == decision.estimate.memory.optimizer / 2
    # AdamW in fp32: two moments of 4 bytes.
    assert decision.estimate.memory.optimizer == 8 * MODEL.parameters
    assert not moments.settings
    assert not moments.keeps_training


def test_a_model_in_bf16_has_no_copies_in_fp32() -> None:
    """Of each element 2 bytes, as many of its gradient, and four states of 2."""
    decision = decided(on())
    lever = gain(decision, "pure bf16")
    own, memory = decision.estimate.memory, lever.estimate.memory
    assert memory.parameters == 2 * MODEL.parameters == own.parameters / 2
    assert memory.gradients == own.gradients / 2
    assert memory.optimizer == 8 * MODEL.parameters
    assert lever.code == 'model.bfloat16(), optimizer="adamw-compensated"'
    assert not lever.keeps_training


def test_lora_holds_states_of_its_adapters_only() -> None:
    lora = gain(decided(on()), "LoRA").estimate.memory
    learning = LAYERS * sum(levers.RANK * (i + o) for i, o in LINEARS)
    assert lora.optimizer == 8 * learning
    assert lora.parameters == 2 * MODEL.parameters + 4 * learning
    # Two of each under DDP where microbatches add up, else one.
    assert lora.gradients == 4 * learning
    quantised = gain(decided(on()), "QLoRA").estimate.memory
    weights = LAYERS * sum(i * o for i, o in LINEARS)
    smaller = lora.parameters - quantised.parameters
    assert smaller == pytest.approx(weights * (2 - 4.127 / 8), rel=1e-6)


def test_a_chunked_loss_holds_an_eighth_of_the_logits() -> None:
    decision = decided(on())
    chunked = gain(decision, "chunked loss")
    logits = 8 * TOKENS * VOCAB  # of a microbatch
    # fp32 log-softmax and its fp32 and bf16 gradients; an eighth, and the gradient of the head's
    # input in bf16.
    assert decision.estimate.loss_bytes == (4 + 4 + 2) * logits
    saved = decision.estimate.peak_bytes - chunked.estimate.peak_bytes
    least = (4 + 4 + 2) * logits * (1 - 1 / 8) - 2 * 8 * TOKENS * H
    if chunked.estimate.phase == decision.estimate.phase:
        assert saved >= least
    assert 0 < saved <= decision.estimate.loss_bytes + 2 * logits
    assert chunked.keeps_training


@pytest.mark.parametrize(("name", "stack"), [("fp8", "torch"), ("fp8 products", "megatron-2022")])
def test_fp8_products_need_fp8_units(name: str, stack: str) -> None:
    decision = decided(on(stack=stack_named(stack)))
    before = decision.estimate.time.compute_s
    # Twice the rate for products, the same for all else.
    assert 0.5 * before < gain(decision, name).estimate.time.compute_s < before
    without = levers.gains(decided(on("8xA100-SXM-80GB", stack_named(stack))))
    assert not any("fp8" in each.name for each in without)


def test_our_engines_multiply_in_fp8_where_blocks_are_compiled() -> None:
    """And wide: by themselves casts take longer than they save."""
    wide = SHAPE.model_copy(update={"hidden": 4096, "head_width": 512, "ffn": 16384, "layers": 2})
    whole = Facts(**{**dict(on()), "model": transformer_profile(wide, name="wide")})
    decision = decided(whole)
    fp8, compiled = gain(decision, "fp8"), gain(decision, "compile")
    assert fp8.settings == "precision=fp8 compile=true"
    assert not fp8.keeps_training
    assert fp8.estimate.step_s < compiled.estimate.step_s
    assert "`precision=fp8 compile=true` (-" in next(levers.hint(decision))
    alone = decision.plan.model_copy(update={"precision": Precision.FP8})
    assert CostModel(whole).estimate(alone).step_s > decision.estimate.step_s
    narrow = decided(on())
    assert gain(narrow, "fp8").estimate.step_s > gain(narrow, "compile").estimate.step_s
    assert "fp8" not in next(levers.hint(narrow))


def test_a_head_stays_in_16_bits() -> None:
    """Blocks multiply in 8 bits (DeepSeek-V3, arXiv:2412.19437, section 3.3.1)."""
    narrow = levers.fp8_products(on(stack=stack_named("megatron-2022")))
    assert narrow is not None
    plan = Plan.parse("dp_replicate=8 precision=bf16 microbatch_size=8")

    def seconds(stack: Stack) -> tuple[float, float]:
        loads = loads_of(MODEL, numerics=Numerics.BF16_AUTOCAST, samples=8)
        dtype = stack.product_dtype or plan.precision.dtype
        times = unit_times(
            loads, recompute=plan.recompute, device=on().cluster.device, dtype=dtype, stack=stack
        )
        _, block, *_, head, _ = (time.forward_s for time in times)
        return block, head

    plain = stack_named("megatron-2022")
    (block, head), (narrow_block, narrow_head) = seconds(plain), seconds(narrow.stack)
    assert narrow_block < block
    assert narrow_head == head


def test_cuda_graphs_remove_launches() -> None:
    shape = SHAPE.model_copy(update={"hidden": 128, "head_width": 16, "ffn": 512, "length": 128})
    model = transformer_profile(shape, name="small")
    whole = on(batch=8).model_copy(update={"model": model})
    small = decided(whole, "zero=0 dp_replicate=8 microbatch_size=1")
    assert small.estimate.time.launch_s > 0
    assert gain(small, "CUDA graphs").estimate.time.launch_s == 0


def test_recompute_of_scores_is_a_lever_where_scores_are_saved() -> None:
    names = [each.name for each in levers.gains(decided(on()))]
    assert "recompute of scores" not in names  # flash attention saves none
    softmax = Stack(name="softmax", attention=AttentionKernel.FUSED_SOFTMAX)
    whole = on(stack=softmax)
    decision = decided(whole, "dp_replicate=8 microbatch_size=1 recompute=selective")
    recompute = gain(decision, "recompute of scores")
    # Everything else is saved: more memory, less recompute.
    assert recompute.estimate.memory.activations > decision.estimate.memory.activations
    assert recompute.estimate.time.recompute_s < decision.estimate.time.recompute_s


def test_levers_of_the_engines_are_settings_of_plans() -> None:
    decision = decided(on())
    applied = [each for each in levers.gains(decision) if each.settings]
    assert {each.name for each in applied} == {
        "compile", "offload activations", "chunked loss", "fp8",
    }  # fmt: skip
    for each in applied:
        partial = decision.partial.fixing(**PartialPlan.parse(each.settings).fixed)
        assert choose(decision.facts, partial=partial).plan == each.plan


def test_levers_that_are_only_priced_leave_the_plan_unchanged() -> None:
    decision = decided(on())
    for each in levers.gains(decision):
        if not each.settings:
            assert each.plan == decision.plan
    for lever in levers.LEVERS:
        changed = lever.changed(decision.facts)
        if changed is not None and not lever.is_applied and changed.stack != TORCH:
            assert not is_of_engines(changed.stack)


def test_levers_of_other_software_have_no_settings() -> None:
    gains = levers.gains(decided(on(stack=stack_named("megatron-2022"))))
    assert gains
    assert not any(each.settings for each in gains)


def test_a_plan_that_is_faster_under_a_lever_is_named() -> None:
    """With half of the states a device has room for a plan without recompute."""
    cluster = gpus(1, 8, memory_gib=40)
    whole = facts(MODEL, cluster, batch=64)
    decision = choose(whole)
    for each in levers.gains(decision):
        if each.best is not None and each.best_estimate is not None:
            changed = next(x for x in levers.LEVERS if x.name == each.name).changed(whole)
            assert changed is not None
            assert CostModel(changed).estimate(each.best) == each.best_estimate
            assert not each.fits or each.best_estimate.step_s <= each.estimate.step_s


def test_a_plan_that_only_a_lever_makes_fit_is_named() -> None:
    """Of plans in 3 GiB a device all but TP and ZeRO-3 with offloaded states are too large."""
    decision = choose(facts(MODEL, gpus(2, 4, memory_gib=3), batch=64))
    too_large = [each.plan for each in decision.alternatives if each.step_s is None]
    assert gain(decision, "LoRA").best in too_large


class TestReport:
    def test_the_hint_lists_notable_levers_only(self) -> None:
        (hint,) = levers.hint(decided(on(stack=stack_named("megatron-2022"))))
        assert hint.startswith("levers on this plan: ")
        assert "CUDA graphs (-" in hint
        assert "priced only, our engines do not implement it" in hint
        assert "offload" not in hint  # it takes longer and saves nothing that is needed

    def test_models_without_known_kernels_have_few_levers(self) -> None:
        whole = facts(transformer(layers=4), gpus(1, 8), batch=64)
        names = {each.name for each in levers.gains(choose(whole))}
        assert {"LoRA", "chunked loss"} & names == set()

    def test_explain_levers_lists_all_levers_of_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "plan.json"
        decision = decided(on())
        path.write_text(decision.to_json())
        shown = CliRunner().invoke(cli, ["explain", "levers", str(path)])
        assert shown.exit_code == 0
        for each in levers.gains(decision):
            assert f"{each.name} (" in shown.stdout
        assert "priced only: our engines do not implement it" in shown.stdout


class Maps(nn.Module):
    """Convolutions and batch norms, mostly bound by memory."""

    def __init__(self) -> None:
        super().__init__()
        layers = [(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64)) for _ in range(4)]
        self.layers = nn.Sequential(*(each for pair in layers for each in pair))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x).mean((2, 3))
        return out


def of_maps(layout: torch.memory_format, cluster: str) -> Decision:
    model, images = Maps(), torch.zeros(32, 64, 128, 128)
    profile = capture(
        model.to(memory_format=layout),
        images.to(memory_format=layout),
        numerics=tuple(Numerics),
        on_processor=cluster == "8xcpu",
    )
    known = Facts(
        model=profile,
        cluster=cpu_ranks(8) if cluster == "8xcpu" else cluster_from_name(cluster),
        workload=Workload(global_batch_size=256, precision="bf16"),
    )
    return decided(known, "zero=0 dp_replicate=8 microbatch_size=32 recompute=none")


def test_channels_last_is_as_fast_as_a_model_that_is_laid_out_so() -> None:
    plain, laid_out = (
        of_maps(layout, "8xH100-SXM-80GB")
        for layout in (torch.contiguous_format, torch.channels_last)
    )
    lever = gain(plain, "channels last")
    assert lever.estimate.step_s == pytest.approx(laid_out.estimate.step_s, rel=0.01)
    assert lever.estimate.step_s < 0.9 * plain.estimate.step_s
    (line,) = levers.hint(plain)
    assert "`model.to(memory_format=torch.channels_last)` (at best -" in line
    assert "channels last" not in {each.name for each in levers.gains(laid_out)}
    on_processors = of_maps(torch.contiguous_format, "8xcpu")
    assert "channels last" not in {each.name for each in levers.gains(on_processors)}
