"""Random programs, each under one of the plans; `make fuzz-modules` tries 2,000 under all."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.fuzz_modules import __main__ as command
from tests.fuzz_modules import run
from tests.fuzz_modules.program import BLOCKS, Program
from tests.fuzz_modules.results import ALLOWED, REPORT, Case, FuzzedModules, Outcome, counts_of
from tests.fuzz_modules.run import PLANS, cases_of
from tests.fuzz_modules.structures import Structure
from tests.fuzz_modules.unusual import UNUSUAL
from tests.nightly import nightly
from tests.workers import Pool

PROGRAMS, OFTEN, TOGETHER = 60, 30, 10
WHOLE = PLANS[:2]
"""Plans under which each rank runs the whole model: what one process trains, they train."""
BROKE = ("sparse-table", "in-place", "hooked", "several-dtypes", "changed-parameter", "by-turns")
"""Blocks that an engine once got wrong, or refused under all plans that shard."""


@pytest.mark.dist
@pytest.mark.parametrize(
    "first", [*range(0, OFTEN, TOGETHER), *nightly(*range(OFTEN, PROGRAMS, TOGETHER))]
)
def test_programs_train_like_one_process_or_are_refused(pool: Pool, first: int) -> None:
    outcomes: Counter[Outcome] = Counter()
    for seed in range(first, first + TOGETHER):
        for case in cases_of(Program(seed), (PLANS[seed % len(PLANS)],), pool):
            assert case.outcome in ALLOWED, f"--only {seed} under {case.plan}: {case.text}"
            outcomes[case.outcome] += 1
    assert outcomes[Outcome.TRAINED] > outcomes[Outcome.REFUSED]


@pytest.mark.dist
@pytest.mark.parametrize("name", [*BROKE, *nightly(*sorted(set(UNUSUAL) - set(BROKE)))])
def test_an_unusual_block_trains_where_ranks_run_the_whole_model(pool: Pool, name: str) -> None:
    for seed in range(2):
        for case in cases_of(Program(seed, only=(name,)), WHOLE, pool):
            assert case.outcome is Outcome.TRAINED, f"{case.again} under {case.plan}: {case.text}"


def test_a_program_is_the_same_every_time_and_every_block_is_drawn() -> None:
    first, again = Program(3).build().state_dict(), Program(3).build().state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert str(Program(3)) == str(Program(3)) != str(Program(4))
    drawn = {name for seed in range(300) for name, _ in Program(seed).blocks}
    assert drawn == set(BLOCKS)


def test_a_block_that_is_left_out_leaves_the_others_as_they_were() -> None:
    whole = next(p for p in map(Program, range(50)) if p.drawn["holder"] == "list" and p.blocks[1:])
    smaller = Program(whole.seed, frozenset({0}))
    assert smaller.blocks == whole.blocks[1:]
    assert smaller.again == f"--only {whole.seed} --without 0"
    times = whole.blocks[0][1]
    texts = [str(model.blocks[n]) for model, n in ((whole.build(), times), (smaller.build(), 0))]
    assert texts[0] == texts[1]


class Differing(Structure):
    """Each model that is built computes something else."""

    def build(self) -> nn.Module:
        model = super().build()
        model.first.register_forward_hook(Scaled(next(_NUMBERS)))  # type: ignore[union-attr]
        return model


class Scaled:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return output * self.factor


_NUMBERS = itertools.count(1)


@pytest.mark.dist
def test_a_difference_is_reported(pool: Pool) -> None:
    """The fuzzer's own test."""
    (case,) = cases_of(Differing("plain"), PLANS[:1], pool)  # type: ignore[arg-type]
    assert case.outcome is Outcome.DIFFERED, case
    assert case.text.startswith("loss ")


def test_causes_are_counted_without_names() -> None:
    texts = ["split: `a.0` of 3", "split: `b.1` of 3", "`c` is late"]
    cases = [
        Case(program="", again="", plan="tp=2", outcome=Outcome.REFUSED, text=text)
        for text in texts
    ]
    (counts,) = counts_of(cases)
    assert counts.refusals == {"split: `_` of 3": 2, "`_` is late": 1}


def test_a_stopped_run_goes_on_and_tries_again_what_went_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[int, list[str]]] = []
    wrong = {3}

    def cases(program: Program, plans: list[str], pool: Pool) -> list[Case]:
        ran.append((program.seed, plans))
        outcomes = [
            Outcome.DIFFERED if program.seed in wrong and plan == "tp=2" else Outcome.TRAINED
            for plan in plans
        ]
        return [
            Case(program=str(program), again=program.again, plan=plan, outcome=outcome)
            for plan, outcome in zip(plans, outcomes, strict=True)
        ]

    monkeypatch.setattr(command, "cases_of", cases)
    monkeypatch.setattr(command, "start", lambda pool: None)
    out = tmp_path / "fuzz.json"
    assert command.main(["--out", str(out), "--programs", "5"]) == 1
    assert FuzzedModules.load(out).programs == 5
    wrong.clear()
    ran.clear()
    assert command.main(["--out", str(out), "--programs", "8"]) == 0
    assert ran == [(3, ["tp=2"]), *((seed, list(PLANS)) for seed in (5, 6, 7))]
    saved = FuzzedModules.load(out)
    assert (saved.programs, saved.wrong) == (8, ())
    assert [counts.outcomes for counts in saved.plans] == [{"trained": 8}] * 4


def test_a_program_that_fails_keeps_the_block_that_fails_alone(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_with_tied(program: Program, plans: list[str], pool: Pool) -> list[Case]:
        is_wrong = "tied" in dict(program.blocks)
        outcome = Outcome.DIFFERED if is_wrong else Outcome.TRAINED
        return [Case(program=str(program), again=program.again, plan=plans[0], outcome=outcome)]

    monkeypatch.setattr(run, "cases_of", fails_with_tied)
    program = Program(0, only=("mlp", "tied", "dense"))
    (case,) = fails_with_tied(program, ["tp=2"], pool)
    assert run.shrunk(program, case, pool).blocks == [("tied", 1)]


def test_the_saved_run_has_only_what_trained_or_was_refused() -> None:
    saved = FuzzedModules.load(REPORT)
    assert saved.programs >= 200
    assert [counts.plan for counts in saved.plans] == list(PLANS)
    for counts in saved.plans:
        assert sum(counts.outcomes.values()) == saved.programs
        assert set(counts.outcomes) <= {outcome.value for outcome in ALLOWED}, counts
    assert saved.wrong == ()
