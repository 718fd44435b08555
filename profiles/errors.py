"""Every error this project raises on purpose.

    AdvisorError                      what happened, where, and the smallest change that works
    |-- InputError (ValueError)       something given to us cannot be used             exit code 2
    |   |-- UnitError                 a number without a unit, or with the wrong one
    |   |-- UnknownNameError          no such accelerator, key, model ...; names the near miss
    |   |-- FileError                 a file is missing, broken, or cannot be written
    |   |-- ModelError                a model cannot be imported, built or run on its sample
    |   |-- BatchError                a batch does not fit the plan
    |   `-- PlanError                 a plan is impossible here; carries the list of problems
    |       `-- PlanMismatchError     ranks hold different plans
    |-- RankError                     a rank did not answer in time                    exit code 2
    |-- RankMismatchError             ranks that must have the same do not             exit code 2
    |-- NonFiniteError                a loss, gradient or parameter is nan or inf      exit code 2
    |-- ShortageError                 a step needs more memory than a rank has         exit code 2
    `-- NoPlanError                   the question was valid, nothing fits             exit code 1

Catch broad (`AdvisorError`) or narrow. `str(error)` is the whole text: one line for what happened,
indented lines for where, then hints.
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterable, Sequence

LONGEST_NAME = 200
"""Characters of a name that are shown, and of one that is compared with those that exist."""
LONGEST_LINE, LONGEST_TEXT = 2000, 20_000
"""Characters of an error: it may quote what it refuses, which has no bound."""
HINT = "hint: "
LIST_COLUMNS = 80 - len(HINT)
"""Of a list of names; a longer one takes several lines."""
# Control characters and half characters; those that turn the direction of what follows.
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class AdvisorError(Exception):
    """Base of all deliberate errors.

    `what` names the offending value, `where` the option, file, module or rank, and each hint is one
    change that would work. The words are shown to users as they are, but for what would drive a
    terminal, and the rest of long lines.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str | None = None, hints: Sequence[str] = ()) -> None:
        self.what = what
        self.where = where
        self.hints = tuple(hints)
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines += [f"  {line}" for line in self.where.splitlines()]
        if self.hints:
            lines += ["", *(f"{HINT}{hint}" for hint in self.hints)]
        return _shown("\n".join(lines))


def _shown(text: str) -> str:
    lines = _UNPRINTABLE.sub("?", text[:LONGEST_TEXT]).split("\n")
    short = (x if len(x) <= LONGEST_LINE else f"{x[:LONGEST_LINE]}..." for x in lines)
    return "\n".join(short) + "..." * (len(text) > LONGEST_TEXT)


class InputError(AdvisorError, ValueError):
    """Something given to us cannot be used."""


class UnitError(InputError):
    """A quantity was written without a unit, or with one of another kind."""


class UnknownNameError(InputError):
    """A name that is not in a closed list; the near miss is part of the message."""

    def __init__(
        self,
        kind: str,
        name: str,
        known: Iterable[str],
        *,
        where: str | None = None,
        hints: Sequence[str] = (),
    ) -> None:
        self.name = name = str(name)  # whatever was given
        self.known = tuple(known)
        near = near_misses(name, self.known)
        if near:
            first = "did you mean " + " or ".join(f"`{candidate}`" for candidate in near) + "?"
        else:
            first = f"\n{' ' * len(HINT)}".join(
                textwrap.wrap(
                    f"known: {', '.join(self.known)}", LIST_COLUMNS, break_on_hyphens=False
                )
            )
        shown = name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..."
        super().__init__(f"unknown {kind} `{shown}`", where=where, hints=[first, *hints])


class FileError(InputError):
    """A file cannot be read, understood or written."""


class ModelError(InputError):
    """A model cannot be imported, built or run on its sample."""


class BatchError(InputError):
    """A batch does not fit the plan or the model."""


class PlanError(InputError):
    """A plan is impossible for this model on these devices."""


class PlanMismatchError(PlanError):
    """Ranks of one job hold different plans."""


class RankError(AdvisorError):
    """A rank did not answer within its time limit."""


class RankMismatchError(AdvisorError):
    """Ranks have different models, optimizers, software or batches, where one needs the same."""


class NonFiniteError(AdvisorError):
    """A loss, a gradient or a parameter is nan or inf."""


class ShortageError(AdvisorError):
    """A rank ran out of memory, and the step cannot be made under this plan."""


class NoPlanError(AdvisorError):
    """The question was valid and the answer is no: nothing fits."""

    exit_code = 1


def a_type(value: object) -> str:
    """The name of the type of `value` with its article.

    >>> a_type(8), a_type("8"), a_type(None)
    ('an int', 'a str', 'a NoneType')
    """
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeioAEIO" else f"a {name}"


def near_misses(name: str, known: Iterable[str], *, limit: int = 2) -> list[str]:
    """The closest names to `name`, ignoring case, best first.

    >>> near_misses("dp_shrad", ["dp_shard", "dp_replicate", "tp"])
    ['dp_shard']
    """
    if len(name) > LONGEST_NAME:
        return []
    by_lower = {candidate.lower(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=limit, cutoff=0.6)
    return [by_lower[match] for match in matches]
