"""The scorecard as tables of the tests' README, between its marks; the nested run first."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.scorecard.score import headline

README = Path(__file__).resolve().parents[1] / "README.md"
NESTED = Path(__file__).with_name("nested.json")
MARKED = re.compile(r"(<!-- scorecard: .*? -->\n).*?(<!-- end of scorecard -->)", re.DOTALL)
WAYS = ("as they are", "left out", "unseen")
Card = Mapping[str, Any]


def text(result: Card) -> str:
    """Markdown of scorecard.json's content, and of nested.json where there is one."""
    card = json.loads(NESTED.read_text(encoding="utf-8")) if NESTED.is_file() else None
    parts = [nested(card) if card else "No nested run has been scored yet.\n"]
    parts.append(
        "Median / 9 of 10 in %, with constants as they are; with the row's publisher left out of"
        " the fit; and of\nthose, the rows whose rules were all chosen without it.\n"
    )
    parts.append(_rows({way: result[way] for way in WAYS}))
    parts.append(_sentences("With publishers left out of the fit", result["left out"]))
    if not result["unseen"]["all"]["rows"]:
        parts.append("No row is unseen: each rests on a rule chosen with its publisher in view.\n")
    constants = result["constants"]
    parts.append(
        f"{constants['fitted']} constants are fitted, {constants['literals']} literals were chosen"
        " on published rows.\n"
    )
    if result["absent"]:
        names = ", ".join(name.replace("_", " ") for name in result["absent"])
        parts.append(f"Not among these files: {names}.\n")
    return "\n".join(parts)


def write(result: Card) -> None:
    """Put the tables into the README."""
    body, whole = text(result), README.read_text(encoding="utf-8")
    README.write_text(MARKED.sub(lambda match: match[1] + body + match[2], whole), encoding="utf-8")


def nested(run: Card) -> str:
    """Markdown of nested.json's content."""
    return "\n".join(
        (
            f"Nested run of {run['date']} (commit {run['commit'][:10]}): rules and constants were"
            f" fixed without the files of\n{', '.join(run['drawn'])} (drawn with seed"
            f" {run['seed']}), which were then scored once. Median / 9 of 10 in %.\n",
            _rows({"nested": run["card"], "unseen": run["unseen"]}),
            _sentences("Nested", run["card"]),
        )
    )


def _rows(cards: Mapping[str, Card]) -> str:
    """One line a file: rows with a time, errors by way; the same of memory."""
    heads = [f"{part}: {head}" for part in ("time", "memory") for head in ("rows", *cards)]
    lines = [f"| published runs | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    first = next(iter(cards.values()))
    for name in ("all", "all, medium too", *first["files"]):
        cells = []
        for part in ("time", "memory"):
            results = [_errors(card, name, part) for card in cards.values()]
            cells.append(f"{results[0]['rows']}" if results[0] else "")
            cells += [_shares(one) for one in results]
        if any(cells):
            lines.append(f"| {name.replace('_', ' ')} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _errors(card: Card, name: str, part: str) -> Mapping[str, Any] | None:
    if name == "all, medium too":
        actual: Mapping[str, Any] | None = card["all"]["medium too"][part]
        return actual
    scores = card["all"] if name == "all" else card["files"].get(name)
    return headline(scores, part) if scores else None


def _shares(errors: Mapping[str, Any] | None) -> str:
    return f"{100 * errors['median']:.1f} / {100 * errors['p90']:.1f}" if errors else ""


def _sentences(title: str, card: Card) -> str:
    lines = []
    for part, name in (("time", "times"), ("memory", "peaks")):
        if (actual := headline(card["all"], part)) is not None:
            kinds = ", ".join(
                f"{kind} {errors['covered']:.0%}"
                for kind, scores in card["kinds of stack"].items()
                if (errors := headline(scores, part)) is not None
            )
            lines.append(
                f"{actual['covered']:.0%} of {name} lie in the predicted range,"
                f" {actual['beyond']:.0%} above it (by stack: {kinds})."
            )
    failed = headline(card["all"], "failures")
    if failed is not None and failed["failed"]:
        lines.append(
            f"Of {failed['failed']} runs out of memory: recall {_or_none(failed['recall'])},"
            f" precision {_or_none(failed['precision'])}."
        )
    if (choice := headline(card["all"], "choice")) is not None:
        lines.append(
            f"Layouts of one model on the same devices ({choice['groups']} groups): rank"
            f" correlation {choice['correlation']:.2f}; the layout predicted as fastest takes"
            f" {choice['regret']:.1%} longer than the best on average."
        )
    if card["no answer"]:
        reasons = "; ".join(f"{count} {reason}" for reason, count in card["no answer"].items())
        lines.append(f"Rows without an answer: {reasons}.")
    return f"{title}:\n" + "".join(f"* {line}\n" for line in lines)


def _or_none(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"
