"""Bundled GPTs in closed form, against captures of the module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from advisor.inputs.bundled.gpt import GPT, loss
from advisor.inputs.bundled.gpt_closed_form import gpt_family
from advisor.inputs.bundled.gpt_shapes import GPTConfig
from advisor.inputs.gpts import gpt_profile
from profiles.capture.capture import capture
from profiles.closed_forms.families.profile import profile_of
from profiles.model.profile import ModelProfile, Numerics
from tests.profiles.capture.equal_profiles import assert_equal, without_cycles

ROOT = Path(__file__).resolve().parents[3]
KINDS = tuple(Numerics)
SAMPLES, TOKENS = 2, 24


def shape(dropout: float) -> GPTConfig:
    return GPTConfig(
        vocab_size=300, context=40, num_layers=5, num_heads=4, width=64, dropout=dropout
    )


def captured(config: GPTConfig, *, on_processor: bool, tokens: int = TOKENS) -> ModelProfile:
    with torch.device("meta"):
        module = GPT(config).train()
    ids = torch.zeros(SAMPLES, tokens, dtype=torch.long)
    return capture(
        module, (ids, ids), loss_fn=loss, numerics=KINDS, name="gpt", on_processor=on_processor
    )


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_on_accelerators_the_closed_form_is_the_capture_with_its_cycles(dropout: float) -> None:
    ours = gpt_profile(
        shape(dropout), name="gpt", samples=SAMPLES, sequence_length=TOKENS, numerics=KINDS
    )
    theirs = captured(shape(dropout), on_processor=False)
    assert_equal(ours, theirs)
    block = ours.units[3].costs[Numerics.BF16_AUTOCAST]
    assert block.forward_cycles.per_sample > 0
    for position in range(1, len(theirs.flow.calls)):
        crossing, wanted = (
            [(v.shape, v.dtype, v.bytes) for v in flow.crossing(position)]
            for flow in (ours.flow, theirs.flow)
        )
        assert crossing == wanted


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_on_processors_it_is_the_capture_but_for_cycles(dropout: float) -> None:
    ours = profile_of(
        gpt_family(shape(dropout)),
        samples=SAMPLES,
        sequence_length=TOKENS,
        name="gpt",
        numerics=KINDS,
    )
    assert_equal(ours, without_cycles(captured(shape(dropout), on_processor=True)))


def test_a_longer_sequence_has_a_longer_table_of_positions() -> None:
    longer = gpt_profile(shape(0.0), name="gpt", samples=2, sequence_length=64, numerics=KINDS)
    table = next(unit for unit in longer.units if unit.name == "positions")
    assert table.parameters == 64 * 64
    assert longer.config is not None
    assert longer.config["context"] == 40  # of the shape that it can be counted from again


NAMED = """
import sys
from advisor.cli.main import main
try:
    main()
finally:
    print("imported:", sorted({"torch", "transformers"} & set(sys.modules)), file=sys.stderr)
"""


def test_a_bundled_name_is_planned_without_an_import_of_torch() -> None:
    """Importing torch and following the module would take longer than all else."""
    command = [sys.executable, "-c", NAMED, "gpt-1.3b", "--cluster", "8xH100-SXM-80GB"]
    run = subprocess.run(
        [*command, "--global-batch", "64"], cwd=ROOT, capture_output=True, text=True, timeout=180
    )
    assert run.returncode == 0, run.stderr
    assert "imported: []" in run.stderr
