"""`make scorecard-nested`: files that were never looked at while rules were chosen, scored once."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from random import Random
from typing import Any

from profiles.errors import AdvisorError, InputError
from tests.scorecard import table
from tests.scorecard.__main__ import RESULT, values
from tests.scorecard.left_out import scored, unseen
from tests.scorecard.model import MODEL, Model
from tests.scorecard.published import FOLDER, ROOT, Published, published
from tests.scorecard.rules import Rules, load
from tests.scorecard.score import card, marks

SEED = 14


def drawn(rules: Rules, seed: int = SEED) -> list[str]:
    """Half of the publishers, sorted."""
    names = sorted(rules.publishers)
    return sorted(Random(seed).sample(names, len(names) // 2))


def held_out_runs(rules: Rules, folder: Path | None, visible: Path) -> list[Published]:
    """The runs of the drawn publishers, from a folder of their own.

    Raises:
        InputError: no folder is named, it has none of their files, or one was in view.
    """
    names = drawn(rules)
    files = sorted(file for name in names for file in rules.publishers[name])
    listed = "\n".join(f"{file}.csv" for file in files)
    hint = f"move these out of {visible} before rules are chosen, then `--held-out FOLDER`:"
    if folder is None:
        raise InputError(
            f"no folder of held-out files (publishers {', '.join(names)})",
            where="--held-out", hints=[f"{hint}\n{listed}"],
        )  # fmt: skip
    if seen := sorted(file for file in files if (visible / f"{file}.csv").exists()):
        raise InputError(
            f"{', '.join(seen)}: in view while rules were chosen", where=str(visible),
            hints=["a run is nested only if the drawn files were out of view: move them first"],
        )  # fmt: skip
    runs = published(folder, files)
    if not runs:
        raise InputError("none of the drawn files", where=str(folder), hints=[f"{hint}\n{listed}"])
    return runs


def result(
    model: Model, rules: Rules, runs: Sequence[Published], commit: str, day: date
) -> dict[str, Any]:
    """The nested scorecard: constants, ranges and rules as they are in the code."""
    names = drawn(rules)
    files = {file for name in names for file in rules.publishers[name]}
    rows = scored(model, rules, runs, model.calibration, names)
    present = Counter(run.file for run in runs)
    return {
        "date": day.isoformat(),
        "seed": SEED,
        "commit": commit,
        "drawn": names,
        "files": dict(sorted(present.items())),
        "absent": sorted(files - present.keys()),
        "calibration": values(model.calibration, rules),
        "card": card(rows),
        "unseen": card(unseen(rules, rows)),
        "marks": marks(card(rows)["all"]),
    }


def clean_commit(root: Path = ROOT) -> str:
    """The commit that is checked out.

    Raises:
        InputError: tracked files differ from it, so that it does not say what was scored.
    """
    if changed := _git(root, "status", "--porcelain", "--untracked-files=no"):
        raise InputError(
            "tracked files differ from the commit that would be named", where=changed,
            hints=["commit first"],
        )  # fmt: skip
    return _git(root, "rev-parse", "HEAD")


def main(arguments: Sequence[str], target: Path = table.NESTED) -> int:
    """Score once; a second run is refused, since what came out may have been learnt from."""
    parser = argparse.ArgumentParser(prog="python -m tests.scorecard.nested", description=__doc__)
    parser.add_argument("--held-out", type=Path, metavar="FOLDER", help="with the drawn files")
    folder = parser.parse_args(arguments).held_out
    try:
        rules = load()
        if target.exists():
            raise InputError(
                f"{target.name} is there: these files have been scored once", where=str(target),
                hints=["choose rules anew with another SEED out of view, then remove it"],
            )  # fmt: skip
        runs = held_out_runs(rules, folder, FOLDER)
        scorecard = result(MODEL, rules, runs, clean_commit(), date.today())
    except AdvisorError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    target.write_text(json.dumps(scorecard, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(table.nested(scorecard) + "".join(f"{line}\n" for line in scorecard["marks"]))
    if RESULT.is_file():
        table.write(json.loads(RESULT.read_text(encoding="utf-8")))
    return 0


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"`{' '.join(command)}` failed", where=done.stderr.strip())
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
