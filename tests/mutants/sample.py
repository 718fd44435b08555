"""Mutants: lines of the library with one operator or number changed, by cosmic-ray's operators."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path

from cosmic_ray.ast import get_ast
from cosmic_ray.mutating import MutationVisitor
from cosmic_ray.plugins import get_operator

PACKAGES = ("profiles", "engines", "advisor")
APART = ("advisor/tutorial", "advisor/predict")
"""Notebooks' helpers, and the scorecard's reader of published rows."""

_SWAPS = ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_Mul")
_BOUNDS = ("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is")
OPERATORS = (
    *(f"core/ReplaceBinaryOperator_{swap}" for swap in _SWAPS),
    *(f"core/ReplaceComparisonOperator_{bound}" for bound in _BOUNDS),
    "core/ReplaceUnaryOperator_Delete_Not",
    "core/ReplaceUnaryOperator_Delete_USub",
    "core/AddNot",
    "core/ReplaceTrueWithFalse",
    "core/ReplaceFalseWithTrue",
    "core/ReplaceAndWithOr",
    "core/ReplaceOrWithAnd",
    "core/ReplaceBreakWithContinue",
    "core/ZeroIterationForLoop",
    "core/NumberReplacer",
)
"""One counterpart of each: no type annotation has them, and few of them change nothing."""


@dataclass(frozen=True)
class Mutant:
    """A changed file.

    Attributes:
        path: of the file, relative to the root of the tree.
        text: its new content.
        diff: the lines that changed.
    """

    path: str
    operator: str
    text: str
    diff: str


def sampled(root: Path, *, seed: int) -> Iterator[Mutant]:
    """Yield different mutants without end: files by their lines, then operators alike."""
    draw = random.Random(seed)
    files = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    names = [str(path.relative_to(root)) for path in files]
    core = [
        (name, path.read_text())
        for name, path in zip(names, files, strict=True)
        if not name.startswith(APART) and path.name != "__init__.py"
    ]
    lines = [text.count("\n") for _, text in core]
    seen: set[tuple[str, str]] = set()
    while True:
        ((name, text),) = draw.choices(core, weights=lines)
        operator = draw.choice(OPERATORS)
        places = _places(text, operator)
        if not places:
            continue
        changed = _changed(text, operator, draw.randrange(places))
        if changed is None or (name, changed) in seen:
            continue
        seen.add((name, changed))
        diff = "".join(unified_diff(text.splitlines(True), changed.splitlines(True), n=0))
        if operator.endswith("NumberReplacer") and not _is_small(diff):
            continue  # limits and constants of the catalogue: 20,001 layers at most
        if (
            "strict=" in diff
            or "frozen=" in diff
            or re.search(r"^\+(.*[(,] */, | */,$)", diff, re.MULTILINE)
        ):
            continue  # guards, like types; a `*` that stands between parameters
        yield Mutant(path=name, operator=operator, text=changed, diff=diff)


def _places(text: str, operator: str) -> int:
    visitor = MutationVisitor(-1, get_operator(operator)())
    visitor.walk(get_ast(text))
    return int(visitor._count)


def _changed(text: str, operator: str, occurrence: int) -> str | None:
    changed: str | None = MutationVisitor.mutate_code(text, get_operator(operator)(), occurrence)
    return changed


def _is_small(diff: str) -> bool:
    """True if the number that `diff` changes has one digit."""
    removed, added = (
        next(line[1:] for line in diff.splitlines()[3:] if line.startswith(sign)) for sign in "-+"
    )
    start = next(i for i, (a, b) in enumerate(zip(removed, added, strict=False)) if a != b)
    around = removed[max(start - 1, 0) : start + 2]
    return sum(letter.isdigit() or letter in "._" for letter in around) == 1
