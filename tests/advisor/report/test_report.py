"""The report: 80 columns, the same words in every format, no speed for plans that do not fit."""

from __future__ import annotations

import html
import io
import re

import pytest
from rich.console import Console

from advisor.decide.choose import choose
from advisor.decide.decision import Decision
from advisor.inputs.facts import Facts
from advisor.inputs.networks import network_profile
from advisor.report.html import fragment, page
from advisor.report.terminal import WIDTH, lines
from advisor.report.view import ReportView, view_of
from advisor.whatif.why_not import WhyNot
from engines.plan import PartialPlan
from profiles.machine.clusters import resolve_cluster
from profiles.model.profile import ModelProfile
from profiles.model.source import CaptureSource, ValueRead
from profiles.workload.workload import Workload
from tests.factories import chain, cpus, exact, facts, gpus, transformer
from tests.golden import check

MIDDLE = transformer(name="middle", layers=8, hidden=2048, ffn=5504, tokens=4096)


def decisions() -> dict[str, Decision]:
    unused = chain().model_copy(update={"batch_norms": ("layers.0.norm",)})
    return {
        "7b_2x8": choose(facts()),
        "middle_1x8": choose(facts(MIDDLE, gpus(1, 8), batch=64)),
        "middle_slow_network": choose(
            facts(MIDDLE, gpus(2, 4, memory_gib=18, inter_bytes_per_s=4e9), batch=64)
        ),
        "offload_1": choose(facts(MIDDLE, gpus(1, 1, memory_gib=9), batch=8)),
        "chain_cpu": choose(
            facts(unused, cpus(2), batch=8, precision="fp32"),
            partial=PartialPlan(microbatch_size=1),
        ),
    }


DECISIONS = decisions()
each = pytest.mark.parametrize("name", DECISIONS)


@each
def test_the_report_equals_its_golden_file(name: str) -> None:
    check(f"report_{name}.txt", f"{DECISIONS[name]}\n")


@each
def test_no_line_is_wider_than_80_columns(name: str) -> None:
    assert max(map(len, str(DECISIONS[name]).splitlines())) <= WIDTH


def printed(decision: Decision | WhyNot, *, columns: int = 80, **options: object) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=str(options.pop("encoding", "utf-8")))
    console = Console(file=stream, width=columns, highlight=False, **options)  # type: ignore[arg-type]
    console.print(decision, crop=False)
    stream.flush()
    stream.seek(0)
    return stream.read()


@each
def test_a_pipe_gets_the_same_words_without_escape_codes(name: str) -> None:
    text = printed(DECISIONS[name])
    assert "\x1b" not in text
    plain = str.maketrans({"█": "#", "░": "-"})
    assert [line.rstrip() for line in text.translate(plain).splitlines()] == str(
        DECISIONS[name]
    ).splitlines()


def test_colour_is_for_terminals_without_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    decision = DECISIONS["7b_2x8"]
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[32m" in printed(decision, force_terminal=True, color_system="standard")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in printed(decision, force_terminal=True, color_system="standard")


def test_an_ascii_stream_gets_ascii() -> None:
    named = MIDDLE.model_copy(update={"name": "modèle"})
    text = printed(choose(facts(named, gpus(1, 8), batch=64)), encoding="ascii")
    assert text.isascii()
    assert "####" in text
    assert "mod?le" in text


@each
def test_a_plan_that_does_not_fit_shows_no_speed(name: str) -> None:
    decision = DECISIONS[name]
    view = view_of(decision)
    for row, other in zip(view.others, decision.alternatives, strict=True):
        assert (row.step == "-") == row.why.startswith("does not fit")
        assert (row.step == "-") == (other.peak_high_bytes > usable(decision))


def usable(decision: Decision) -> float:
    return decision.policy.usable_bytes(decision.facts.cluster.device)


def words_of(markup: str) -> str:
    without = re.sub(r"<(style|svg)\b.*?</\1>", " ", markup, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", without)).split())


@each
def test_the_page_has_the_words_of_the_terminal(name: str) -> None:
    view, words = view_of(DECISIONS[name]), words_of(page(DECISIONS[name]))
    shown = " ".join(str(DECISIONS[name]).split())
    said = [view.step, view.rate, view.memory, view.memory_title, view.weighed, view.next_command]
    said += [*view.reasons, *view.hints, *view.plan, *view.batch, view.devices]
    said += [part.value for part in (*view.memory_parts, *view.time_parts)]
    said += filter(None, (*view.main_memory, view.memory_note, view.ties))
    for sentence in said:
        sentence = " ".join(sentence.split())
        assert sentence in words
        assert sentence in shown
    for row in view.others:
        assert " ".join((row.title, row.cut, row.step, row.memory, row.why)) in words


def test_the_notebook_gets_the_same_body_as_the_page() -> None:
    decision = DECISIONS["7b_2x8"]
    fragment = decision._repr_html_()
    assert fragment.strip() in page(decision)
    assert "<html" not in fragment


def test_the_page_needs_no_script_and_no_network_and_is_small() -> None:
    text = page(DECISIONS["7b_2x8"])
    assert "<script" not in text
    assert not re.search(r"https?://|@import|url\(", text)
    assert len(text.encode()) < 300_000


def hostile() -> ModelProfile:
    """A model whose names contain markup and escape codes."""
    model = transformer()
    first, *rest = model.units
    last = rest[-3].model_copy(update={"name": "<script>alert(1)</script>\x1b[31m"})
    return model.model_copy(
        update={"name": "<b>bold</b>", "units": (first, *rest[:-3], last, *rest[-2:])}
    )


def gib(words: str) -> float:
    number, unit = words.split()
    return float(number) * {"GiB": 1.0, "MiB": 2**-10, "KiB": 2**-20}[unit]


def seconds(words: str) -> float:
    number, unit = words.split()
    return float(number) * {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit]


AMOUNT = r"[\d.]+ (?:GiB|MiB|KiB)"
SPAN = r"[\d.]+ (?:s|ms|us|ns)\b"


@each
def test_states_in_the_sentence_are_the_states_in_the_table(name: str) -> None:
    view = view_of(DECISIONS[name])
    if "where the optimizer runs" in view.reasons[0]:
        said = re.search(rf"holds ({AMOUNT}) of gradients", view.reasons[0])
    else:
        said = re.search(rf"({AMOUNT}) at the step's peak", view.reasons[0])
        said = said or re.search(rf"holds ({AMOUNT}) of them$", view.reasons[0])
    assert said is not None
    states = ("parameters", "gradients", "optimizer")
    table = sum(gib(part.value) for part in view.memory_parts if part.name in states)
    assert gib(said[1]) == pytest.approx(table, rel=0.01)


@each
def test_the_parts_of_a_slowdown_add_up_to_it(name: str) -> None:
    decision = DECISIONS[name]
    for row in view_of(decision).others:
        if not row.why.startswith("+"):
            continue
        lost = seconds(row.step) - decision.estimate.step_s
        total = re.match(rf"\+[\d.]+%, ({SPAN}):", row.why)
        assert total is not None
        signs = {"more": 1, "less": -1}
        parts = re.findall(rf"({SPAN}) (more|less)", row.why)
        assert seconds(total[1]) == pytest.approx(lost, abs=0.006 * seconds(row.step))
        added = sum(signs[sign] * seconds(part) for part, sign in parts)
        assert added == pytest.approx(seconds(total[1]), rel=0.06)


@each
@pytest.mark.parametrize("width", [40, 60, 71, 72])
def test_a_narrow_terminal_gets_the_same_words_in_its_width(name: str, width: int) -> None:
    view = view_of(DECISIONS[name])
    narrow = [line.text for line in lines(view, blocks=False, width=width)]
    assert max(map(len, narrow)) <= width
    assert set("".join(str(DECISIONS[name]).split())) - {"#"} <= set("".join(narrow))
    words = " ".join(" ".join(narrow).split())
    for sentence in (*view.reasons, *view.hints, view.weighed, view.rate):
        assert " ".join(sentence.split()) in words
    if width < 72:
        for row in view.others:
            assert " ".join(row.why.split()) in words


def test_plans_are_wrapped_at_words_on_a_terminal_and_never_in_a_pipe() -> None:
    answer = DECISIONS["7b_2x8"].why_not("zero=0")
    assert answer.plan is not None
    line = f"  best plan with it: {answer.plan}"
    assert line in printed(answer, columns=50).splitlines()
    narrow = printed(answer, columns=50, force_terminal=True).splitlines()
    assert max(map(len, narrow)) <= 50
    assert set(str(answer.plan).split()) <= set(" ".join(narrow).split())


def test_offloaded_states_are_compared_with_main_memory_and_transfers_named() -> None:
    text = str(DECISIONS["offload_1"])
    # 16 bytes for each of 0.54 B parameters; a third of 2,048 GiB is left free.
    needed = 16 * MIDDLE.parameters / 2**30
    assert f"main memory per node: {needed:.2f} GiB of 1365.3 GiB usable" in text
    assert "transfers to the host 1" in text
    assert "communication" not in text


def test_loading_is_compared_with_main_memory_and_has_hints() -> None:
    assert "main memory a node to load 8 copies: 16.0 GiB of 1365.3 GiB usable" in str(
        DECISIONS["middle_1x8"]
    )
    whole = MIDDLE.parameter_bytes
    # Two thirds are usable: room for three of eight copies.
    cluster = gpus(1, 8).model_copy(update={"host_memory_bytes": exact(3.5 * whole * 3 / 2)})
    view = view_of(choose(facts(MIDDLE, cluster, batch=64)))
    (hint,) = [h for h in view.hints if "deferred" in h]
    # Each rank has one tensor at a time in main memory, at most the largest.
    largest = 8 * max(unit.parameter_bytes for unit in MIDDLE.units) / 2**30
    assert "no room to build the whole model each, 16.0 GiB of 6.99 GiB usable" in hint
    assert f"its own shards alone, {largest:.2f} GiB a node" in hint
    assert f"built under `advisor.deferred()`: {largest:.2f} GiB of 6.99 GiB usable" in str(
        view.main_memory
    )
    small = cluster.model_copy(update={"host_memory_bytes": exact(largest * 2**30 * 3 / 2 * 0.6)})
    (hint,) = [h for h in view_of(choose(facts(MIDDLE, small, batch=64))).hints if "deferred" in h]
    assert "start 4 ranks a node" in hint
    assert f"take nodes with {largest * 1.5:.2f} GiB" in hint
    enough = cluster.model_copy(update={"host_memory_bytes": exact(8 * whole * 3 / 2 + 8)})
    assert not any("deferred" in h for h in view_of(choose(facts(MIDDLE, enough, batch=64))).hints)


def test_the_logits_are_named_where_they_are_a_part_of_the_peak() -> None:
    decision = DECISIONS["middle_1x8"]
    note = view_of(decision).memory_note
    assert decision.estimate.phase == "forward of the loss"
    assert note is not None
    # MIDDLE's loss takes bf16 logits of 32,000 words and makes two copies in fp32.
    logits = (decision.plan.microbatch_size or 0) * 4096 * 32000 * 4
    assert f"the loss holds {2.5 * logits / 2**30:.2f} GiB: copies of the logits" in note
    assert view_of(DECISIONS["7b_2x8"]).memory_note is None


def test_other_plans_show_their_microbatch_and_recompute() -> None:
    decision = DECISIONS["middle_slow_network"]
    for row, other in zip(view_of(decision).others, decision.alternatives, strict=True):
        size, trick = other.plan.microbatch_size, other.plan.recompute
        assert row.cut.startswith(f"mb {size}")
        assert row.cut.endswith(f", {trick} recompute") == (trick != "none")


def test_small_numbers_are_not_rounded_to_zero() -> None:
    tiny = transformer(name="tiny", layers=2, hidden=64, ffn=128, vocab=100, tokens=16)
    text = str(choose(facts(tiny, gpus(1, 2), batch=2)))
    assert not re.search(r"\b0\.0+ (GiB|MiB|KiB|us|ms|s)\b", text)
    assert re.search(r"parameters [\d.]+ (KiB|MiB)", text)


def test_only_given_settings_have_the_source_you() -> None:
    said = {basis.source: basis.what for basis in view_of(DECISIONS["7b_2x8"]).basis}
    assert said["you"] == "global batch 128, bf16"
    assert said["the model's sample"] == "4096 tokens a sample"
    assert said["default"] == "adamw"


def test_more_ranks_than_cores_are_pointed_out() -> None:
    crowded = cpus(4).model_copy(update={"cores": 2})
    text = " ".join(str(choose(facts(chain(), crowded, batch=8, precision="fp32"))).split())
    assert "4 ranks take turns on 2 cores" in text
    roomy = cpus(4).model_copy(update={"cores": 4})
    assert "take turns" not in str(choose(facts(chain(), roomy, batch=8, precision="fp32")))


def test_names_of_modules_are_escaped() -> None:
    # The fullest moment is in the unit with that name, so the report speaks of it.
    decision = choose(facts(hostile()), partial=PartialPlan(zero=1))
    assert "<script>" in decision.estimate.phase
    text = page(decision)
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "<b>bold" not in text
    assert "\x1b" not in str(decision)
    assert "[31m" in str(decision)


def with_markup(value: object) -> object:
    """Data with markup behind every text."""
    match value:
        case str():
            return f"{value}<script>&"
        case dict():
            return {name: with_markup(each) for name, each in value.items()}
        case list() | tuple():
            return [with_markup(each) for each in value]
        case _:
            return value


def test_every_word_of_a_page_is_escaped() -> None:
    view = view_of(DECISIONS["7b_2x8"])
    words = view.model_dump() | {"dissent": "but", "ties": "ties", "not_weighed": "none"}
    words |= {"memory_note": "note", "notes": ["note"], "hints": ["hint"], "main_memory": ["GiB"]}
    assert all(value not in (None, [], ()) for value in words.values())
    text = fragment(ReportView.model_validate(with_markup(words)))
    assert "<script>" not in text
    assert text.count("&lt;script&gt;&amp;") > 100


def test_measured_machines_need_no_hint_to_measure() -> None:
    cluster = cpus(2)
    assert cluster.intra is not None
    link = cluster.intra.model_copy(update={"bandwidth_bytes_per_s": exact(1e9)})
    measured = cluster.model_copy(update={"intra": link})
    decision = choose(facts(chain(), measured, batch=8, precision="fp32"))
    assert "advise probe" not in str(decision)


def test_families_without_an_engine_are_named() -> None:
    """All families have engines now; older decisions still name those without."""
    assert view_of(DECISIONS["7b_2x8"]).not_weighed is None
    decision = DECISIONS["middle_slow_network"]
    assert view_of(decision).not_weighed is None
    trace = decision.trace.model_copy(update={"not_weighed": ("local SGD",)})
    before = decision.model_copy(update={"trace": trace})
    assert view_of(before).not_weighed == "not weighed yet: local SGD"


def test_offers_that_need_an_option_are_hints() -> None:
    """Lossy compression and asynchronous updates each need an option of their own."""
    lossy, stale = DECISIONS["middle_slow_network"].offers
    assert "--allow-lossy" in lossy
    assert "--allow-stale" in stale
    assert {lossy, stale} <= set(view_of(DECISIONS["middle_slow_network"]).hints)
    assert DECISIONS["7b_2x8"].offers == ()


def test_batch_norms_in_microbatches_are_pointed_out() -> None:
    assert "its statistics are of microbatches of 1" in " ".join(
        str(DECISIONS["chain_cpu"]).split()
    )


def test_convolutions_in_tf32_are_named_with_the_setting_that_makes_them_exact() -> None:
    def text(name: str, device: str, precision: str) -> str:
        workload = Workload(global_batch_size=64, precision=precision)
        cluster = resolve_cluster(f"1x{device}")
        model = network_profile(name, samples=1)
        return str(choose(Facts(model=model, cluster=cluster, workload=workload)))

    shown = text("resnet50-224px", "A100-SXM-80GB", "fp32")
    assert "convolutions of fp32: 156 TFLOP/s in TF32, as" in shown
    assert "`torch.backends.cudnn.allow_tf32` is by default" in shown
    assert "TF32" not in text("resnet50-224px", "A100-SXM-80GB", "bf16")
    assert "TF32" not in text("resnet50-224px", "V100-SXM2-16GB", "fp32")


def test_notes_on_the_machines_are_in_every_format() -> None:
    said = "nodes differ: the slowest counts & <is> said"
    noted = gpus(1, 8).model_copy(update={"notes": (said,)})
    decision = choose(facts(MIDDLE, noted, batch=64))
    assert f"note: {said}\n" in str(decision)
    assert f"<p>note: {html.escape(said)}</p>" in page(decision)
    assert Decision.from_json(decision.to_json()).facts.cluster.notes == (said,)


def test_settings_that_change_the_training_are_shown_as_typed() -> None:
    partial = PartialPlan.build({"updates": "asynchronous", "servers": 1, "max_staleness": 4})
    decision = choose(facts(chain(), gpus(2, 4), batch=7, precision="fp32"), partial=partial)
    degrees, updates, _ = view_of(decision).plan
    assert (degrees, updates) == (
        "dp_replicate=7",
        "updates=asynchronous servers=1 max_staleness=4",
    )
    assert len(view_of(DECISIONS["7b_2x8"]).plan) == 2  # nothing of the kind: no line


@pytest.mark.parametrize("setting", ["bucket_mib=50", "compile=true", "sync_batch_norm=true"])
def test_every_setting_that_is_fixed_is_in_the_plan(setting: str) -> None:
    partial = PartialPlan.parse(f"dp_replicate=8 {setting}")
    decision = choose(facts(MIDDLE, gpus(1, 8), batch=64), partial=partial)
    assert setting in " ".join(view_of(decision).plan)


def test_the_report_says_how_the_model_was_followed() -> None:
    read = ValueRead(unit="(glue)", line="net.py:7", operation="item")
    for source, words in {
        CaptureSource.RUN: "activations: counted in a run on the CPU, along the sample's path",
        CaptureSource.PARAMETERS: "activations: guessed from the shapes of parameters alone",
    }.items():
        model = MIDDLE.model_copy(update={"source": source, "reads": (read,)})
        view = view_of(choose(facts(model, gpus(1, 8), batch=64)))
        assert any(basis.what.startswith(words) for basis in view.basis)
        assert any("net.py:7 (item)" in hint for hint in view.hints)
