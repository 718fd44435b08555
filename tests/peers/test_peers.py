"""The pure parts of the comparison: what counts, what is left to do, what the tables say."""

from __future__ import annotations

import argparse
import importlib.util

import pytest
import torch

pytest.importorskip("transformers")

from tests.peers.__main__ import todo
from tests.peers.capacity import largest
from tests.peers.race import largest_difference
from tests.peers.results import Answer, Capacity, Entry, Peers, Race, lead
from tests.peers.scripts import FRUGAL, OURS, OURS_LOSSY, PLAIN
from tests.peers.subjects import ROWS, SUBJECTS, share
from tests.peers.table import errors, missed, tables

SLOW = "100 Mbit/s"
ROUNDED = "DDP by hand, fp16 hook"


def _entry(script: str, *turns: float, loss_error: float = 1e-6, **rest: object) -> Entry:
    return Entry(script=script, turns_s=turns, loss_error=loss_error, **rest)


def _race(*entries: Entry, subject: str = "Llama", link: str = SLOW) -> Race:
    return Race(subject=subject, link=link, parameters=10**6, rows=16, steps=2, entries=entries)


def test_a_script_that_did_other_work_is_not_compared() -> None:
    unequal = _entry("Accelerate", 1.0, loss_error=2e-3)
    rounded = _entry(ROUNDED, 1.0, loss_error=2e-3, is_lossy=True)
    assert not unequal.counts
    assert rounded.counts
    assert not Entry(script="Accelerate", left_out="not installed").counts
    race = _race(_entry(OURS, 9.0), unequal)
    assert list(missed(race)) == []
    assert "other work" in tables(Peers(races=(race,)))


def test_the_largest_difference_is_relative_to_the_reference() -> None:
    assert largest_difference([2.0, 3.0], [2.0, 4.0]) == 0.25
    assert largest_difference([2.0], None) is None


def test_our_lead_is_the_median_of_rounds() -> None:
    middle, low, high = lead(_entry(OURS, 1.0, 2.0, 1.0), _entry(PLAIN, 2.0, 2.0, 4.0))
    assert (middle, low, high) == (2.0, 1.5, 3.0)


def test_each_link_has_its_mark_and_rounded_gradients_race_against_rounded_ones() -> None:
    entries = (
        _entry(OURS, 1.0),
        _entry(OURS_LOSSY, 0.5, is_lossy=True),
        _entry(PLAIN, 1.2),
        _entry(ROUNDED, 0.6, is_lossy=True),
    )
    assert [(e.script, least) for e, _, least in missed(_race(*entries))] == [(PLAIN, 1.5)]
    assert list(missed(_race(*entries, link="1 Gbit/s"))) == []
    text = tables(Peers(races=(_race(*entries),)))
    assert f"Llama, {SLOW}: 1.20 of {PLAIN}, the mark is 1.5" in text


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 5, 8, 12, 63, 64, 99])
def test_the_largest_depth_that_fits_is_met_exactly(limit: int) -> None:
    tried: list[int] = []

    def fits(depth: int) -> bool:
        tried.append(depth)
        return depth <= limit

    assert largest(fits, 64) == min(limit, 64)
    assert len(set(tried)) == len(tried) <= 13


def test_what_is_known_is_left_out() -> None:
    options = argparse.Namespace(part=None, only=None, again=False)
    peers = Peers().with_race(_race(subject="Llama", link="local"))
    peers = peers.with_capacity(Capacity(subject="Llama", script=PLAIN, limit_bytes=1))
    tasks = todo(peers, "local", options)
    assert [task.subject for task in tasks if not task.script] == [
        name for name in SUBJECTS if name != "Llama"
    ]
    scripts = [task.script for task in tasks if task.script]
    assert PLAIN not in scripts
    assert {OURS, FRUGAL} <= set(scripts)
    assert len(todo(peers, SLOW, options)) == len(SUBJECTS)
    options.again = True
    assert len([task for task in todo(peers, "local", options) if not task.script]) == len(SUBJECTS)


def test_a_race_that_was_run_again_takes_the_place_of_the_first(tmp_path) -> None:
    peers = Peers().with_race(_race(_entry(OURS, 1.0))).with_race(_race(_entry(OURS, 2.0)))
    peers.save(tmp_path / "peers.json")
    again = Peers.load(tmp_path / "peers.json")
    assert again == peers
    assert [race.entries[0].turns_s for race in again.races] == [(2.0,)]


def test_planners_are_scored_against_the_runs_that_they_spoke_of() -> None:
    race = _race(_entry(PLAIN, 4.0, peak_bytes=100))
    said = Answer(
        planner="ours", subject="Llama", link=SLOW, script=PLAIN, peak_bytes=150.0, step_s=1.0
    )
    other = said.model_copy(update={"subject": "ResNet"})
    peers = Peers(races=(race,), answers=(said, other))
    assert errors(peers, [said, other]) == ([0.5], [-0.5])
    assert "+50%" in tables(peers)


@pytest.mark.parametrize("name", SUBJECTS)
def test_ranks_share_a_batch_without_rest_and_without_overlap(name: str) -> None:
    batch = SUBJECTS[name].batch(3)
    parts = [share(batch, rank, 4) for rank in range(4)]
    values = [part.values() if isinstance(part, dict) else part for part in (batch, *parts)]
    for whole, *pieces in zip(*values, strict=True):
        assert len(whole) == ROWS
        assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("package", ["accelerate", "deepspeed"])
def test_the_pinned_packages_are_those_that_are_compared(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: `make peers` does")
    from importlib.metadata import version
    from pathlib import Path

    pins = Path(__file__).with_name("requirements.txt").read_text()
    assert f"{package}=={version(package)}" in pins.splitlines()
