"""Questions whose answers are well known, asked as a user asks them.

Each published layout is asked for by `--plan`, on the authors' machines and software: it is legal,
it is priced near the published step, it fits where it ran, and the tree leads to it. What is chosen
freely is no slower by our own price. What falls short is an expected failure with its reason, in
`well_known.toml`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from advisor.cost import CostModel
from advisor.decide.candidates import searched, why_illegal
from advisor.decide.choose import choose
from advisor.decide.decision import Decision
from advisor.decide.tree import in_leaf
from advisor.decide.walk import walk
from advisor.inputs.facts import Facts
from advisor.inputs.models import profile_model
from advisor.inputs.policy import Policy
from advisor.inputs.precision import MIXED
from advisor.inputs.stacks import stack_of
from advisor.predict.case import Case, case_of
from advisor.predict.resolve import resolve
from advisor.predict.rows import TableRow
from advisor.predict.setup import Setup
from advisor.search.cache import SearchCache
from advisor.search.ranking import Candidate
from engines.plan import DataParallel, PartialPlan
from profiles.closed_forms.transformer import TransformerShape, transformer_profile
from profiles.errors import NoPlanError
from profiles.machine.cluster import ClusterProfile
from profiles.machine.clusters import load_cluster, resolve_cluster
from profiles.model.profile import ModelProfile, Numerics
from profiles.workload.optimizers import optimizer_profile
from profiles.workload.workload import Workload

# Published steps of one configuration differ by 1 to 7 % between releases of the software; the
# estimate's own range is 25 %.
TOLERANCE = 0.15
OF_UTILISATION = 0.25  # published as a round number, of an unsaid count of FLOP
POLICY = Policy()
Question = dict[str, Any]
TABLE = tomllib.loads(Path(__file__).with_name("well_known.toml").read_text())


def cases(test: str, questions: Iterable[Question]) -> list[Any]:
    """Parameters of a test, with what `misses` names as an expected failure."""
    parameters = []
    for question in questions:
        reason = question.get("misses", {}).get(test)
        marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
        marks += [pytest.mark.nightly] if question.get("nightly") else []
        parameters.append(pytest.param(question, id=question["name"], marks=marks))
    return parameters


def published(test: str, *wanted: str) -> Any:
    """Those of the published questions that have these keys."""
    questions = [q for q in TABLE["published"] if all(q.get(key) for key in wanted)]
    return pytest.mark.parametrize("question", cases(test, questions))


def model_of(question: Question, folder: Path) -> ModelProfile:
    if "shape" in question:
        sizes = question["shape"]
        shape = TransformerShape(
            **{
                "kind": "dense_gpt",
                "kv_heads": sizes["heads"],
                "ffn": 4 * sizes["hidden"],
                "head_width": sizes["hidden"] // sizes["heads"],
                "length": question["seq"],
                "gated": False,
                "tied": True,
            }
            | sizes
        )
        return transformer_profile(
            shape,
            name=question["name"],
            numerics=(Numerics.AS_BUILT, *MIXED),
            vocabulary_multiple=1,
        )
    numerics = MIXED if question.get("precision", "bf16") == "bf16" else ()
    if "model" in question:
        return bundled(question["model"], question.get("seq"), numerics)
    path = folder / "model.json"
    path.write_text(json.dumps(question["config"]))
    return profile_model(
        str(path), samples=1, sequence_length=question.get("seq"), numerics=numerics
    )


@cache
def bundled(name: str, seq: int | None, numerics: tuple[Numerics, ...]) -> ModelProfile:
    return profile_model(name, samples=1, sequence_length=seq, numerics=numerics)


def cluster_of(question: Question, folder: Path) -> ClusterProfile:
    if "cluster" in question:
        return resolve_cluster(question["cluster"])
    path = folder / "cluster.toml"
    path.write_text("\n".join(f"{key} = {value}" for key, value in question["nodes"].items()))
    return load_cluster(path)


_ASKED: dict[str, Facts] = {}


@pytest.fixture
def facts(question: Question, tmp_path: Path) -> Facts:
    """Facts of the question, without a plan."""
    name = question["name"]
    if name not in _ASKED:
        model = model_of(question, tmp_path)
        workload = Workload(
            global_batch_size=question["batch"],
            tokens_per_sample=model.tokens_per_sample,
            optimizer=optimizer_profile(question.get("optimizer", "adamw")),
            precision=question.get("precision", "bf16"),
        )
        _ASKED[name] = Facts(
            model=model,
            cluster=cluster_of(question, tmp_path),
            workload=workload,
            stack=stack_of(question.get("stack")),
        )
    return _ASKED[name]


def settings_of(question: Question, facts: Facts, settings: str) -> PartialPlan:
    """Settings as `--plan` takes them, with the borders of stages where chunks are said."""
    partial = PartialPlan.parse(settings)
    if "chunks" in question:
        blocks = [unit.name for unit in facts.model.blocks()]
        each = len(blocks) // ((partial.pp or 1) * question["chunks"])
        return partial.fixing(stages=tuple(blocks[each::each]))
    return partial


_PRICED: dict[tuple[str, str], Candidate] = {}


def priced(question: Question, facts: Facts, settings: str) -> Candidate:
    """The best plan with these settings, whether or not it fits: what `--plan` prices."""
    key = question["name"], settings
    if key not in _PRICED:
        partial = settings_of(question, facts, settings)
        problems = why_illegal(facts, partial)
        assert not problems, problems[0].what
        search = searched(SearchCache(CostModel(facts)), partial, POLICY)
        best = search.fastest(search.rows) or search.nearest(search.rows)
        assert best is not None
        _PRICED[key] = best
    return _PRICED[key]


@published("legal")
def test_the_published_layout_can_be_asked_for(question: Question, facts: Facts) -> None:
    for settings in (question["plan"], *question.get("slower", ())):
        assert not why_illegal(facts, settings_of(question, facts, settings))


@published("price", "step_s")
def test_the_published_layout_is_priced_near_its_step(question: Question, facts: Facts) -> None:
    candidate = priced(question, facts, question["plan"])
    assert candidate.estimate.step_s == pytest.approx(question["step_s"], rel=TOLERANCE)


@published("price", "mfu")
def test_the_published_layout_is_priced_near_its_utilisation(
    question: Question, facts: Facts
) -> None:
    estimate = priced(question, facts, question["plan"]).estimate
    assert estimate.mfu == pytest.approx(question["mfu"], rel=OF_UTILISATION)


@published("range", "step_s")
def test_the_published_step_lies_in_the_range(question: Question, facts: Facts) -> None:
    estimate = priced(question, facts, question["plan"]).estimate
    assert estimate.step_low_s <= question["step_s"] <= estimate.step_high_s


@published("fits")
def test_layouts_that_ran_fit(question: Question, facts: Facts) -> None:
    candidate = priced(question, facts, question["plan"])
    assert candidate.fits, candidate.finding


@published("order", "slower")
def test_layouts_measured_as_slower_are_priced_as_slower(question: Question, facts: Facts) -> None:
    theirs = priced(question, facts, question["plan"]).estimate.step_s
    for settings in question["slower"]:
        assert priced(question, facts, settings).estimate.step_s > theirs


@published("leaf")
def test_the_tree_leads_to_the_published_layout(question: Question, facts: Facts) -> None:
    trace = walk(CostModel(facts), POLICY)
    assert trace.leaf == question["leaf"]
    assert in_leaf(priced(question, facts, question["plan"]).plan, trace)


@published("choice", "search")
def test_the_choice_is_no_slower_than_the_published_layout(
    question: Question, facts: Facts
) -> None:
    """By our own price. A simpler plan is taken within the margin of the fastest."""
    theirs = priced(question, facts, question["plan"])
    decision = choose(facts)
    assert decision.fastest_s is not None
    usable = POLICY.usable_bytes(facts.cluster.device)
    assert decision.estimate.peak_high_bytes <= usable
    if theirs.fits:
        assert decision.fastest_s <= theirs.estimate.step_s
        limit_s = theirs.estimate.step_s * (1 + POLICY.simplicity_margin)
        assert decision.estimate.step_s <= limit_s


# Layouts that no engine of ours runs


def t4(*, pp: int, tp: int, dp: int, microbatch: int) -> Case:
    row = TableRow(
        row_id="t4",
        source="amp",
        source_date="2022-10",
        model_name="gpt2-345m",
        arch="dense_gpt",
        n_layers=24,
        hidden=1024,
        n_heads=16,
        vocab=52256,
        seq_len=1024,
        gpu_type="T4-16GB",
        gpus_per_node=4,
        n_gpus=16,
        intra_link="PCIe3 x8/x16 (g4dn.12xlarge)",
        inter_link="Ethernet 50Gb (g4dn.12xlarge)",
        inter_gbps_per_node=50,
        dtype="fp16",
        dp=dp,
        tp=tp,
        pp=pp,
        microbatch=microbatch,
        global_batch=32,
        pp_schedule="1f1b" if pp > 1 else None,
        recompute="full",
        zero_stage="0",
    )
    setup = resolve(row)
    assert isinstance(setup, Setup), setup.reason
    return case_of(setup)


def step_of(layout: dict[str, Any]) -> float:
    return t4(**{k: v for k, v in layout.items() if k != "step_s"}).estimate().step_s


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, id=str(layout)) for layout in TABLE["t4"]["layouts"]],
)
def test_layouts_on_t4_are_priced_near_their_steps(layout: dict[str, Any]) -> None:
    assert step_of(layout) == pytest.approx(layout["step_s"], rel=TOLERANCE)


def test_layouts_on_t4_are_ordered_as_measured() -> None:
    layouts = TABLE["t4"]["layouts"]
    assert sorted(layouts, key=step_of) == layouts


@pytest.mark.xfail(
    strict=True,
    reason="up to 11 GiB of 13.8 usable; the authors say that it failed, not that memory was short",
)
def test_a_layout_that_ran_out_of_memory_on_t4_does_not_fit() -> None:
    case = t4(**TABLE["t4"]["too_large"])
    assert not case.estimate().fits(POLICY.usable_bytes(case.facts.cluster.device))


# Answers without a number


def choice(
    model: str | dict[str, Any], cluster: str, folder: Path, *, batch: int, seq: int | None = None,
    precision: str = "bf16",
) -> Decision:  # fmt: skip
    kind = "config" if isinstance(model, dict) else "model"
    question = {"name": "", kind: model, "cluster": cluster, "seq": seq, "precision": precision}
    profile = model_of(question, folder)
    workload = Workload(
        global_batch_size=batch, tokens_per_sample=profile.tokens_per_sample, precision=precision
    )
    return choose(Facts(model=profile, cluster=resolve_cluster(cluster), workload=workload))


def llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> dict[str, Any]:
    """The shape of a published Llama 2."""
    return {
        "model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": ffn,
        "vocab_size": 32000, "max_position_embeddings": 4096,
    }  # fmt: skip


LLAMA_7B = llama(32, 4096, 32, 32, 11008)
LLAMA_13B = llama(40, 5120, 40, 40, 13824)
LLAMA_70B = llama(80, 8192, 64, 8, 28672)
VIT_B = {
    "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 768,
    "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
    "image_size": 224, "patch_size": 16,
}  # fmt: skip


def test_7b_does_not_train_on_a_card_of_24_gb_but_its_adapters_do(tmp_path: Path) -> None:
    with pytest.raises(NoPlanError) as error:
        choice(LLAMA_7B, "1xRTX-4090-24GB", tmp_path, batch=8, seq=2048)
    assert "nothing fits" in error.value.what
    (hint,) = [hint for hint in error.value.hints if "LoRA" in hint]
    needed = float(hint.split("up to ")[1].split(" GiB")[0])
    assert needed < 24e9 / 2**30


def test_70b_in_fp32_on_8_cards_of_40_gb_does_not_fit_and_more_of_them_do(tmp_path: Path) -> None:
    with pytest.raises(NoPlanError) as error:
        choice(LLAMA_70B, "8xA100-SXM-40GB", tmp_path, batch=8, seq=4096, precision="fp32")
    # 16 bytes a parameter are 1,028 GiB: 32 devices hold 1,200, too little for activations.
    (hint,) = [hint for hint in error.value.hints if hint.startswith("take 64 devices")]
    assert "TP over 8" in hint or "FSDP" in hint


def test_13b_on_a_node_is_sharded_without_stages_or_split_layers(tmp_path: Path) -> None:
    decision = choice(LLAMA_13B, "8xA100-SXM-80GB", tmp_path, batch=64, seq=4096)
    assert decision.plan.data_parallel.is_sharded
    assert decision.plan.pp == decision.plan.tp == 1
    assert decision.trace.leaf == "shard-or-split"


def test_vit_on_a_node_with_nvlink_is_replicated(tmp_path: Path) -> None:
    decision = choice(VIT_B, "dgx1-v100", tmp_path, batch=512, precision="fp32")
    assert decision.plan.data_parallel is DataParallel.REPLICATE
    assert decision.trace.leaf == "replicate"


def test_over_slow_ethernet_no_parameters_are_gathered_between_nodes(tmp_path: Path) -> None:
    path = tmp_path / "ethernet.toml"
    path.write_text(
        'nodes = 4\ndevices_per_node = 8\naccelerator = "A100-SXM-80GB"\n'
        '[inter]\nlink = "ethernet-10"\n'
    )
    decision = choice(LLAMA_13B, str(path), tmp_path, batch=256, seq=4096)
    plan = decision.plan
    assert decision.trace.leaf == "everything"
    assert plan.pp > 1 or plan.dp_replicate > 1
    assert plan.dp_shard * plan.tp * plan.cp <= 8
