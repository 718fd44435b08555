"""Work of a processor beside its multiplications: cycles of cores, and blocks that it packs."""

from __future__ import annotations

import pytest

from advisor.cost import CostModel
from advisor.cost.calibration import CALIBRATION
from advisor.cost.compute.rates import DeviceRates
from advisor.cost.load.work import ProductLoad
from engines.plan import Plan
from profiles.machine.cluster import ClusterProfile
from profiles.machine.clusters import resolve_cluster
from profiles.model.profile import Affine, ModelProfile, Numerics
from profiles.model.work import AttentionCall, AttentionKernel, ProductKind, attention_cost
from profiles.workload.stack import TORCH, Stack
from tests.engines.cases import cpu_ranks
from tests.factories import facts, transformer

H100 = resolve_cluster("1x1xH100-SXM-80GB")
FORWARD, BACKWARD = 3e9, 1e9
BLOCKS, ROWS = 4, 2


def model(*, cycles: float) -> ModelProfile:
    """Blocks with cycles beside their bytes."""
    plain = transformer(
        layers=BLOCKS, hidden=64, ffn=128, vocab=128, tokens=16, numerics=(Numerics.AS_BUILT,)
    )
    added = {
        "forward_cycles": Affine(per_sample=cycles * FORWARD),
        "backward_cycles": Affine(per_sample=cycles * BACKWARD),
    }
    units = [
        unit.model_copy(
            update={"costs": {k: c.model_copy(update=added) for k, c in unit.costs.items()}}
        )
        if unit.is_block
        else unit
        for unit in plain.units
    ]
    return plain.model_copy(update={"units": tuple(units)})


def added_s(
    plan: str,
    machines: ClusterProfile,
    *,
    on_processor: bool = True,
    cycles: float = 1.0,
    stack: Stack = TORCH,
) -> float:
    steps = []
    for each in (0.0, cycles):
        subject = model(cycles=each).model_copy(update={"on_processor": on_processor})
        known = facts(subject, machines, batch=ROWS, precision="fp32").rebuilt(stack=stack)
        steps.append(CostModel(known).estimate(Plan.parse(plan)).step_s)
    return steps[1] - steps[0]


@pytest.mark.parametrize(
    ("plan", "cycles"),
    [
        ("microbatch_size=2", FORWARD + BACKWARD),
        ("microbatch_size=1 accumulation=2", FORWARD + BACKWARD),
        ("microbatch_size=2 recompute=full", 2 * FORWARD + BACKWARD),
        ("microbatch_size=2 recompute=selective", 2 * FORWARD + BACKWARD),
    ],
)
def test_a_processor_takes_them_in_every_pass(plan: str, cycles: float) -> None:
    machines = cpu_ranks(1)
    per_s = machines.device.flop_per_s["float32"].value / 32
    assert added_s(plan, machines) == pytest.approx(BLOCKS * ROWS * cycles / per_s, rel=1e-3)


def test_an_accelerator_takes_none_of_a_core() -> None:
    """Nor does a processor take those of multiprocessors."""
    assert added_s("microbatch_size=2", H100) == 0.0
    assert added_s("microbatch_size=2", cpu_ranks(1), on_processor=False) == 0.0


@pytest.mark.parametrize(
    ("plan", "cycles"),
    [
        ("microbatch_size=2", FORWARD + BACKWARD),
        ("microbatch_size=2 recompute=full", 2 * FORWARD + BACKWARD),
        ("microbatch_size=2 recompute=selective", 2 * FORWARD + BACKWARD),
    ],
)
def test_an_accelerator_takes_those_of_its_multiprocessors(plan: str, cycles: float) -> None:
    """132 of 128 lanes. Launches hide behind the first of them: a second time as many add all."""
    per_s = H100.device.flop_per_s["float32"].value / 2 / 128
    once, twice = (added_s(plan, H100, on_processor=False, cycles=n) for n in (1.0, 2.0))
    assert twice - once == pytest.approx(BLOCKS * ROWS * cycles / per_s, rel=1e-3)


def test_kernels_without_cycles_move_all_that_the_memory_does_where_others_are_charged() -> None:
    """A unit whose kernels all load vectors is not slower than one with a kernel that does not."""
    average = DeviceRates.of(H100.device, "bfloat16", TORCH, CALIBRATION)
    charged = DeviceRates.of(H100.device, "bfloat16", TORCH, CALIBRATION, charges_kernels=True)
    moved = H100.device.memory_bandwidth_bytes_per_s.value
    assert charged.moving_s(moved, 0.0) == 1.0 < charged.moving_s(moved, 1e9)
    assert average.moving_s(moved, 0.0) == average.moving_s(moved, 1e9) > 1.2


def test_a_stack_that_fuses_kernels_takes_none() -> None:
    compiled = TORCH.model_copy(update={"compiled": True})
    assert added_s("microbatch_size=2", H100, on_processor=False, stack=compiled) == 0.0


def with_attention(plain: ModelProfile) -> ModelProfile:
    """Blocks with a call of attention whose products are many, and cycles more."""
    call = AttentionCall(
        heads=4, kv_heads=4, queries=512, keys=512, width=16, value_width=16, is_causal=True,
        element_bytes=4, kernel=AttentionKernel.CPU,
    )  # fmt: skip
    units = []
    for unit in plain.units:
        cost = unit.cost(Numerics.AS_BUILT)
        own = attention_cost(call, call.kernel)
        update = {
            "attention": (call,),
            "forward_flop": cost.forward_flop + Affine(per_sample=own.forward_flop),
            "backward_flop": cost.backward_flop + Affine(per_sample=own.backward_flop),
        }
        costs = {Numerics.AS_BUILT: cost.model_copy(update=update)}
        units.append(unit.model_copy(update={"costs": costs}) if unit.is_block else unit)
    return plain.model_copy(update={"units": tuple(units)})


@pytest.mark.parametrize(("recompute", "forwards"), [("none", 1), ("full", 2), ("selective", 1)])
def test_attention_takes_cycles_beside_its_products_and_selective_recompute_keeps_it(
    recompute: str, forwards: int
) -> None:
    """512 queries of 4 heads, 16 wide: 4 tensors of 128 KiB, 12 with the backward's, and a sum of
    4 bytes for each query of a head."""
    machines, plan = cpu_ranks(1), Plan.parse(f"microbatch_size=2 recompute={recompute}")
    steps = []
    for subject in (model(cycles=0.0), with_attention(model(cycles=0.0))):
        known = facts(subject, machines, batch=ROWS, precision="fp32")
        steps.append(CostModel(known).estimate(plan).step_s)
    queries = 4 * 512
    forward = queries * (1.1 * 512 + 140 + 16**2 / 28 - (4 * 16 * 4 + 4) / 4)
    backward = queries * (2.8 * 512 + 140 + 16**2 / 14 - (8 * 16 * 4 + 4) / 4)
    multiplied = 4 * queries * 512 * 16
    cycles = forwards * (forward + multiplied / 32) + backward + 2.5 * multiplied / 32
    per_s = machines.device.flop_per_s["float32"].value / 32
    assert steps[1] - steps[0] == pytest.approx(BLOCKS * ROWS * cycles / per_s, rel=0.1)


def test_a_processor_packs_operands_before_it_multiplies_them() -> None:
    m, n, k, nbytes = 2048.0, 1024.0, 256.0, 1e9
    flop = 2 * m * n * k
    product = ProductLoad(ProductKind.LINEAR, m, n, k, 1.0, flop, 2 * flop, nbytes, 2 * nbytes)
    rates = DeviceRates.of(cpu_ranks(1).device, "float32", TORCH, CALIBRATION)
    moving_s = nbytes / rates.bandwidth
    multiplying_s = rates.product_s(product, flop, 0.0)
    assert multiplying_s > 0
    assert rates.product_s(product, flop, nbytes) == pytest.approx(multiplying_s + moving_s)
