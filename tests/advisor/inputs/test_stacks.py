"""Stacks as users name them: options, arguments, reports, files and sweeps."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from advisor import advise, auto_parallelize
from advisor.cli.main import cli
from advisor.cost import CostModel
from advisor.decide.choose import choose
from advisor.decide.decision import Decision
from advisor.inputs.stacks import OF_ENGINES, compiled, is_of_engines, is_preset
from advisor.search.legal import styles_of
from advisor.whatif.sweep.points import Swept, sweep
from engines.plan import PartialPlan, Plan
from engines.tensor.token_rules import splits_tokens
from profiles.closed_forms.families import profile_from_config
from profiles.closed_forms.transformer import TransformerShape, transformer_profile
from profiles.errors import InputError, PlanError, UnknownNameError
from profiles.model.profile import Numerics
from profiles.workload.stack import TORCH, FusibleKind, Stack, stack_named, stacks
from tests.engines.cases import CASES, token_loss
from tests.factories import cpus, facts, gpus

SHAPE = TransformerShape(
    kind="llama", layers=4, hidden=512, heads=8, kv_heads=8, ffn=2048, vocab=32_000,
    length=2048, gated=True, tied=False, head_width=64,
)  # fmt: skip
MODEL = transformer_profile(SHAPE, name="llama")
LLAMA = profile_from_config(
    {
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 4000,
    },
    samples=1,
    sequence_length=2048,
    name="llama",
    numerics=(Numerics.AS_BUILT, Numerics.BF16, Numerics.BF16_AUTOCAST),
)


def command(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words))


def decided(stack: Stack = TORCH, **settings: object) -> Decision:
    whole = facts(MODEL, gpus(1, 4, memory_gib=40), batch=32, stack=stack)
    return choose(whole, partial=PartialPlan.build(settings))


def test_stacks_with_sequence_parallelism_add_its_styles() -> None:
    """As the published layouts are priced (arXiv:2205.05198)."""
    by_tokens, plain = stack_named("megatron-2022"), stack_named("megatron-2020")
    pairs = styles_of(facts(MODEL, gpus(1, 4), stack=plain))(4)
    assert "sequence" not in dict(pairs).values()
    styles = styles_of(facts(MODEL, gpus(1, 4), stack=by_tokens))(4)
    assert set(pairs) < set(styles)
    assert set(styles) - set(pairs) == {
        ("layers.*", "sequence"),
        ("layers.*.attention.qkv", "joined"),
        ("layers.*.mlp.up", "joined"),
    }
    plan = Plan(tp=4, dp_replicate=1, tensor_styles=styles, sequence_parallel=True)
    assert Plan.from_json(plan.to_json()).tensor_styles == styles


def test_our_engines_split_tokens_on_accelerators_unless_told_otherwise() -> None:
    """arXiv:2205.05198; torchtitan and Megatron-LM have it on."""
    there, here = facts(LLAMA, gpus(1, 4)), facts(LLAMA, cpus(4))
    assert splits_tokens(styles_of(there)(4))
    assert not splits_tokens(styles_of(there, by_tokens=False)(4))
    assert not splits_tokens(styles_of(here)(4))
    assert splits_tokens(styles_of(here, by_tokens=True)(4))


def test_a_decision_saves_the_tokens_of_other_ranks_by_default() -> None:
    whole = facts(LLAMA, gpus(1, 4, memory_gib=40), batch=32)
    same = {"tp": 4, "microbatch_size": 4, "accumulation": 8, "recompute": "none"}
    split, plain = (
        choose(whole, partial=PartialPlan.build({**same, **settings}))
        for settings in ({}, {"sequence_parallel": False})
    )
    assert split.plan.sequence_parallel
    assert not plain.plan.sequence_parallel
    assert split.estimate.peak_bytes < plain.estimate.peak_bytes


class TestReport:
    def test_it_names_the_stack_and_what_it_changes(self) -> None:
        text = str(decided(stack_named("megatron-2022")))
        assert "stack megatron-2022: attention fused_softmax" in text
        assert "`megatron-2022` is priced only" in text

    def test_the_default_stack_is_not_mentioned(self) -> None:
        assert "stack" not in str(decided())

    def test_the_stack_survives_the_file(self) -> None:
        decision = decided(stack_named("torchtitan"))
        again = Decision.from_json(decision.to_json())
        assert again == decision
        assert again.facts.stack == stack_named("torchtitan")
        # Questions to the loaded decision are answered under the same stack.
        assert again.why_not("zero=3") == decision.why_not("zero=3")


class TestCompiled:
    def test_a_compiled_plan_is_estimated_with_compiled_blocks(self) -> None:
        plan = Plan.build(
            {"dp_replicate": 4, "microbatch_size": 8, "precision": "bf16", "compile": True}
        )
        cluster = gpus(1, 4, memory_gib=40)
        plain = CostModel(facts(MODEL, cluster, batch=32))
        fused = CostModel(facts(MODEL, cluster, batch=32, stack=stack_named("torch-compiled")))
        eager = plan.model_copy(update={"compile": False})
        assert plain.estimate(plan) == fused.estimate(plan)
        assert plain.estimate(plan).step_s < plain.estimate(eager).step_s

    def test_compile_by_plan_and_by_stack_is_the_same(self) -> None:
        by_plan, by_stack = decided(compile=True), decided(stack_named("torch-compiled"))
        assert by_plan.plan == by_stack.plan
        assert by_plan.plan.compile
        assert by_plan.estimate == by_stack.estimate

    def test_a_plan_that_contradicts_the_stack_is_refused(self) -> None:
        with pytest.raises(PlanError, match="compile=false is not the stack `torch-compiled`"):
            decided(stack_named("torch-compiled"), compile=False)

    def test_our_engine_compiles_blocks_and_not_the_loss(self) -> None:
        stack = compiled(TORCH)
        assert stack.fuses(FusibleKind.NORM)
        assert not stack.fuses(FusibleKind.LOSS)


class TestEngines:
    def test_engines_apply_their_own_stacks_only(self) -> None:
        case = CASES["gpt"]
        with pytest.raises(InputError, match="`torchtitan` is other software") as caught:
            auto_parallelize(
                case.build(), sample=case.batch(2), loss_fn=token_loss, stack="torchtitan"
            )
        assert any("torch-compiled" in hint for hint in caught.value.hints)
        assert {name for name, stack in stacks().items() if is_of_engines(stack)} == {*OF_ENGINES}
        assert not is_of_engines(TORCH.model_copy(update={"fused_optimizer": True}))

    def test_advise_takes_a_name_or_a_stack(self) -> None:
        case = CASES["gpt"]
        asked = {"sample": case.batch(2), "loss_fn": token_loss, "cluster": "8xH100-SXM-80GB"}
        named = advise(case.build(), stack="nemo", **asked)
        assert named.facts.stack.name == "nemo"
        assert is_preset(named.facts.stack)
        assert not is_preset(named.facts.stack.model_copy(update={"fused_optimizer": False}))
        assert advise(case.build(), stack=stack_named("nemo"), **asked).plan == named.plan
        with pytest.raises(UnknownNameError, match="unknown stack `nemmo`"):
            advise(case.build(), stack="nemmo", **asked)


class TestCommand:
    EIGHT = ("gpt-125m", "--cluster", "8xH100-SXM-80GB", "--global-batch", "64")

    def test_a_decision_uses_the_given_stack(self) -> None:
        result = command("plan", *self.EIGHT, "--stack", "torchtitan-compiled", "--json")
        assert result.exit_code == 0
        assert json.loads(result.stdout)["facts"]["stack"]["name"] == "torchtitan-compiled"

    def test_an_unknown_name_brings_its_near_misses(self) -> None:
        result = command("plan", *self.EIGHT, "--stack", "torchtitn")
        assert result.exit_code == 2
        assert "did you mean `torchtitan`" in result.stderr

    def test_all_presets_are_listed_with_their_sources(self) -> None:
        text = command("explain", "stacks").stdout
        for name, stack in stacks().items():
            assert f"{name}: " in text
            assert all(source in text for _, source in stack.sources)
        one = command("explain", "stack", "deepspeed").stdout
        assert one.startswith("deepspeed: ")
        assert "arXiv:1910.02054" in one

    def test_a_sweep_compares_stacks(self) -> None:
        result = command("sweep", *self.EIGHT, "--stack", "torch,torchtitan-compiled")
        assert result.exit_code == 0, result.stderr
        assert "Fastest, as predicted: stack torchtitan-compiled" in result.stdout

    def test_one_stack_is_a_point_by_itself_and_a_setting_of_another_sweep(self) -> None:
        alone = command("sweep", *self.EIGHT, "--stack", "torch")
        assert "Fastest, as predicted: stack torch" in alone.stdout
        both = command("sweep", *self.EIGHT, "--stack", "torchtitan-compiled", "--devices", "4,8")
        assert both.exit_code == 0, both.stderr
        assert "Fastest, as predicted: devices 8" in both.stdout

    def test_measuring_other_software_is_refused(self) -> None:
        words = ("sweep", "gpt-10m", "--measure", "--stack", "torch,nemo")
        assert "`--measure` runs our engines" in command(*words).stderr


def test_points_of_a_sweep_over_stacks_equal_single_decisions() -> None:
    whole = facts(MODEL, gpus(1, 4, memory_gib=40), batch=32)
    names = ["torch", "torch-compiled", "megatron-2022"]
    swept = sweep(whole, Swept.STACK, names, settings=PartialPlan())
    for name, point in zip(names, swept.points, strict=True):
        alone = decided(stack_named(name))
        assert (point.plan, point.step_s) == (alone.plan, alone.estimate.step_s)
