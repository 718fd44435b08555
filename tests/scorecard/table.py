"""The scorecard as a table of the README, between its marks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"
MARKED = re.compile(r"(<!-- scorecard: .*? -->\n).*?(<!-- end of scorecard -->)", re.DOTALL)
Scores = Mapping[str, Mapping[str, Mapping[str, float | None] | None]]


def table(result: Mapping[str, object]) -> str:
    """Markdown: one line a file, left-out figures after fitted ones."""
    fitted, left = result["fitted"], result["left out"]
    assert isinstance(fitted, dict)
    assert isinstance(left, dict)
    lines = [
        "| published runs | time: rows | median | 9 of 10 | memory: rows | median | 9 of 10 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in sorted(fitted, key=lambda file: (file != "all", file)):
        words = [name.replace("_", " ")]
        for part in ("time", "memory"):
            one, other = _errors(fitted[name], part), _errors(left[name], part)
            if one is None or other is None:
                words += ["", "", ""]
                continue
            words.append(f"{one['rows']:.0f}")
            words += [f"{one[key]:.1%}, {other[key]:.1%}" for key in ("median", "p90")]
        if any(words[1:]):
            lines.append("| " + " | ".join(words) + " |")
    return "\n".join(lines) + "\n\n" + _sentences(left["all"], result["constants"])


def _sentences(scores: Mapping[str, Mapping[str, float] | None], constants: object) -> str:
    time, memory = scores["time"], scores["memory"]
    choice, failed = scores["choice"], scores["failures, medium too"]
    high, every = scores["failures"], scores["failures, low too"]
    assert time is not None
    assert memory is not None
    assert choice is not None
    assert failed is not None
    assert high is not None
    assert every is not None
    return (
        f"Left out, {time['covered']:.0%} of times and {memory['covered']:.0%} of peaks lie in the"
        f" predicted range;\n{time['beyond']:.0%} and {memory['beyond']:.0%} lie above it. Runs out"
        f" of memory: recall {failed['recall']:.2f}, precision {failed['precision']:.2f}\n"
        f"({high['recall']:.2f} and {high['precision']:.2f} of rows of high reliability alone,"
        f" {every['recall']:.2f} and {every['precision']:.2f} with those of low).\n"
        f"Layouts of one model on the same devices ({choice['groups']} groups): rank correlation"
        f" {choice['correlation']:.2f}; the layout\npredicted as fastest takes"
        f" {choice['regret']:.1%} longer than the best on average. {constants} constants are"
        " fitted.\n"
    )


def write(result: Mapping[str, object]) -> None:
    """Put the table into the README."""
    text = README.read_text(encoding="utf-8")
    body = table(result)
    README.write_text(MARKED.sub(lambda match: match[1] + body + match[2], text), encoding="utf-8")


def _errors(
    scores: Mapping[str, Mapping[str, float] | None], part: str
) -> Mapping[str, float] | None:
    """Of high reliability; where a file has no such rows, of medium."""
    return scores[part] or scores[f"{part}, medium too"]
