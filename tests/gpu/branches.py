"""Branches for CUDA that no plan alone reaches: clocks, memory, copies, random states, the probe.

Each is held against something that it did not compute: a clock on the wall, what was allocated, a
value written before.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from advisor.auto.check import run as run_checked
from advisor.auto.parallelize import auto_parallelize
from advisor.inputs.models import LoadedModel
from engines.data.prefetch import CopiesAhead
from engines.parallel import ParallelModel
from engines.runtime.peak_memory import measure_peak
from engines.runtime.product_time import ProductTime
from engines.runtime.random_states import random_states, restore_random_states
from engines.runtime.shortage import shortage_of
from profiles.allocator.process_peak import peak_memory_bytes, reset_peak_memory
from profiles.capture.capture import capture
from profiles.machine.probe import probe
from profiles.timing.stopwatch import default_device, time_blocks
from profiles.units import GIB, MIB
from tests.gpu.case import Case
from tests.gpu.exactness import MODELS
from tests.gpu.results import Row, Unit
from tests.gpu.setting import LeftOutError, Setting

ROOT = Path(__file__).resolve().parents[2]
CLOCK_ERROR = 0.25
"""Of a clock of ours beside the wall's: hosts pause."""


def cases(*, is_small: bool) -> list[Case]:
    every = [
        Case("probe", _probe, is_small=True),
        Case("memory of a process", _memory, is_small=True),
        Case("an allocation that is too large", _shortage),
        Case("random states", _random, is_small=True),
        Case("copies ahead", _copies, is_small=True),
        Case("time of products", _product_time, is_small=True),
        Case("times of blocks", _blocks, is_small=True),
        Case("checkpoint", _checkpoint),
        Case("auto_parallelize and advise check", _auto, limit_s=120.0),
        Case("tests that need a GPU", _pytest, limit_s=240.0),
    ]
    return [case for case in every if case.is_small or not is_small]


def _error(term: str, got: float, wanted: float, limit: float, note: str = "") -> Row:
    error = abs(got - wanted) / abs(wanted) if wanted else abs(got)
    return Row(term=term, unit=Unit.ERROR, measured=error, limit=limit, note=note)


def _true(term: str, is_right: bool, note: str = "") -> Row:
    return Row(term=term, unit=Unit.ERROR, measured=float(not is_right), limit=0.0, note=note)


def _probe(setting: Setting) -> Iterator[Row]:
    device = probe(ranks=1).device
    yield _true("kind", device.kind == setting.device.type, device.name)
    if setting.is_cuda:
        total = torch.cuda.get_device_properties(setting.device).total_memory
        yield _error("memory", device.memory_bytes.value, total, 0.0)


def _memory(setting: Setting) -> Iterator[Row]:
    """64 MiB that were there at the peak are counted."""
    device = setting.device
    setting.release()
    reset_peak_memory(device)
    before = peak_memory_bytes(device)
    block = torch.ones(64 * MIB, dtype=torch.uint8, device=device)
    setting.synchronize()
    more = peak_memory_bytes(device) - before
    yield _true("peak grows", 0 <= more <= 96 * MIB or not setting.is_cuda, f"by {more:,} bytes")
    own = measure_peak(device)
    if setting.is_cuda:
        yield _true("tensors", own.allocated_bytes >= block.nbytes)
        yield _true("reserved", own.reserved_bytes >= own.allocated_bytes)
        yield _true("no retries", own.retries == 0)


def _shortage(setting: Setting) -> Iterator[Row]:
    if not setting.is_cuda:
        raise LeftOutError("a CPU gives what it does not have")
    wanted = torch.cuda.get_device_properties(setting.device).total_memory
    shortage = None
    try:
        torch.empty(wanted, dtype=torch.uint8, device=setting.device)
    except torch.OutOfMemoryError as error:
        shortage = shortage_of(error, rank=0, device=setting.device)
    yield _true("is known for one", shortage is not None)
    if shortage is not None:
        yield _error("asked for", shortage.asked_bytes, wanted, 0.01)
        yield _true(
            "held", 0 < shortage.held_bytes < wanted, f"{shortage.held_bytes / GIB:.2f} GiB"
        )


def _random(setting: Setting) -> Iterator[Row]:
    saved = random_states(setting.device)
    first = torch.rand(8, device=setting.device)
    restore_random_states(saved, setting.device)
    yield _true("drawn again", torch.equal(first, torch.rand(8, device=setting.device)))


def _copies(setting: Setting) -> Iterator[Row]:
    """Pinned batches that are copied while a product runs arrive whole."""
    ahead = CopiesAhead(setting.device)
    if not ahead.is_on:
        yield _true("a CPU copies nothing", setting.device.type == "cpu")
        return
    batches = [torch.full((4 * MIB,), float(n)).pin_memory() for n in range(6)]
    busy = torch.randn(4096, 4096, device=setting.device)
    for number, batch in enumerate(ahead.ahead(batches)):
        assert isinstance(batch, torch.Tensor)
        busy = busy @ busy / 64
        copied = ahead.moved(batch)
        total = copied.sum()
        yield _error(f"batch {number}", total.item(), number * batch.numel(), 0.0)


def _product_time(setting: Setting) -> Iterator[Row]:
    """A step of products alone is all products."""
    edge = 64 if setting.is_small else 8192
    x = torch.randn(edge, edge, device=setting.device)
    products = ProductTime(setting.device)
    for watched in (products, products.whole(), products, products.whole()):
        with watched:
            for _ in range(4):
                x @ x
    if setting.is_small:  # launches are most of it
        yield _true("share is there", products.share > 0)
    else:
        yield _error("share", products.share, 1.0, CLOCK_ERROR)


def _blocks(setting: Setting) -> Iterator[Row]:
    subject = MODELS["gpt, small" if setting.is_small else "gpt"]
    model, sample = subject.build(), subject.batch(2)
    profile = capture(model, sample, loss_fn=subject.loss_fn)
    times = time_blocks(
        model,
        sample,
        profile,
        device_name=setting.sheet.device.name,
        loss_fn=subject.loss_fn,
        device=default_device(),
        budget_s=0.01 if setting.is_small else 1.0,
    )
    yield _true("all are timed", not times.left_out, ", ".join(times.left_out.values()))
    yield _true("model stays", next(model.parameters()).device.type == "cpu")


def _parallel(setting: Setting, *, seed: int) -> tuple[ParallelModel, LoadedModel]:
    torch.manual_seed(seed)
    subject = MODELS["gpt, small" if setting.is_small else "gpt"]
    loaded = LoadedModel(subject.build(), subject.batch(4), subject.loss_fn, "gpt")
    parallel = auto_parallelize(
        loaded.module,
        sample=loaded.sample,
        loss_fn=loaded.loss_fn,
        plan="microbatch_size=4",
        cluster=setting.bench or setting.sheet,
        learns=False,
    )
    return parallel, loaded


def _checkpoint(setting: Setting) -> Iterator[Row]:
    """Saved, trained on, loaded, and trained on again: the same losses."""
    parallel, loaded = _parallel(setting, seed=0)
    parallel.train_step(loaded.sample)
    with tempfile.TemporaryDirectory() as folder:
        parallel.save(Path(folder) / "saved")
        first = [parallel.train_step(loaded.sample).item() for _ in range(2)]
        other, _ = _parallel(setting, seed=1)
        other.load(Path(folder) / "saved")
        again = [other.train_step(loaded.sample).item() for _ in range(2)]
    for number, (one, two) in enumerate(zip(first, again, strict=True)):
        yield _error(f"loss {number}", two, one, 1e-6)


def _auto(setting: Setting) -> Iterator[Row]:
    """From a module to timed steps, as a user calls it, with a clock on the wall beside them."""
    parallel, loaded = _parallel(setting, seed=0)
    if not setting.is_cuda:
        raise LeftOutError("clocks are compared on a device that does nothing else")
    step = run_checked(parallel, loaded, setting.device, steps=5)
    setting.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        parallel.train_step(loaded.sample)
    setting.synchronize()
    wall_s = (time.perf_counter() - began) / 10
    assert step.step is not None
    yield _error("step", step.step.median_s, wall_s, CLOCK_ERROR, f"{wall_s * 1e3:.2f} ms")
    yield _true("update is a part of it", 0 < step.update.median_s < step.step.median_s)
    share = step.products_share
    yield _true("share of products", share is not None and 0 < share < 1.2, f"{share}")
    yield _true("on the device", all(p.is_cuda for p in _parameters(parallel.module)))


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters())


_LINE = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED) (.*)$")


def _pytest(setting: Setting) -> Iterator[Row]:
    """The tests that are skipped elsewhere, each a row."""
    files = sorted(
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if "mark.gpu" in path.read_text() and path.parent.name != "gpu"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-m", "gpu", "-W", "default"]
    run = subprocess.run(
        [*command, "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=220,
    )
    lines = [match for line in run.stdout.splitlines() if (match := _LINE.match(line))]
    if not lines:
        raise RuntimeError(
            f"pytest ended with {run.returncode}: {(run.stdout + run.stderr)[-600:]}"
        )
    for match in lines:
        outcome, rest = match.groups()
        name, _, reason = rest.partition(" - ")
        is_right = outcome in ("PASSED", "SKIPPED")
        yield _true(name.rpartition("/")[2], is_right, reason if not is_right else outcome.lower())
