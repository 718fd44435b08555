"""Rules: what predictions rest on, and which published files were looked at when it was chosen."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from datetime import date
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from profiles.errors import FileError, InputError, UnknownNameError
from profiles.record import Record

PATH = Path(__file__).with_name("rules.toml")


class Prior(Record):
    """A constant before any fit: `prior` times or over `factor`, one standard deviation."""

    prior: NonNegativeFloat
    factor: float = Field(ge=1)
    unit: str = Field(min_length=1)
    most: PositiveFloat | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.is_fitted and not 0 < self.prior <= (self.most or self.prior):
            raise ValueError("0 < prior <= most; a factor of 1 holds any prior fixed")
        return self

    @property
    def is_fitted(self) -> bool:
        """False where runs do not move it."""
        return self.factor > 1


class Entry(Record):
    """Fields of every entry: when it was chosen, what it decides, and with which files in view."""

    date: date
    says: str = Field(min_length=1)
    chosen_on: frozenset[str]


class Rule(Entry):
    """A decision; `literals` counts the numbers in the code that those files decided."""

    name: str
    kind: Literal["preset", "rule"]
    literals: NonNegativeInt = 0
    ranges: str = ""
    constants: dict[str, Prior] = Field(default_factory=dict)


class Reading(Entry):
    """The stage or counter that `words` in the column `mem_metric` mean."""

    words: str
    stage: Literal["fullest", "first", "last", "middle", "mean"] | None = None
    counter: Literal["allocated", "reserved"] | None = None


class Rules(Record):
    """All of them; `publishers` maps a name to the files that are left out together."""

    publishers: dict[str, frozenset[str]]
    rule: tuple[Rule, ...] = ()
    reading: tuple[Reading, ...] = ()

    def publisher(self, file: str) -> str:
        """Publisher of a file.

        Raises:
            UnknownNameError: it is in nobody's list.
        """
        for name, files in self.publishers.items():
            if file in files:
                return name
        raise UnknownNameError(
            "file of published runs", file, self.files(), where=str(PATH),
            hints=["name it under [publishers]: files of one publisher are left out together"],
        )  # fmt: skip

    def files(self) -> list[str]:
        """Of all publishers."""
        return sorted(file for files in self.publishers.values() for file in files)

    def priors(self) -> dict[str, Prior]:
        """Of every constant, by its name."""
        return {name: prior for rule in self.rule for name, prior in rule.constants.items()}

    def preset(self, name: str) -> Rule | None:
        """The entry of a stack."""
        return next((r for r in self.rule if r.kind == "preset" and r.name == name), None)

    def ranges_kind(self, stack: str) -> str:
        """The kind of stack whose residuals give the ranges of `stack`."""
        preset = self.preset(stack)
        return preset.ranges if preset is not None and preset.ranges else stack

    def unseen(self, file: str, stack: str) -> bool:
        """True if all rules for a row of `file` that ran `stack` were chosen without its publisher.

        A stack that has no entry is taken as chosen on everything.
        """
        files, preset = self.publishers[self.publisher(file)], self.preset(stack)
        used = [rule for rule in self.rule if rule.kind == "rule" or rule is preset]
        return preset is not None and not any(rule.chosen_on & files for rule in used)

    def read(self, metric: str, without: Collection[str] = ()) -> tuple[str, str]:
        """Stage and counter of a memory figure, by readings that no file of `without` decided."""
        fitting = [
            one
            for one in self.reading
            if one.words in metric.lower() and one.chosen_on.isdisjoint(without)
        ]
        return (
            next((one.stage for one in fitting if one.stage), "fullest"),
            next((one.counter for one in fitting if one.counter), "reserved"),
        )


def load(path: Path = PATH) -> Rules:
    """The rules of a file, checked.

    Raises:
        FileError: it is missing or not TOML.
        InputError: an entry lacks a key or has an unknown one, names an unknown file, or decides
            what another has decided.
    """
    try:
        rules = Rules.build(tomllib.loads(path.read_text(encoding="utf-8")), where=str(path))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise FileError(f"cannot read {path}: {error}", where=str(path)) from None
    for entry in (*rules.rule, *rules.reading):
        for file in sorted(entry.chosen_on - set(rules.files())):
            raise UnknownNameError(
                "file of published runs", file, rules.files(), where=f"{path}: {entry.says}"
            )
    once = [*rules.files(), *(one.name for one in rules.rule)]
    once += [name for rule in rules.rule for name in rule.constants]
    if twice := sorted({name for name in once if once.count(name) > 1}):
        raise InputError(f"`{twice[0]}` is there twice", where=str(path), hints=["name it once"])
    return rules
