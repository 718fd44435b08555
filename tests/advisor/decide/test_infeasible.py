"""Nothing fits: the plans tried, and four remedies, each of which helps."""

from __future__ import annotations

import re

import pytest

from advisor.decide import infeasible
from advisor.decide.choose import choose
from advisor.decide.decide import decide
from advisor.decide.offload import with_disk
from advisor.inputs.changed_facts import Lever, varied
from advisor.inputs.facts import Facts
from engines.plan import OffloadTo, PartialPlan
from profiles.closed_forms.families import profile_from_config
from profiles.errors import NoPlanError
from profiles.model.profile import Numerics
from profiles.units import GIB, parse_bytes
from tests.factories import ALL_NUMERICS, exact, facts, gpus, transformer

SEVENTY = transformer(name="70b", layers=80, hidden=8192, ffn=28672, vocab=128256)
DATA = PartialPlan.build({"pp": 1, "tp": 1})


def starved() -> Facts:
    """70 B parameters: 1,052 GiB of states on eight devices and 512 GiB of main memory."""
    cluster = gpus(2, 4).model_copy(update={"host_memory_bytes": exact(512 * GIB)})
    return facts(SEVENTY, cluster, batch=8)


@pytest.fixture(scope="module")
def error() -> NoPlanError:
    with pytest.raises(NoPlanError) as caught:
        choose(starved(), partial=DATA)
    return caught.value


def amount(hint: str, before: str) -> float:
    match = re.search(rf"{before} ([\d.]+ GiB)", hint)
    assert match is not None, hint
    return float(parse_bytes(match[1]))


def test_the_kinds_that_were_tried_and_the_nearest_miss_are_named(error: NoPlanError) -> None:
    assert error.where is not None
    tried, nearest, missing = error.where.splitlines()
    assert tried.startswith("tried: DDP; ")
    assert "; where possible also with offloaded optimizer, CPU offload, offloaded" in tried
    assert "; CP + FSDP" in tried
    assert nearest.startswith("nearest: CP over 2 + FSDP over 4, CPU offload (dp_shard=4 cp=2 ")
    assert missing.endswith(" too much")


def test_there_are_four_remedies(error: NoPlanError) -> None:
    assert len(error.hints) == 4
    assert all(" then needs up to " in hint for hint in error.hints)


def test_the_hinted_disk_makes_a_plan_fit(error: NoPlanError) -> None:
    """5 and 7 GB/s are assumed for the drive of a node; with such a drive a plan fits."""
    assert error.hints[1].startswith("keep states in files on a disk of 5.00 GB/s written, 7.00 ")
    cluster = with_disk(starved().cluster)
    winner = decide(facts(SEVENTY, cluster, batch=8), partial=DATA).winner
    assert winner is not None
    assert winner.plan.offload_to is OffloadTo.DISK
    assert winner.estimate.host_bytes == 0


def test_the_hinted_nodes_make_a_plan_fit(error: NoPlanError) -> None:
    assert error.hints[2].startswith("take 4 nodes and a global batch of 16: ")
    larger = starved().cluster.model_copy(update={"num_nodes": 4})
    assert choose(facts(SEVENTY, larger, batch=16), partial=DATA).plan.world_size == 16


def test_the_hinted_device_memory_suffices_and_less_does_not(error: NoPlanError) -> None:
    needed = amount(error.hints[3], "take devices with")
    for factor, helps in ((1.001, True), (0.99, False)):
        changed = varied(starved(), Lever.MEMORY, factor * needed)
        assert (decide(changed, partial=DATA).winner is not None) == helps


def test_the_hinted_main_memory_suffices_and_less_does_not(error: NoPlanError) -> None:
    needed = amount(error.hints[0], "take nodes with")
    for factor, helps in ((1.001, True), (0.99, False)):
        memory = exact(factor * needed)
        cluster = starved().cluster.model_copy(update={"host_memory_bytes": memory})
        winner = decide(facts(SEVENTY, cluster, batch=8), partial=DATA).winner
        assert (winner is not None) == helps


def test_shorter_sequences_are_hinted_where_the_model_has_a_closed_form() -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "max_position_embeddings": 65536,
    }
    model = profile_from_config(
        config, samples=1, sequence_length=65536, name="long", numerics=tuple(Numerics)
    )
    alone = gpus(1, 1, memory_gib=7)
    with pytest.raises(NoPlanError) as caught:
        choose(facts(model, alone, batch=1))
    hint = next(hint for hint in caught.value.hints if hint.startswith("cut sequences to"))
    length = int(hint.split()[3])
    whole = facts(model, alone, batch=1)
    assert decide(varied(whole, Lever.SEQUENCE, length)).winner is not None
    assert decide(varied(whole, Lever.SEQUENCE, 2 * length)).winner is None


def test_of_many_plans_remedies_are_tried_on_the_nearest_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only one decision is made, not a dozen, and the hinted memory suffices all the same."""
    config = {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 5504,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 32000,
    }
    model = profile_from_config(
        config, samples=1, sequence_length=2048, name="llama", numerics=ALL_NUMERICS
    )
    whole = facts(model, gpus(1, 8, memory_gib=4.0), batch=64)
    cluster = whole.cluster.model_copy(update={"host_memory_bytes": None})
    whole = whole.model_copy(update={"cluster": cluster})
    calls = []
    monkeypatch.setattr(infeasible, "_CHANGES_SHOWN", 9)
    monkeypatch.setattr(infeasible, "decide", lambda *args, **named: calls.append(args))
    with pytest.raises(NoPlanError) as caught:
        choose(whole)
    assert not calls
    hints = caught.value.hints
    roomy = next(hint for hint in hints if hint.startswith("take devices with"))
    match = re.search(r"take devices with ([\d.]+) GiB", roomy)
    assert match is not None
    memory_gib = float(match[1]) + 0.05  # as it is printed
    larger = facts(model, gpus(1, 8, memory_gib=memory_gib), batch=64)
    assert decide(larger).winner is not None
