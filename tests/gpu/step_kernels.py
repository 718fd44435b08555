"""Kernels of one step by class, as a profiler sees them, beside the cost model's seconds of each.

A step's error says how much is wrong, this says where: products, attention, convolutions with maps
that are turned, and the rest, which is bound by memory.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from advisor.cost.calibration import CALIBRATION
from advisor.cost.compute.rates import DeviceRates
from advisor.cost.context import CostContext
from advisor.cost.load.unit_load import UnitLoad
from advisor.inputs.facts import Facts
from engines.parallel import ParallelModel
from engines.plan import Plan
from profiles.capture.batch.call import Batch
from profiles.machine.cluster import ClusterProfile
from profiles.model.profile import ModelProfile
from profiles.model.work import ProductKind
from profiles.workload.stack import TORCH
from tests.gpu.case import Case
from tests.gpu.predict import workload_of
from tests.gpu.results import Row, Unit
from tests.gpu.setting import WARM_UP, Setting
from tests.gpu.subjects import SMALL, SUBJECTS, captured
from tests.gpu.training import Variant, built, plan_of, there

PRODUCTS, ATTENTION, CONVOLUTIONS, REST = "products", "attention", "convolutions", "the rest"
OPTIMIZER = "optimizer"
MODELS = ("gpt-1.3b", "ViT-L/16", "ResNet-50", "T5 large", "ConvNeXt large", "BERT large")
MICROSECONDS = 1e-6


def cases(*, is_small: bool) -> list[Case]:
    return [
        Case(f"kernels of a step, {name}", functools.partial(_run, name), is_small=is_small)
        for name in (SMALL if is_small else MODELS)
    ]


def _run(name: str, setting: Setting) -> Iterator[Row]:
    subject = (SMALL if setting.is_small else SUBJECTS)[name]
    variant = Variant("" if setting.is_small else "precision=bf16")
    plan = plan_of(setting, subject, variant)
    parallel = built(setting, subject, name, variant, plan)
    batch = there(subject.batch(plan.microbatch_size or 1), setting)
    for _ in range(WARM_UP):
        parallel.train_step(batch)
    seen = kernels(setting, parallel, batch)
    model = captured(subject, name, on_processor=not setting.is_cuda)
    sheet, bench = (by_class(plan, model, machine) for machine in setting.machines())
    del parallel
    setting.release()
    for term, seconds in seen.items():
        yield Row(
            term=term,
            unit=Unit.SECONDS,
            measured=seconds,
            from_sheet=None if sheet is None else sheet.get(term),
            from_bench=None if bench is None else bench.get(term),
        )


def kernels(setting: Setting, parallel: ParallelModel, batch: Batch) -> Counter[str]:
    """Seconds of a step's kernels by class; of operators on the CPU."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.is_cuda else [])]
    with profile(activities=activities) as recorded:
        parallel.train_step(batch)
        setting.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset") if setting.is_cuda else ("cpu_op",)
    operators = {
        event["args"].get("External id"): event["name"]
        for event in events
        if event.get("cat") == "cpu_op"
    }
    seconds: Counter[str] = Counter()
    for event in events:
        if event.get("cat") in kinds:
            operator = operators.get(event["args"].get("External id"), "")
            seconds[_class(operator)] += event["dur"] * MICROSECONDS
    return seconds


def _class(operator: str) -> str:
    name = operator.removeprefix("aten::")
    if "attention" in name:
        return ATTENTION
    if "convolution" in name:
        return CONVOLUTIONS
    if name in ("mm", "addmm", "bmm", "baddbmm", "linear") or "_grouped_mm" in name:
        return PRODUCTS
    return OPTIMIZER if name.startswith("_foreach") else REST


def by_class(
    plan: Plan, model: ModelProfile, machine: ClusterProfile | None
) -> Counter[str] | None:
    """The cost model's seconds of a step's kernels on one device."""
    if machine is None:
        return None
    workload = workload_of(plan, model, "adamw")
    context = CostContext(Facts(model=model, cluster=machine, workload=workload, stack=TORCH))
    dtype = plan.precision.dtype
    rates = DeviceRates.of(machine.device, dtype, TORCH, CALIBRATION, charges_kernels=True)
    seconds: Counter[str] = Counter()
    for run in context.loads(plan).runs:
        for unit in (run, run.glue):
            if unit is not None:
                for term, each in _of_unit(unit, rates):
                    seconds[term] += run.count * each
    return seconds


def _of_unit(unit: UnitLoad, rates: DeviceRates) -> Iterator[tuple[str, float]]:
    for forward in (True, False):
        moved = unit.forward_moved_bytes if forward else unit.backward_moved_bytes
        for product in unit.work.products:
            flop = product.forward_flop if forward else product.backward_flop
            nbytes = product.forward_bytes if forward else product.backward_bytes
            moved -= nbytes
            is_norm = product.kind is ProductKind.ELEMENTWISE
            term = CONVOLUTIONS if product.is_convolution else REST if is_norm else PRODUCTS
            yield term, rates.product_s(product, flop, nbytes)
        for call in unit.work.attention:
            moved -= call.forward_bytes if forward else call.backward_bytes
            yield ATTENTION, rates.attention_s(call, forward=forward)
        cycles = unit.forward_cycles if forward else unit.backward_cycles
        yield REST, rates.moving_s(max(0.0, moved), cycles)
