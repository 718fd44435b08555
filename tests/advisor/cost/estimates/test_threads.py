"""Cost of nn.DataParallel: traffic and memory of the first device, by hand for ResNet-50."""

from __future__ import annotations

import pytest

from advisor.cost import CostModel, Estimate
from advisor.decide.choose import choose
from advisor.decide.comparison import PlanVerdict
from advisor.inputs.facts import Facts
from advisor.inputs.models import profile_model
from engines.plan import PartialPlan, Plan
from profiles.machine.clusters import cluster_from_name
from profiles.model.profile import Numerics
from profiles.workload.workload import Workload
from tests.factories import facts as make_facts
from tests.factories import gpus, transformer

PARAMETERS_BYTES = 4 * 25_557_032
IMAGE_BYTES, LOGITS_BYTES = 4 * 3 * 128 * 128, 4 * 1000
TENSORS = 161
DEVICES, IMAGES, ROUNDS = 4, 16, 2


@pytest.fixture(scope="module")
def facts() -> Facts:
    return Facts(
        model=profile_model("resnet50-128px", samples=1, sequence_length=None),
        cluster=cluster_from_name(f"{DEVICES}xV100-SXM2-16GB"),
        workload=Workload(global_batch_size=DEVICES * IMAGES * ROUNDS),
    )


def estimate(facts: Facts, kind: str) -> Estimate:
    words = f"data_parallel={kind} dp_replicate={DEVICES} microbatch_size={IMAGES}"
    return CostModel(facts).estimate(Plan.parse(f"{words} accumulation={ROUNDS}"))


def test_every_forward_sends_inputs_parameters_and_outputs_of_all_replicas(facts: Facts) -> None:
    sent_bytes = {t.purpose: t.payload_bytes * t.count for t in estimate(facts, "threads").traffic}
    others = DEVICES - 1
    assert sent_bytes == {
        "scattered inputs": others * ROUNDS * IMAGES * IMAGE_BYTES,
        "parameters of replicas": ROUNDS * PARAMETERS_BYTES,
        "outputs and their gradients": 2 * others * ROUNDS * IMAGES * LOGITS_BYTES,
        "gradients of replicas": ROUNDS * PARAMETERS_BYTES,
    }


def test_traffic_of_threads_is_never_overlapped(facts: Facts) -> None:
    cost = estimate(facts, "threads")
    assert cost.time.overlapped_s == 0
    assert cost.time.exposed_s == pytest.approx(sum(t.seconds for t in cost.traffic))


def test_one_interpreter_launches_for_all_devices(facts: Facts) -> None:
    """With one image a step takes as long as its launches. With 30, one device hides nearly all
    of its own launches, with 120 all of them, but not the launches of four devices. Gradients are
    accumulated on the first device only, one launch a tensor."""
    model, launch_s = facts.model, facts.cluster.device.launch_s.value
    costs = [unit.cost(Numerics.AS_BUILT) for unit in model.units]
    launches = sum(cost.forward_kernels + cost.backward_kernels for cost in costs)
    for images in (1, 30):
        words = f"dp_replicate={DEVICES} microbatch_size={images} accumulation={ROUNDS}"
        ours, ddp = (
            CostModel(facts).estimate(Plan.parse(f"data_parallel={kind} {words}")).time
            for kind in ("threads", "replicate")
        )
        once = ROUNDS * launches * launch_s
        adding = (ROUNDS - 1) * TENSORS * launch_s
        assert ours.compute_s + ours.launch_s == pytest.approx(DEVICES * once + adding)
        if images == 30:
            assert ddp.launch_s < adding  # of the additions alone
            alone = Plan.parse(f"dp_replicate={DEVICES} microbatch_size={4 * images}")
            assert CostModel(facts).estimate(alone).time.launch_s == 0
            assert ddp.compute_s > once


def test_the_first_device_holds_the_batch_and_the_outputs_of_all(facts: Facts) -> None:
    ours, ddp = estimate(facts, "threads"), estimate(facts, "replicate")
    others = DEVICES - 1
    assert ours.memory.batch - ddp.memory.batch == others * ROUNDS * IMAGES * IMAGE_BYTES
    # In addition to its own gradients: the sum of all replicas', and the logits of the others.
    more = PARAMETERS_BYTES + others * IMAGES * LOGITS_BYTES
    assert ours.memory.gathered >= more


def test_the_first_device_computes_the_loss_of_all_outputs() -> None:
    """A vocabulary of 32,000 and 128 tokens: the loss keeps the logits once, works in two more of
    them, and moves seven (`tests.factories.transformer`)."""
    model = transformer(layers=2, hidden=256, ffn=512, vocab=32_000, tokens=128)
    machines = gpus(1, DEVICES)
    costs = CostModel(make_facts(model, machines, batch=8 * DEVICES, precision="fp32"))
    ours, ddp = (
        costs.estimate(Plan.parse(f"data_parallel={kind} dp_replicate={DEVICES} microbatch_size=8"))
        for kind in ("threads", "replicate")
    )
    others, logits = DEVICES - 1, 8 * 128 * 32_000 * 4
    gradients = 4 * model.parameters
    assert ours.memory.gathered == pytest.approx(others * (1 + 1 + 2) * logits + gradients)
    seconds = others * 7 * logits / machines.device.memory_bandwidth_bytes_per_s.value
    assert ours.time.compute_s - ddp.time.compute_s == pytest.approx(seconds)


def test_threads_are_compared_on_request_and_lose_to_ddp(facts: Facts) -> None:
    batch = facts.workload.model_copy(update={"global_batch_size": DEVICES * 64})
    small = Facts(model=facts.model, cluster=facts.cluster, workload=batch)
    decision = choose(small, partial=PartialPlan(zero=0))
    assert decision.plan.dp_replicate == DEVICES
    answer = decision.why_not("data_parallel=threads")
    assert answer.verdict is PlanVerdict.SLOWER
    assert answer.estimate is not None
    assert answer.estimate.step_s > decision.estimate.step_s
    assert "more exposed communication" in answer.because


def test_threads_across_nodes_are_refused(facts: Facts) -> None:
    cluster = cluster_from_name("2x4xV100-SXM2-16GB")
    batch = facts.workload.model_copy(update={"global_batch_size": 256})
    decision = choose(Facts(model=facts.model, cluster=cluster, workload=batch))
    answer = decision.why_not("data_parallel=threads dp_replicate=8")
    assert answer.verdict is PlanVerdict.NOT_LEGAL
    assert "threads of one process reach the 4 devices of its node" in answer.because
