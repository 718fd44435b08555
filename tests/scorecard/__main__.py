"""`make scorecard`: published rows predicted three ways, into scorecard.json and a README."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.scorecard import table
from tests.scorecard.calibrate import fit
from tests.scorecard.left_out import (
    Ranges,
    fits_without,
    left_out,
    ranges_without,
    scored,
    unseen,
)
from tests.scorecard.model import MODEL, Model, with_values
from tests.scorecard.published import FOLDER, Published, published
from tests.scorecard.rules import Rules, load
from tests.scorecard.score import card, marks

RESULT = Path(__file__).with_name("scorecard.json")
NEEDED = """\
No published runs at {folder}: nothing to score.

`make scorecard` needs CSV files there, named as under [publishers] of tests/scorecard/rules.toml,
one row a training run: `row_id`, what ran (columns of advisor.predict.rows.Row), `reliability`
(high, medium, low), and what was measured: `measured_step_time_s`, `step_time_derived_s`,
`samples_per_s` or `tokens_per_s_per_gpu`; `peak_mem_gib_per_gpu` and `mem_metric`; `oom` (y, n).
They are not part of this repository; {result} holds what came of them.
"""


def result(
    model: Model,
    rules: Rules,
    runs: Sequence[Published],
    without: Mapping[str, Mapping[str, Any]],
    spans: Mapping[str, Ranges],
) -> dict[str, Any]:
    """The scorecard of `runs`, by constants and ranges that were found without each publisher."""
    present = Counter(run.file for run in runs)
    plain = left_out(model, rules, runs, constants_of(model, without), spans)
    return {
        "files": dict(sorted(present.items())),
        "absent": sorted(set(rules.files()) - present.keys()),
        "constants": {
            "fitted": sum(prior.is_fitted for prior in rules.priors().values()),
            "literals": sum(rule.literals for rule in rules.rule),
        },
        "calibration": values(model.calibration, rules),
        "as they are": card(scored(model, rules, runs, model.calibration)),
        "left out": card(plain),
        "unseen": card(unseen(rules, plain)),
        "marks": marks(card(plain)["all"]),
        "without": without,
        "ranges without": spans,
    }


def constants_of(model: Model, without: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The calibrations with the values that were fitted without each publisher."""
    return {name: with_values(model.calibration, own) for name, own in without.items()}


def values(calibration: Any, rules: Rules) -> dict[str, float]:
    """The constants that have a prior."""
    return {name: getattr(calibration, name) for name in rules.priors()}


def main(arguments: Sequence[str]) -> int:
    """`--kept` scores again without new fits; `--fit` prints constants fitted to every file."""
    rules = load()
    runs = published(FOLDER)
    if not runs:
        sys.stderr.write(NEEDED.format(folder=FOLDER, result=RESULT.name))
        return 2
    model = MODEL.remembering()
    if "--fit" in arguments:
        best = fit(model, runs, rules.priors(), rules.read)
        for name, value in values(best, rules).items():
            sys.stdout.write(f"    {name}: float = {value:g}\n")
        return 0
    if "--kept" in arguments:
        saved = json.loads(RESULT.read_text(encoding="utf-8"))
        without, spans = saved["without"], saved["ranges without"]
    else:
        fits = fits_without(model, rules, runs)
        without = {name: values(fitted, rules) for name, fitted in fits.items()}
        spans = ranges_without(model, rules, runs, fits)
    scorecard = result(model, rules, runs, without, spans)
    RESULT.write_text(json.dumps(scorecard, indent=1) + "\n", encoding="utf-8")
    table.write(scorecard)
    sys.stdout.write(table.text(scorecard))
    sys.stdout.write("".join(f"left out, {line}\n" for line in scorecard["marks"]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
