"""The report: 80 columns, the same words everywhere, no speed for what does not fit."""

from __future__ import annotations

import html
import io
import re

import pytest
from rich.console import Console

from advisor.choose import choose
from advisor.decision import Decision
from advisor.report.html import page
from advisor.report.terminal import WIDTH
from advisor.report.view import view_of
from profiles.model import ModelProfile
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
        "offload_1": choose(facts(MIDDLE, gpus(1, 1, memory_gib=10), batch=8)),
        "chain_cpu": choose(
            facts(unused, cpus(2), batch=8, precision="fp32"), pins={"microbatch_size": 1}
        ),
    }


DECISIONS = decisions()
each = pytest.mark.parametrize("name", DECISIONS)


@each
def test_the_report_is_as_it_was(name: str) -> None:
    check(f"report_{name}.txt", f"{DECISIONS[name]}\n")


@each
def test_no_line_is_wider_than_80_columns(name: str) -> None:
    assert max(map(len, str(DECISIONS[name]).splitlines())) <= WIDTH


def printed(decision: Decision, **options: object) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=str(options.pop("encoding", "utf-8")))
    console = Console(file=stream, width=80, highlight=False, **options)  # type: ignore[arg-type]
    console.print(decision)
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


def test_colour_is_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_the_page_says_what_the_terminal_says(name: str) -> None:
    view, found = view_of(DECISIONS[name]), words_of(page(DECISIONS[name]))
    shown = " ".join(str(DECISIONS[name]).split())
    said = [view.step, view.rate, view.memory, view.memory_title, view.weighed, view.next_command]
    said += [*view.reasons, *view.hints, *view.plan, view.devices]
    said += [part.value for part in (*view.memory_parts, *view.time_parts)]
    for sentence in said:
        sentence = " ".join(sentence.split())
        assert sentence in found
        assert sentence in shown
    for row in view.others:
        assert " ".join((row.title, row.step, row.memory, row.why)) in found


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
    """A model whose modules are named by somebody unkind."""
    model = transformer()
    first, *rest = model.units
    last = rest[-3].model_copy(update={"name": "<script>alert(1)</script>\x1b[31m"})
    return model.model_copy(
        update={"name": "<b>bold</b>", "units": (first, *rest[:-3], last, *rest[-2:])}
    )


def test_names_of_modules_are_text_and_nothing_else() -> None:
    # The fullest moment is in the unit with that name, so the report speaks of it.
    decision = choose(facts(hostile()))
    assert "<script>" in decision.estimate.phase
    text = page(decision)
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "<b>bold" not in text
    assert "\x1b" not in str(decision)
    assert "[31m" in str(decision)


def test_measured_machines_need_no_hint_to_measure() -> None:
    cluster = cpus(2)
    assert cluster.intra is not None
    link = cluster.intra.model_copy(update={"bandwidth_bytes_per_s": exact(1e9)})
    measured = cluster.model_copy(update={"intra": link})
    decision = choose(facts(chain(), measured, batch=8, precision="fp32"))
    assert "advise probe" not in str(decision)


def test_families_without_an_engine_are_named() -> None:
    assert view_of(DECISIONS["7b_2x8"]).not_built == "not built yet: PP + TP + DP"


def test_batch_norms_in_microbatches_are_pointed_out() -> None:
    assert "its statistics are of microbatches of 1" in " ".join(
        str(DECISIONS["chain_cpu"]).split()
    )
