"""Rules say what they were chosen on; every preset and constant has one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from advisor.cost.calibration import Calibration
from profiles.errors import InputError
from profiles.workload.stack import stacks
from tests.scorecard.made_up import reading, rule, rules
from tests.scorecard.rules import load

PUBLISHERS = '[publishers]\nA = ["a1", "a2"]\nB = ["b"]\n'
ENTRY = """
[[rule]]
name = "flash"
kind = "preset"
date = 2026-11-22
says = "arXiv 2307.08691: keeps no scores"
chosen_on = ["a1"]
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "rules.toml"
    path.write_text(PUBLISHERS + text)
    return path


def test_the_rules_of_this_repository_can_be_read() -> None:
    rules = load()
    assert len(rules.publishers) == 8
    assert rules.publisher("nvidia_moe_memory") == rules.publisher("megatron_ci_memory") == "NVIDIA"


def test_every_preset_has_a_rule() -> None:
    named = {rule.name for rule in load().rule if rule.kind == "preset"}
    assert named == stacks().keys()


def test_every_constant_has_a_prior() -> None:
    assert load().priors().keys() == Calibration.model_fields.keys()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"a1"', '"c"', "unknown file of published runs `c`"),
        ('"preset"', '"guess"', "`rule.0.kind`"),
        ("2026-11-22", '"lately"', "`rule.0.date`"),
        ('says = "arXiv 2307.08691: keeps no scores"', "", "says"),
        ("chosen_on", "seen_on", "seen_on"),
        ("ENTRY", "prior = 2.0, factor = 1.1, unit = 's', most = 1.0", "0 < prior <= most"),
        ("ENTRY", "prior = 0.0, factor = 1.1, unit = 's'", "0 < prior <= most"),
        ("ENTRY", "prior = 2.0, factor = 1.1", "unit"),
    ],
)
def test_an_entry_that_says_too_little_is_refused(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert load(written(tmp_path, ENTRY)).rule[0].name == "flash"
    text = ENTRY.replace(old, new)
    if old == "ENTRY":
        text = ENTRY + f"[rule.constants]\nc = {{ {new} }}\n"
    with pytest.raises(InputError, match=re.escape(message)):
        load(written(tmp_path, text))


def test_a_name_decided_twice_and_a_file_owned_twice_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`flash` is there twice"):
        load(written(tmp_path, ENTRY + ENTRY))
    with pytest.raises(InputError, match="`b` is there twice"):
        load(written(tmp_path, 'C = ["b"]\n'))


def test_a_file_without_a_publisher_is_refused() -> None:
    with pytest.raises(InputError, match="unknown file of published runs `amp_t4`"):
        load().publisher("amp_t4")


def test_a_row_is_unseen_if_its_rules_were_chosen_without_its_publisher() -> None:
    known = rules(rule("flash", "a1"))
    assert known.unseen("b", "flash")
    assert not known.unseen("a1", "flash")
    # The other file of the publisher that a preset was chosen on is as good as seen.
    assert not known.unseen("a2", "flash")
    assert known.unseen("a1", "eager")
    everywhere = rules(rule("flash", "a1"), rule("overlap", "b", kind="rule"))
    assert not everywhere.unseen("b", "flash")
    # Nobody says how this one was chosen.
    assert not known.unseen("b", "unheard of")


def test_a_reading_goes_without_the_file_that_decided_it() -> None:
    known = rules(
        readings=(
            reading("allocated", counter="allocated"),
            reading("last rank", stage="last"),
            reading("smi", "b", stage="first"),
        )
    )
    assert known.read("Allocated, last rank") == ("last", "allocated")
    assert known.read("nvidia-smi") == ("first", "reserved")
    assert known.read("nvidia-smi", without=["b"]) == ("fullest", "reserved")
    assert known.read("nvidia-smi", without=["a1"]) == ("first", "reserved")
