"""Predictions of what was measured, by today's code: no device is needed, measurements stay."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from advisor.cost import Estimate
from profiles.machine.clusters import cluster_from_name
from tests.gpu import gains, one_rank, training
from tests.gpu.predict import Predicted
from tests.gpu.results import CaseResult, Results, Row
from tests.gpu.setting import Setting

Steps = dict[str, Callable[[], Predicted]]
Changes = dict[str, Callable[[], tuple[Predicted, Predicted]]]


def predicted_again(results: Results) -> Results:
    """`results` with the predictions of steps, of ranks and of gains made anew."""
    assert results.bench is not None
    own = _setting(results)

    @functools.cache
    def of_host(launch_s: float | None) -> tuple[Steps, Steps, Changes]:
        setting = own.with_launches(launch_s)
        return (
            training.predicted_again(setting),
            one_rank.predicted_again(setting),
            gains.predicted_again(setting),
        )

    def again(case: CaseResult) -> CaseResult:
        if not case.rows:
            return case
        steps, ranks, changes = of_host(case.launch_s)
        if case.part == "c" and case.name in steps:
            terms = {term: of for term, (_, of) in training.TERMS.items()}
            return _of_one(case, steps[case.name](), terms)
        if case.part == "d" and case.name in ranks:
            return _of_one(case, ranks[case.name](), one_rank.TERMS)
        if case.part == "e" and case.name in changes:
            both = changes[case.name]()
            ratios = {term: gains.ratios(*both, of) for term, of in gains.TERMS.items()}
            return _with(case, ratios)
        return case

    return results.model_copy(update={"cases": tuple(map(again, results.cases))})


def _setting(results: Results) -> Setting:
    """The machine by its data sheet, as the probe finds it, and as it was timed."""
    assert results.bench is not None
    own = results.bench.device
    sheet = cluster_from_name(f"1x{own.name}")
    device = sheet.device.model_copy(update={"memory_bytes": own.memory_bytes})
    return Setting(torch.device("cuda"), sheet.model_copy(update={"device": device}), results.bench)


def _of_one(
    case: CaseResult, given: Predicted, terms: dict[str, Callable[[Estimate], float]]
) -> CaseResult:
    return _with(
        case,
        {
            term: (of(given.sheet), None if given.bench is None else of(given.bench))
            for term, of in terms.items()
        },
    )


def _with(case: CaseResult, figures: dict[str, tuple[float, float | None]]) -> CaseResult:
    def row(old: Row) -> Row:
        if old.term not in figures:
            return old
        from_sheet, from_bench = figures[old.term]
        return old.model_copy(update={"from_sheet": from_sheet, "from_bench": from_bench})

    return case.model_copy(update={"rows": tuple(map(row, case.rows))})
