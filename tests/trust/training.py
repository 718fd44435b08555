"""Claims that a plan trains as one process does."""

from __future__ import annotations

from collections import Counter

from tests.fuzz_modules.results import REPORT as FUZZED
from tests.fuzz_modules.results import FuzzedModules
from tests.fuzz_modules.results import Outcome as Fuzzed
from tests.matrix.results import RESULTS as MATRIX
from tests.matrix.results import Cell, Outcome, Results
from tests.trust.claim import Answer, Claim, listed
from tests.zoo_classes.results import RESULTS as ZOO
from tests.zoo_classes.results import Classes


def _matrix(results: Results) -> Answer:
    cells = results.cells
    rows, columns = ({getattr(c, name) for c in cells} for name in ("architecture", "plan"))
    trained = [cell for cell in cells if cell.outcome is Outcome.TRAINED]
    worst = max(max(c.loss_error or 0.0, c.gradient_error or 0.0) for c in trained)
    return Answer(
        f"{len(trained)} of {len(cells)} trainings, {len(rows)} architectures under {len(columns)}"
        f" plans: loss and every gradient within {worst:.0e}, relative, of one process (fp32)",
        _others(cells),
    )


def _zoo(classes: Classes) -> Answer:
    cells = classes.cells
    names = {cell.architecture for cell in cells}
    plans = ", ".join(dict.fromkeys(cell.plan for cell in cells))
    trained = sum(cell.outcome is Outcome.TRAINED for cell in cells)
    untried = classes.classes - len(names) - len(classes.not_counted)
    return Answer(
        f"{trained} of {len(cells)} trainings, {len(names)} model classes of transformers"
        f" {classes.transformers} made small, under {plans}",
        f"{_others(cells)}; {len(classes.not_counted)} classes that one process cannot train as"
        f" they are built; {untried:,} of {classes.classes:,} not tried yet",
    )


def _others(cells: tuple[Cell, ...]) -> str:
    """Refusals by rule, and what is worse."""
    rules = Counter(cell.rule for cell in cells if cell.outcome is Outcome.REFUSED)
    wrong = [
        f"{cell.architecture} under {cell.plan} {cell.outcome}"
        for cell in cells
        if cell.outcome not in (Outcome.TRAINED, Outcome.REFUSED)
    ]
    by_rule = ", ".join(f"`{rule}` {count}" for rule, count in rules.most_common())
    return (
        f"{rules.total()} refused{f' ({by_rule})' if by_rule else ''},"
        f" {len(wrong)} wrong{f' ({listed(wrong)})' if wrong else ''}"
    )


def _fuzzed(modules: FuzzedModules) -> Answer:
    outcomes: Counter[str] = Counter()
    for each in modules.plans:
        outcomes.update(each.outcomes)
    refused = "; ".join(
        f"{each.outcomes[Fuzzed.REFUSED]} under `{each.plan}`"
        for each in modules.plans
        if each.outcomes.get(Fuzzed.REFUSED)
    )
    return Answer(
        f"{outcomes[Fuzzed.TRAINED]} of {outcomes.total()} trainings, {modules.programs} random"
        f" modules under {len(modules.plans)} plans",
        f"{outcomes[Fuzzed.REFUSED]} refused before a step ({refused}), {len(modules.wrong)} wrong",
    )


CLAIMS = (
    Claim("Does it train as one process does?", "make matrix", MATRIX, Results.load, _matrix),
    Claim("... any model of the hub?", "make zoo", ZOO, Classes.load, _zoo),
    Claim("... any module at all?", "make fuzz-modules", FUZZED, FuzzedModules.load, _fuzzed),
)
