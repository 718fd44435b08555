"""`make scorecard`: every published row predicted, with the constants and without its source."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from advisor.predict.constants import CONSTANTS, Constants
from advisor.predict.convnet_constants import FITTED as LAYERS
from advisor.predict.convnet_constants import ConvnetConstants
from advisor.predict.memory_constants import FITTED, MemoryConstants
from advisor.predict.prediction import predict
from tests.scorecard import fit_convnets, memory_fit, table
from tests.scorecard.fit import left_out, timed_runs
from tests.scorecard.memory_fit import as_published
from tests.scorecard.published import FOLDER, Published, published
from tests.scorecard.score import Pair, card

RESULT = Path(__file__).with_name("scorecard.json")


Without = dict[str, dict[str, dict[str, float]]]


def left_out_constants(runs: Sequence[Published]) -> Without:
    """The constants of each kind fitted without each file: kind -> file -> name -> value."""
    layered = fit_convnets.timed_runs(runs)
    layers = {
        file: fit_convnets.fit([one for one in layered if one.file != file])
        for file in sorted({one.file for one in layered})
    }
    held = memory_fit.left_out(memory_fit.held_runs(runs))
    return {
        "time": {file: asdict(found) for file, found in left_out(timed_runs(runs)).items()},
        "layers": {file: asdict(found) for file, found in layers.items()},
        "memory": {one.run.file: asdict(constants) for one, constants in held},
    }


def left_out_predictions(runs: Sequence[Published], without: Without) -> list[Pair]:
    """Every run predicted by constants that were not fitted to its file."""
    time = {file: Constants(**values) for file, values in without["time"].items()}
    layers = {file: ConvnetConstants(**values) for file, values in without["layers"].items()}
    memory = {file: MemoryConstants(**values) for file, values in without["memory"].items()}
    pairs = []
    for run in runs:
        told = predict(
            run.row,
            constants=time.get(run.file, CONSTANTS),
            layers=layers.get(run.file, LAYERS),
        )
        pairs.append((run, as_published(run, told, memory.get(run.file, FITTED))))
    return pairs


def main(arguments: Sequence[str]) -> int:
    """`--kept` scores again with the left-out constants of the last time."""
    if not FOLDER.is_dir():
        sys.stderr.write(f"no published runs at {FOLDER}: nothing to score\n")
        return 2
    runs = published()
    if "--kept" in arguments:
        without: Without = json.loads(RESULT.read_text(encoding="utf-8"))["without"]
    else:
        without = left_out_constants(runs)
    fitted = [(run, as_published(run, predict(run.row))) for run in runs]
    pairs = left_out_predictions(runs, without)
    by_layers = {f"layers {name}": value for name, value in asdict(LAYERS).items()}
    values = {**asdict(CONSTANTS), **asdict(FITTED), **by_layers}
    counts = [len(fields(kind)) for kind in (Constants, MemoryConstants, ConvnetConstants)]
    result = {
        "constants": sum(counts),
        "values": {key: float(f"{value:.6g}") for key, value in values.items()},
        "fitted": card(fitted),
        "left out": card(pairs),
        "without": without,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    table.write(result)
    for kind in ("fitted", "left out"):
        sys.stdout.write(f"== {kind}\n")
        for name, scores in result[kind].items():  # type: ignore[attr-defined]
            sys.stdout.write(f"{name:28s} {_line(scores)}\n")
    return 0


def _line(scores: dict[str, dict[str, float] | None]) -> str:
    words = []
    for part in ("time", "memory"):
        found = scores[part] or scores[f"{part}, medium too"]
        if found:
            words.append(
                f"{part} n{found['rows']:4d} median {found['median']:.3f} p90 {found['p90']:.3f}"
                f" in range {found['covered']:.2f} beyond {found['beyond']:.2f}"
            )
    found = scores["choice"]
    if found:
        words.append(f"layouts n{found['groups']} r {found['correlation']:.2f}"
                     f" regret {found['regret']:.3f}")  # fmt: skip
    for name in ("failures", "failures, medium too", "failures, low too"):
        found = scores[name]
        if found and found["recall"] is not None:
            precision = found["precision"] or 0
            words.append(f"{name}: recall {found['recall']:.2f} precision {precision:.2f}")
    return " | ".join(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
