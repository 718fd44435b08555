"""Advice on the allocator: under the variable that torch reads, and from measured peaks."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from advisor import memory_report
from advisor.decide import allocator
from advisor.decide.allocator import advice, variable
from advisor.decide.choose import choose
from advisor.decide.decision import Decision
from advisor.inputs.policy import Policy
from engines.parallel import ParallelModel
from engines.plan import read_settings
from engines.runtime.peak_memory import PeakMemory, RankMemory
from profiles.errors import InputError
from profiles.units import GIB
from tests.factories import cpus, facts, gpus, transformer

MIDDLE = transformer(name="middle", layers=8, hidden=2048, ffn=5504, tokens=4096)
HEADER = Path(torch.__file__).parent / "include" / "c10" / "cuda" / "CUDAAllocatorConfig.h"


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("2.9.1", "PYTORCH_CUDA_ALLOC_CONF"),
        ("2.11.0", "PYTORCH_ALLOC_CONF"),
        ("2.13.0+cpu", "PYTORCH_ALLOC_CONF"),
        ("2.15.0a0+git1234", "PYTORCH_ALLOC_CONF"),
        (None, "PYTORCH_ALLOC_CONF"),
    ],
)
def test_the_variable_depends_on_the_version_of_torch(version: str | None, name: str) -> None:
    assert variable(version) == name
    if version is not None:
        assert f"`expandable_segments:True` in {name} avoids" in advice(version)


def test_the_installed_torch_reads_the_variable_and_prefers_its_older_name() -> None:
    if not HEADER.exists():
        pytest.skip("this torch came without its headers")
    read = re.findall(r'get_env\("(PYTORCH_\w*ALLOC_CONF)"\)', HEADER.read_text())
    assert variable(metadata.version("torch")) in read
    assert read.index("PYTORCH_CUDA_ALLOC_CONF") < read.index("PYTORCH_ALLOC_CONF")
    assert "(PYTORCH_CUDA_ALLOC_CONF takes precedence if it is set)" in advice()


def rank(allocated: float, reserved: float, *, retries: int = 0) -> RankMemory:
    """Return the peaks of a rank, in bytes, with a context of half a GiB."""
    context = GIB // 2
    return RankMemory(int(reserved) + context, int(allocated), int(reserved), retries)


@pytest.fixture(scope="module")
def decision() -> Decision:
    return choose(facts(MIDDLE, gpus(1, 2), batch=8))


def reported(decision: object, *ranks: RankMemory) -> list[str]:
    parallel = SimpleNamespace(decision=decision, memory=lambda: PeakMemory(ranks))
    return memory_report(cast("ParallelModel", parallel)).splitlines()


def test_the_report_compares_measured_and_predicted_peaks(decision: Decision) -> None:
    allocated = decision.estimate.peak_bytes - 0.5 * GIB
    lines = reported(decision, rank(allocated, 1.09 * allocated), rank(allocated, allocated))
    assert lines[0].startswith("rank 0 has the highest peak: ")
    assert lines[1].startswith("predicted: ")
    assert lines[2:] == ["slack is within the 10% that predictions allow for: nothing to set"]


def test_more_slack_than_predictions_allow_for_brings_the_advice(decision: Decision) -> None:
    lines = reported(decision, rank(4 * GIB, 4 * GIB), rank(2 * GIB, 2.5 * GIB))
    assert lines[-1].startswith("rank 1 reserved 25% more than its tensors, predictions allow for")
    assert "expandable_segments:True" in lines[-1]
    lines = reported(decision, rank(4 * GIB, 4 * GIB, retries=1))
    assert "expandable_segments:True" in lines[-1]  # it ran out, in pieces or not


def test_a_peak_above_the_prediction_is_reported(decision: Decision) -> None:
    high = decision.estimate.peak_high_bytes
    lines = reported(decision, rank(high, high + 2 * GIB))
    assert "rank 0 held 2.50 GiB more than the upper end" in lines


def test_without_a_decision_there_is_no_prediction_to_compare() -> None:
    with pytest.raises(InputError, match="nothing was predicted"):
        reported(None, rank(GIB, GIB))


@pytest.mark.parametrize(("share", "warns"), [(1.01, True), (0.99, False)])
def test_a_plan_whose_replay_reserves_more_than_there_is_brings_the_advice(
    share: float, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peak fits, with the share that a search allows for."""
    taken = choose(facts(MIDDLE, gpus(1, 1, memory_gib=24), batch=8))
    usable = taken.policy.usable_bytes(taken.facts.cluster.device)
    assert taken.estimate.peak_high_bytes < usable
    monkeypatch.setattr(allocator, "reserved_bytes", lambda _: share * usable)
    hints = [hint for hint in allocator.allocator_hint(taken) if "do not fit each other" in hint]
    assert bool(hints) is warns
    assert all("expandable_segments:True" in hint for hint in hints)


def test_a_plan_far_from_the_memory_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "reserved_bytes", lambda _: pytest.fail("it takes 0.1 s"))
    taken = choose(facts(MIDDLE, gpus(1, 1, memory_gib=640), batch=8))
    assert not list(allocator.allocator_hint(taken))


def test_without_slack_a_peak_is_what_is_allocated_and_the_context() -> None:
    """By hand: 20 GiB of tensors, a tenth of them as slack, and a context of at most 0.9 GiB."""
    device = gpus(1, 1).device
    context = device.context_bytes.high
    peak = 1.1 * 20 * GIB + context
    assert allocator.without_slack(peak, device) == pytest.approx(20 * GIB + context)


@pytest.mark.parametrize(
    ("tensors_gib", "decides"),
    [(68, False), (73, True), (77, False)],  # of 75.6 usable
)
def test_slack_decides_between_what_fits_with_it_and_what_fits_without(
    tensors_gib: float, decides: bool
) -> None:
    device, policy = gpus(1, 1).device, Policy()
    usable = policy.usable_bytes(device)
    assert usable == pytest.approx(0.95 * 79.6 * GIB)
    context = device.context_bytes.high
    high = 1.1 * (tensors_gib * GIB - context) + context
    assert (high <= usable) is (tensors_gib == 68)
    assert allocator.slack_decides(high, device, policy) is decides
    assert not allocator.slack_decides(high, cpus(1, memory_gib=79.6).device, policy)


def test_a_plan_that_only_the_slack_leaves_out_is_named() -> None:
    """At 28 GiB one device holds its peak without slack, and not with it."""
    deep = transformer(name="deep", layers=16, hidden=2048, ffn=5504, tokens=4096)
    fixed = read_settings("recompute=full microbatch_size=8")
    hints = {}
    for gib in (24, 28, 30):
        taken = choose(facts(deep, gpus(1, 1, memory_gib=gib), batch=8), partial=fixed)
        hints[gib] = list(allocator.allocator_hint(taken))
    assert hints[24] == hints[30] == []
    (hint,) = hints[28]
    assert hint.startswith("only the allocator's slack leaves one device out: it needs up to 28.4")
    assert "26.0 GiB without, of 26.6 GiB usable" in hint
