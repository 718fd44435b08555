"""Shares of states that a rank holds, against the ZeRO paper and sums by hand."""

from __future__ import annotations

import pytest

from advisor.cost.ledger import HOST_LINK_BYTES_PER_S, Ledger
from advisor.cost.memory.allocator import other_streams, room_bytes, upper_end, workspace_bytes
from advisor.cost.memory.offload import (
    away_bytes,
    chunk_share,
    copied_s,
    filed_s,
    moved_s,
    shards_in_files_s,
)
from advisor.cost.memory.round_shares import RoundShares, round_shares
from advisor.cost.memory.states import own_share, resident_states, zero_level
from engines.plan import CHUNK_BYTES, Plan
from profiles.units import GIB, MIB
from profiles.workload.optimizers import Upkeep
from profiles.workload.stack import Stack, States
from tests.advisor.cost.memory.hand_made import loads, unit
from tests.factories import cpus, exact, gpus

HALF = States(weight=2, gradient=2, master=4, moments=8)
ADAM = Upkeep("adam", 7e9, 0.0, 0.0, 0.0, 0.0, 0.0)
KINDS = ("dp_replicate=4", "dp_replicate=4 zero=1", "dp_replicate=4 zero=2", "dp_shard=4")


@pytest.mark.parametrize(("level", "kind"), list(enumerate(KINDS)))
def test_mixed_precision_states_are_those_of_the_zero_paper(level: int, kind: str) -> None:
    """2 + 2 + 12 bytes a parameter: optimizer, gradients, weights are sharded, one by one."""
    plan, whole = Plan.parse(kind), loads(unit("a", parameter_bytes=400.0, gradient_bytes=400.0))
    weight, gradient, optimizer = (
        each / 4 if level >= least else each for each, least in ((2, 3), (2, 2), (12, 1))
    )
    resident = resident_states(HALF, plan, [whole], update=ADAM, degree=4)
    assert zero_level(plan) == level
    assert (resident.parameters, resident.gradients, resident.optimizer) == (
        100 * weight,
        100 * gradient,
        100 * optimizer,
    )
    assert resident.total == 100 * (weight + gradient + optimizer)
    assert own_share(HALF, level, 4) * 400 == resident.total
    assert own_share(HALF, level, 4, on_device=False) * 400 == resident.gradients
    tied = resident_states(HALF, plan, [whole], update=ADAM, degree=4, copied_bytes=40.0)
    assert tied.total == pytest.approx(1.1 * resident.total)
    open_ended = HALF.model_copy(update={"moments": None})
    opened = resident_states(open_ended, plan, [whole], update=ADAM, degree=4).optimizer
    assert opened == 400 / (4 if level else 1) + 7e9
    without = own_share(HALF, level, 4) - own_share(open_ended, level, 4)
    assert without * 4 == 8 / (4 if level else 1)


@pytest.mark.parametrize(
    ("words", "folds", "shares"),
    [("ep=2", False, 2), ("ep=2 tp=2", False, 2), ("ep=2 tp=2", True, 4), ("ep=8", False, 1)],
)
def test_experts_are_sharded_over_the_ranks_that_hold_the_same_ones(
    words: str, folds: bool, shares: int
) -> None:
    """40 parameters over four ranks, 60 of experts over those that hold copies of them."""
    mixed = loads(unit("a", parameter_bytes=400.0, expert_bytes=240.0))
    plan = Plan.parse(f"dp_shard=4 {words}")
    resident = resident_states(HALF, plan, [mixed], update=ADAM, degree=4, folds_experts=folds)
    assert resident.total == 16 * (40 / 4 + 60 / shares)


@pytest.mark.parametrize(
    ("words", "shares"),
    [
        ("dp_replicate=4 accumulation=2", RoundShares(1.0, 0.0, 1.0, 1.0, 0.0)),
        ("dp_replicate=4 zero=1 accumulation=2", RoundShares(0.25, 0.5, 1.0, 1.0, 0.0)),
        ("dp_replicate=4 zero=2 accumulation=2", RoundShares(0.25, 0.5, 1.25, 1.0, 0.0)),
        ("dp_shard=4 accumulation=2", RoundShares(0.25, 0.0, 1.25, 1.0, 0.5)),
        ("dp_shard=2 cp=2 accumulation=2", RoundShares(0.25, 0.0, 1.25, 1.0, 0.5)),
        ("dp_shard=4", RoundShares(0.25, 0.0, 1.0, 1.0, 0.5)),
        ("dp_shard=4 accumulation=2 offload=states", RoundShares(0.0, 0.0, 1.0, 0.0, 0.5)),
    ],
)
def test_shards_of_earlier_rounds_add_to_whole_gradients_of_this_one(
    words: str, shares: RoundShares
) -> None:
    resident = round_shares(Plan.parse(words), gpus(1, 4).device, compute_share=0.5)
    assert resident == shares
    assert resident.of_parameters == shares.parameters + shares.gathered


@pytest.mark.parametrize(("level", "kind"), list(enumerate(KINDS)))
def test_stacks_with_their_own_states_hold_no_whole_gradients(level: int, kind: str) -> None:
    for moments in (8.0, None):
        states = HALF.model_copy(update={"moments": moments})
        stack = Stack(states=states)
        resident = round_shares(Plan.parse(kind), gpus(1, 4).device, compute_share=0.5, stack=stack)
        assert resident.parameters == own_share(states, level, 4)
        assert (resident.gathered, resident.gradients) == (0, 0)
        assert resident.optimizer == (moments is None)
        assert resident.root == 0.5 * (level == 3)


def test_the_upper_end_of_a_peak_adds_doubt_gathers_slack_and_the_context() -> None:
    device = gpus(1, 8).device  # 2 GiB of context, known to a quarter
    high = upper_end(100.0, device, doubtful=20.0, ahead=5.0, error=0.25)
    assert high == pytest.approx((100 + 5 + 5) * 1.1 + 2.5 * GIB)
    assert upper_end(room_bytes(40.0 * GIB, device), device) == pytest.approx(40 * GIB)


def test_a_handle_of_cublas_has_32_mib_from_hopper_on_and_none_on_processors() -> None:
    hopper = gpus(1, 1).device.model_copy(update={"name": "H100-SXM"})
    older = hopper.model_copy(update={"name": "A100-SXM-80GB"})
    assert workspace_bytes(hopper, Stack(workspaces=3)) == 3 * 32 * MIB
    assert workspace_bytes(older, Stack(workspaces=3)) == 3 * (8 * MIB + 128 * 1024)
    assert workspace_bytes(cpus(1).device) == 0


@pytest.mark.parametrize(
    ("words", "on_device", "nbytes"),
    [
        ("dp_replicate=4", True, 0),
        ("dp_replicate=4 zero=1", True, 1000 + 100),
        ("dp_replicate=4 zero=2", True, 1000 + 100),
        ("dp_shard=4", True, 1000 + 100 + 7),
        ("dp_shard=4", False, 1000 + 7),
    ],
)
def test_streams_of_fsdp_reserve_shards_of_gradients_and_the_largest_copy(
    words: str, on_device: bool, nbytes: float
) -> None:
    whole = loads(unit("a", gradient_bytes=200.0, count=2))
    reserved = other_streams(
        Plan.parse(words), whole, computing=1000.0, copy=7.0, on_device=on_device
    )
    assert reserved == nbytes


def test_files_are_read_by_every_gather_reduction_and_the_step() -> None:
    """Parameters 1 GB, gradients 2, states 4; three gathers and five reductions."""
    disk = {"disk_write_bytes_per_s": exact(5e9), "disk_read_bytes_per_s": exact(7e9)}
    cluster = gpus(1, 2).model_copy(update=disk)
    seconds = shards_in_files_s(
        cluster,
        parameter_bytes=1e9,
        gradient_bytes=2e9,
        state_bytes=4e9,
        gathers=3.0,
        reductions=5.0,
    )
    reads, writes = (3 + 1) * 1 + 5 * 2 + 4, 1 + 5 * 2 + 4
    assert seconds == pytest.approx(2 * (reads / 7 + writes / 5))


@pytest.mark.parametrize(
    ("words", "gathers", "reductions"),
    [
        ("dp_replicate=2 zero=1", 1, 1),
        ("dp_replicate=2 zero=2", 1, 5),
        ("dp_shard=2", 6, 5),
    ],
)
def test_a_plan_of_files_reads_as_often_as_its_kind_gathers(
    words: str, gathers: int, reductions: int
) -> None:
    cluster, whole = gpus(1, 2), loads(unit("a", parameter_bytes=2e9, gradient_bytes=4e9))
    plan = Plan.parse(f"{words} microbatches=3 offload=states offload_to=disk")
    ledger = Ledger(cluster, {})
    shards = {"degree": 2, "rounds": 5, "cluster": cluster}
    spent_s = filed_s(plan, [whole], ADAM, ledger, **shards)
    by_hand = shards_in_files_s(
        cluster,
        parameter_bytes=1e9,
        gradient_bytes=2e9,
        state_bytes=7e9,
        gathers=float(gathers),
        reductions=float(reductions),
    )
    assert spent_s == ledger.host_s == pytest.approx(by_hand)
    for other in ("offload=states", "offload=none"):
        assert filed_s(Plan.parse(f"{words} {other}"), [whole], ADAM, ledger, **shards) == 0


def test_states_and_activations_of_blocks_are_offloaded_once() -> None:
    whole = loads(
        unit("a", activation_bytes=1.0, is_block=True, count=3), unit("b", activation_bytes=50.0)
    )
    for words, nbytes in (
        ("offload=optimizer", 7e9),
        ("offload=activations", 3.0),
        ("offload=optimizer,activations", 7e9 + 3),
        ("offload=none", 0.0),
    ):
        plan = Plan.parse(f"{words} microbatches=2")
        assert away_bytes(plan, whole, ADAM, gpus(1, 1).device) == nbytes
        assert away_bytes(plan, whole, ADAM, cpus(1).device) == 0
        ledger = Ledger(gpus(1, 1), {})
        seconds = moved_s(plan, whole, ADAM, ledger, cluster=gpus(1, 1))
        moved = 7e9 * plan.offload.optimizer + 2 * 3 * plan.offload.activations
        assert ledger.host_bytes == 2 * moved
        assert seconds == ledger.host_s == pytest.approx(2 * moved / HOST_LINK_BYTES_PER_S)
    on_disk = Plan.parse("offload=optimizer offload_to=disk")
    assert away_bytes(on_disk, whole, ADAM, cpus(1).device) == 7e9
    assert copied_s(10e9, cpus(1).device) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("largest", "others", "share"),
    [
        (CHUNK_BYTES / 2, 3 * CHUNK_BYTES / 2, 0.5),
        (3 * CHUNK_BYTES, CHUNK_BYTES, 0.75),
        (CHUNK_BYTES / 4, 0, 1.0),
        (0, 0, 1.0),
    ],
)
def test_a_step_in_chunks_holds_one_of_32_mib_or_a_larger_unit(
    largest: float, others: float, share: float
) -> None:
    small = others / 30
    units = (unit("a", parameter_bytes=largest), unit("b", parameter_bytes=small, count=30))
    assert chunk_share(loads(*units)) == pytest.approx(share)
