"""Moments of a step and the peak of one of them, summed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from advisor.cost.memory.buffers import gathered_by_torch, gradients_of_torch
from advisor.cost.memory.peak import (
    Moment,
    backward_moments,
    largest_copy,
    last_moment,
    moments_of,
    optimizer_step,
    peak,
    peak_at,
)
from advisor.cost.memory.states import ResidentStates
from advisor.cost.memory.timeline import timeline_of
from engines.plan import Plan
from profiles.workload.optimizers import Upkeep
from profiles.workload.stack import TORCH, Stack, States
from tests.advisor.cost.memory.hand_made import loads, unit
from tests.advisor.cost.memory.test_buffers import SPLIT
from tests.factories import cpus, gpus

# States of 7 bytes, temporaries of 3 tensor by tensor and of 5 list by list.
ADAM = Upkeep("adam", 7.0, 0.0, 0.0, 0.0, loop_bytes=3.0, list_bytes=5.0)
GPU, CPU = gpus(1, 4).device, cpus(4).device
OWN = Stack(states=States(weight=2, gradient=2, master=4))


@pytest.mark.parametrize(
    ("words", "gathered"),
    [
        ("dp_shard=4", 4 + 20 + 1.5 * 88 + 4),  # its own 40 are gone
        ("dp_replicate=4 zero=2", 64 - 40 + 1.5 * 88 + 4),
        ("dp_replicate=4 zero=2 microbatches=2", 64 + 1.5 * 88 + 4),  # kept for the next one
    ],
)
def test_a_reduction_begins_when_its_units_copy_and_activations_are_gone(
    words: str, gathered: float
) -> None:
    plan = Plan.parse(words)
    first, norm, head, loss = SPLIT.runs
    head = replace(head, activation_bytes=1000.0, input_bytes=7.0)
    parts = replace(SPLIT, runs=(replace(first, activation_bytes=100.0), norm, head, loss))
    moments = backward_moments(
        plan,
        parts,
        timeline_of(parts, plan.recompute),
        gradients_of_torch(plan, parts, on_device=True),
        gathered_by_torch(plan, parts),
    )
    reductions = {each.unit: each for each in moments if each.event == "reduction"}
    assert list(reductions) == ["head", "a"]
    assert reductions["head"].gathered == gathered
    assert (reductions["head"].activations, reductions["head"].transient) == (100, 7)


@pytest.mark.parametrize(
    ("words", "cpu", "root", "late"),
    [
        ("dp_shard=4", False, (0.5 + 1.5) * 8, (1.5 - 0.5 + 0.25) * 12),
        ("dp_shard=4", True, (0.5 + 2) * 8, (2 - 0.5 + 0.25) * 12),  # gloo copies its input
        ("dp_shard=4 offload=states", False, (0.5 + 1.5) * 8, (1.5 - 0.5) * 12),
    ],
)
def test_the_root_group_and_late_units_are_reduced_after_the_backward(
    words: str, cpu: bool, root: float, late: float
) -> None:
    """Late units have no shards of gradients before; both forms of theirs wait in 16 bits."""
    tied = unit("tied", parameter_bytes=10.0, gradient_bytes=12.0, is_separate=True, is_late=True)
    parts = loads(tied, *SPLIT.runs, compute_share=0.5)
    *_, first, second = moments_of(Plan.parse(words), parts, device=CPU if cpu else GPU)
    gradients = 0.0 if "offload" in words else 140 / 4
    assert (first.event, first.gradients) == ("reduction of the root group", gradients)
    assert first.gathered == root + 0.5 * (10 + 12)
    assert (second.unit, second.gradients) == ("tied", gradients)
    assert second.gathered == 0.5 * (10 + 12) + late


def test_the_largest_gathered_unit_may_be_gathered_early() -> None:
    for words, stack, nbytes in (
        ("dp_shard=4", TORCH, 40),
        ("dp_replicate=4 zero=1", TORCH, 40),
        ("dp_replicate=4", TORCH, 0),
        ("dp_shard=4", OWN, 40),
        ("dp_replicate=4 zero=2", OWN, 0),
    ):
        assert largest_copy(Plan.parse(words), SPLIT, stack) == nbytes


def test_an_update_takes_lists_on_accelerators_and_nothing_in_one_kernel() -> None:
    plan = Plan.parse("dp_shard=4")
    for device, stack, work in (
        (GPU, TORCH, 5),
        (CPU, TORCH, 3),
        (GPU, Stack(fused_optimizer=True), 0),
    ):
        moment = optimizer_step(plan, 140.0, ADAM, device, stack=stack)
        assert (moment.gradients, moment.transient) == (140 / 4, work)
    resident = ResidentStates(parameters=20.0, gradients=11.0, optimizer=0.0)
    for states, gather, work in (
        ({"gradient": 2, "master": 4}, None, 5 + 140 / 4),  # copied to fp32
        ({"gradient": 4, "master": 4}, None, 5),
        ({"gradient": 2, "master": 0}, None, 5),
        ({"gradient": 4, "master": 4}, 9.0, 9),
        ({"gradient": 4, "master": 4}, 2.0, 5),
        ({"gradient": 4, "master": 4}, 99.0, 20),
    ):
        stack = Stack(states=States(weight=2, **states), gather_bytes=gather)
        moment = optimizer_step(plan, 140.0, ADAM, GPU, stack=stack, own=resident)
        assert (moment.gradients, moment.transient) == (11, work)
        alone = optimizer_step(Plan(), 0.0, ADAM, GPU, stack=stack, own=resident)
        assert alone.transient == 5


def test_an_update_of_offloaded_states_fetches_them_or_runs_on_the_host() -> None:
    for words, device, expected in (
        ("offload=optimizer", GPU, (140, 5 + 7)),
        ("offload=optimizer offload_to=disk", CPU, (140, 3)),
        ("offload=optimizer", CPU, (140, 3)),
        ("dp_shard=4 offload=states offload_to=disk", CPU, (0, 3)),
        ("dp_shard=4 offload=states", CPU, (140 / 4, 3)),
    ):
        moment = last_moment(Plan.parse(words), SPLIT, ADAM, device)
        assert moment is not None
        assert (moment.gradients, moment.transient) == expected
    assert last_moment(Plan.parse("dp_shard=4 offload=states"), SPLIT, ADAM, GPU) is None


FULLEST = Moment("backward", "a", 1.0, 10.0, 100.0, 1000.0, 2.0)
AMOUNTS = {
    "parameter_bytes": 400.0,
    "gradient_bytes": 800.0,
    "batch_bytes": 3.0,
    "buffer_bytes": 5.0,
    "unsharded_bytes": 11.0,
    "unsharded_gradient_bytes": 13.0,
    "ahead": 17.0,
    "idle": 19.0,
    "away": 23.0,
}


@pytest.mark.parametrize(
    ("more", "parameters", "optimizer", "host", "disk"),
    [
        ("", 111, 7, 23, 0),
        ("offload=states", 11, 0, 331 + 23, 0),
        ("offload=states offload_to=disk", 11, 0, 0, 331 + 23),
    ],
)
def test_a_peak_is_its_moment_and_all_that_stays(
    more: str, parameters: float, optimizer: float, host: float, disk: float
) -> None:
    device = GPU.model_copy(update={"name": "A100"})
    plan, context = Plan.parse(f"dp_shard=4 {more}"), device.context_bytes
    result = peak_at(FULLEST, plan, update=ADAM, device=device, **AMOUNTS, activation_error=0.25)
    memory, workspaces = result.memory, 2 * (8 * 2**20 + 128 * 1024)
    assert (memory.parameters, memory.gradients, memory.optimizer) == (parameters, 14, optimizer)
    assert (memory.activations, memory.gathered, memory.transient) == (10, 100, 1000)
    assert (memory.batch, memory.transfers, memory.workspaces) == (3, 5, workspaces)
    allocated = parameters + 14 + optimizer + 1110 + 8 + workspaces
    assert result.states_bytes == 100 + 11 + 200 + 13 + 7
    assert (result.host_bytes, result.disk_bytes, result.loss_bytes) == (host, disk, 2)
    assert result.low_bytes == pytest.approx(allocated - 0.25 * 1010 + context.low, abs=1e-3)
    high = (allocated + 0.25 * 1010 + 17) * 1.1 + context.high
    assert result.high_bytes == pytest.approx(high, abs=1e-3)
    reserved = allocated * 1.09 + 19 + context.value
    assert result.reserved_bytes == pytest.approx(reserved, abs=1e-3)
    wild = peak_at(FULLEST, plan, update=ADAM, device=device, **AMOUNTS, activation_error=3.0)
    assert wild.low_bytes == pytest.approx(allocated - 1010 + context.low, abs=1e-3)


def test_a_forward_has_the_casts_of_blocks_that_run_again_and_its_loss_has_not() -> None:
    plan = Plan.parse("dp_replicate=4 recompute=full")
    forwards = [m for m in moments_of(plan, SPLIT, device=CPU) if m.event == "forward"]
    assert [moment.gathered for moment in forwards] == [20, 20, 60, 40]


def test_the_largest_copy_is_reserved_by_its_stream_and_gathered_early() -> None:
    """In the loss of the second microbatch there are all shards of gradients: those of another
    stream are counted once."""
    *units, loss = SPLIT.runs
    parts = replace(SPLIT, runs=(*units, replace(loss, forward_transient_bytes=10_000.0)))
    plan = Plan.parse("dp_shard=4 microbatches=2")
    most = peak(plan, parts, update=ADAM, device=GPU, batch_bytes=0.0)
    assert most.loss_bytes == 10_000
    saved = replace(loss, activation_bytes=20_000.0, backward_transient_bytes=300.0)
    late = peak(
        plan, replace(SPLIT, runs=(*units, saved)), update=ADAM, device=GPU, batch_bytes=0.0
    )
    assert late.loss_bytes == 20_300
    assert (most.memory.gradients, most.memory.transient) == (140 / 4, 10_000)
    allocated = most.memory.total - GPU.context_bytes.value
    reserved = allocated * 1.09 + 40 + GPU.context_bytes.value
    assert most.reserved_bytes == pytest.approx(reserved, abs=1e-3)
    doubt = 40 + parts.activation_error * 10_000
    high = (allocated + doubt) * 1.1 + GPU.context_bytes.high
    assert most.high_bytes == pytest.approx(high, abs=1e-3)


def test_buffers_of_the_model_and_of_messages_are_there_at_every_moment() -> None:
    parts = replace(SPLIT, buffer_bytes=50.0)
    exchange = {"batch_bytes": 3.0, "exchange_bytes": 600.0}
    plain, more = (
        peak(Plan.parse("dp_replicate=4"), each, update=ADAM, device=CPU, **sizes).memory
        for each, sizes in ((SPLIT, {"batch_bytes": 0.0}), (parts, exchange))
    )
    assert (more.batch - plain.batch, more.gathered - plain.gathered) == (53, 600)
    stack = Stack(states=States(weight=2, gradient=2, master=4), bucket_bytes=70.0)
    buckets, none = (
        peak(
            Plan.parse("dp_replicate=4"),
            SPLIT,
            update=ADAM,
            device=GPU,
            batch_bytes=0.0,
            stack=each,
        ).memory.gathered
        for each in (stack, stack.model_copy(update={"bucket_bytes": None}))
    )
    assert buckets - none == 70
