"""Results of the classes: a file that is written after each of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from pydantic import Field

from profiles.record import Document
from tests.matrix.results import Cell, Outcome

RESULTS = Path(__file__).parents[1] / "validation" / "zoo.json"
LONGEST = 400
"""Characters of a reason that are kept."""


class Classes(Document):
    """Cells by class, and the classes that one process does not train.

    Attributes:
        torch, transformers: the versions that it ran with.
        classes: how many the mappings of that transformers name.
        not_counted: reasons by class.
    """

    torch: str
    transformers: str
    classes: int
    cells: tuple[Cell, ...] = ()
    not_counted: dict[str, str] = Field(default_factory=dict)

    def with_class(self, name: str, answer: Iterable[Cell] | str) -> Classes:
        """With these cells, or this reason, in the place of what is known of the class."""
        rest = {other: why for other, why in self.not_counted.items() if other != name}
        if isinstance(answer, str):
            cells = tuple(c for c in self.cells if c.architecture != name)
            rest[name] = answer[:LONGEST]
            return self.model_copy(update={"cells": cells, "not_counted": rest})
        places = {(c.architecture, c.plan): c for c in self.cells}
        for cell in answer:
            text = cell.text if len(cell.text) <= LONGEST else f"... {cell.text[-LONGEST:]}"
            settings = "" if cell.outcome is Outcome.TRAINED else cell.settings[:LONGEST]
            places[name, cell.plan] = cell.model_copy(update={"text": text, "settings": settings})
        return self.model_copy(update={"cells": tuple(places.values()), "not_counted": rest})

    def known(self, name: str) -> set[str]:
        """Plans of which there is a cell; all, as "*", of a class that does not count."""
        return {c.plan for c in self.cells if c.architecture == name} | (
            {"*"} if name in self.not_counted else set()
        )


def counts(results: Classes, plans: Iterable[str]) -> str:
    """A line a plan: how many train, and the reasons of the others by frequency."""
    lines = [
        f"{len({c.architecture for c in results.cells})} classes count, {len(results.not_counted)}"
        f" do not, of {results.classes} (torch {results.torch},"
        f" transformers {results.transformers})"
    ]
    for plan in plans:
        cells = [c for c in results.cells if c.plan == plan]
        by_outcome = Counter(c.outcome.value for c in cells)
        trained = by_outcome["trained"]
        share = f"{100 * trained / len(cells):.1f} %" if cells else "-"
        rest = ", ".join(f"{n} {o}" for o, n in by_outcome.most_common() if o != "trained")
        lines.append(
            f"{plan}: {trained} of {len(cells)} train ({share}){'; ' if rest else ''}{rest}"
        )
        reasons = Counter(_reason(c) for c in cells if c.outcome is not Outcome.TRAINED)
        lines += [f"    {n} {why}" for why, n in reasons.most_common()]
    return "\n".join(lines)


def _reason(cell: Cell) -> str:
    """Without names and numbers, so that equal ones count together."""
    text = cell.text.splitlines()[-1] if cell.outcome is Outcome.FAILED and cell.text else cell.text
    text = text.splitlines()[0] if text else ""
    text = re.sub(r"[0-9]+", "n", re.sub(r"`[^`]*`", "`…`", text))
    return f"{cell.outcome.value} {cell.rule}: {text[:160]}"
