"""A tenth of the matrix, run anew, and the whole of it as it was kept."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("transformers")

from tests.matrix.architectures import ARCHITECTURES
from tests.matrix.plans import PLANS
from tests.matrix.results import ALLOWED, RESULTS, Outcome, Results
from tests.matrix.run import RANKS, cells_of, start_ranks
from tests.nightly import half
from tests.workers import Pool


def tenth() -> dict[str, list[str]]:
    """Three cells of every column, so that every row has one and half of them have two."""
    rows, actual = list(ARCHITECTURES), dict[str, list[str]]()
    for number, column in enumerate(PLANS):
        for row in (2 * number, 2 * number + 1, 2 * number + 15):
            actual.setdefault(rows[row % len(rows)], []).append(column)
    return actual


def test_the_sampled_tenth_has_every_row_and_every_column() -> None:
    cells = [(row, column) for row, columns in tenth().items() for column in columns]
    assert len(set(cells)) == len(cells) == 45
    assert {row for row, _ in cells} == set(ARCHITECTURES)
    assert {column for _, column in cells} == set(PLANS)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    pool = Pool(RANKS)
    start_ranks(pool)
    yield pool
    pool.close()


@pytest.mark.dist
@pytest.mark.parametrize("row", half(tenth(), of=3))
def test_a_model_trains_like_one_process_or_is_refused(ranks: Pool, row: str) -> None:
    before = Results.load(RESULTS).by_place()
    for cell in cells_of(row, tenth()[row], ranks):
        assert cell.outcome in ALLOWED, cell
        if before[row, cell.plan].outcome is Outcome.TRAINED:
            assert cell.outcome is Outcome.TRAINED, cell


def test_the_saved_matrix_is_complete_and_every_cell_trains_or_is_refused() -> None:
    saved = Results.load(RESULTS)
    assert [(cell.architecture, cell.plan) for cell in saved.cells] == [
        (row, column) for row in ARCHITECTURES for column in PLANS
    ]
    assert len(saved.cells) == 450
    assert [cell for cell in saved.cells if cell.outcome not in ALLOWED] == []
    for cell in saved.cells:
        if cell.outcome is Outcome.REFUSED:
            assert cell.rule, cell
            assert cell.text, cell
