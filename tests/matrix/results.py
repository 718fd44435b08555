"""Results of the cells: a file that is written as the matrix runs."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from pydantic import NonNegativeFloat

from profiles.record import Document, Record

RESULTS = Path(__file__).with_name("results.json")


class Outcome(StrEnum):
    """The first two are the only ones that are right."""

    TRAINED = "trained"  # as on one process, within the tolerance
    REFUSED = "refused"  # by legality, before any work
    DIFFERED = "differed"  # ran, with other numbers
    FAILED = "failed"  # crashed, or did not end


ALLOWED = (Outcome.TRAINED, Outcome.REFUSED)


class Cell(Record):
    """One architecture under one plan.

    Attributes:
        settings: the whole plan, as `Plan.parse` reads it.
        loss_error, gradient_error: relative, the largest over the ranks; None where nothing ran.
        worst_gradient: the parameter with the largest error.
        rule: of legality; "" unless refused.
        text: why it was refused, or how it failed.
    """

    architecture: str
    plan: str
    settings: str
    outcome: Outcome
    loss_error: NonNegativeFloat | None = None
    gradient_error: NonNegativeFloat | None = None
    worst_gradient: str = ""
    rule: str = ""
    text: str = ""


class Results(Document):
    """Cells in the order of rows and columns.

    Attributes:
        torch, transformers: the versions that it ran with.
    """

    torch: str
    transformers: str
    cells: tuple[Cell, ...] = ()

    def with_cells(
        self, cells: Iterable[Cell], *, rows: Iterable[str], columns: Iterable[str]
    ) -> Results:
        """These cells in the place of older ones; cells of no row or column are dropped."""
        results = {(c.architecture, c.plan): c for c in (*self.cells, *cells)}
        columns = tuple(columns)
        order = [(row, column) for row in rows for column in columns]
        return self.model_copy(
            update={"cells": tuple(results[key] for key in order if key in results)}
        )

    def by_place(self) -> dict[tuple[str, str], Cell]:
        """By (architecture, plan)."""
        return {(cell.architecture, cell.plan): cell for cell in self.cells}
