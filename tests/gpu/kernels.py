"""Kernels by themselves: products, copies, launches, attention; beside what predictions take.

The bench that every prediction can rest on (`profiles.machine.bench`) is run first, and kept with
the results. Values are random: of zeros and ones a device that is bound by its power makes more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from advisor.cost.calibration import CALIBRATION, is_power_bound
from advisor.cost.compute.rates import (
    PYTHON_SHARE,
    DeviceRates,
    matmul_fraction,
    peak_flop_per_s,
    product_efficiency,
)
from advisor.cost.load.work import AttentionLoad, ProductLoad
from profiles.capture.operators.kernel_charges import operand
from profiles.machine.bench import launch_time
from profiles.machine.cluster import Device
from profiles.model.kernel_cycles import COPY, POINTWISE, SUM, charge
from profiles.model.work import AttentionKernel, ProductKind
from profiles.units import MIB
from profiles.workload.stack import TORCH
from tests.gpu.case import Case
from tests.gpu.results import Row, Unit
from tests.gpu.setting import LeftOutError, Setting

EDGES = (512, 1024, 2048, 4096, 8192, 16_384)
CURVE_EDGES = (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12_288)
SMALL_EDGES = (32, 64)
IN_A_ROW = 200  # products, so that a board comes to its limit of power
DTYPES = ("bfloat16", "tfloat32", "float32", "float16", "float8_e4m3fn")
# Products (m, n, k) of layers: of large and small models, thin, not in multiples of 64, a head.
LAYERS = (
    (16_384, 6144, 2048),
    (16_384, 8192, 2048),
    (16_384, 2048, 8192),
    (4096, 12_288, 4096),
    (2048, 3072, 1024),
    (128, 4096, 4096),
    (16, 4096, 4096),
    (16_384, 50_257, 1600),
    (16_384, 1600, 50_257),
    (4096, 1000, 1000),
    (16_384, 50_304, 2048),
)
SMALL_LAYERS = ((32, 48, 16),)
ATTENTION = {  # batch, heads, tokens, width of a head
    "1 x 16 x 8192 x 128": (1, 16, 8192, 128),
    "8 x 16 x 2048 x 64": (8, 16, 2048, 64),
    "4 x 16 x 2048 x 128": (4, 16, 2048, 128),
    "64 x 16 x 197 x 64": (64, 16, 197, 64),
}
SMALL_ATTENTION = {"2 x 2 x 16 x 8": (2, 2, 16, 8)}
_NAMED = {
    "as torch chooses": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_KERNELS = {"cuDNN": AttentionKernel.FLASH3}  # else the second generation, or torch's choice


def bench_cases(*, is_small: bool) -> list[Case]:
    dtypes = ("float32",) if is_small else DTYPES
    return [
        *(_case(f"products in {d}", functools.partial(_products, d), is_small) for d in dtypes),
        _case("memory and launches", _memory, is_small),
        _case("copies to the host", _host_copies, is_small),
        *(
            _case(f"attention, {name}", functools.partial(_attention, name), is_small)
            for name in (["as torch chooses"] if is_small else _NAMED)
        ),
    ]


def curve_cases(*, is_small: bool) -> list[Case]:
    return [
        _case("curve", _curve, is_small),
        _case("layers", _layers, is_small),
        _case("layers between other kernels", _between, is_small),
        _case("elementwise", _elementwise, is_small),
    ]


def device_rows(setting: Setting) -> Iterator[Row]:
    """The bench beside the data sheet, quantity by quantity: `setting.bench` as measured."""
    assert setting.bench is not None
    sheet, bench = setting.sheet.device, setting.bench.device
    usual = str(setting.dtype).removeprefix("torch.")
    quantities: dict[str, tuple[Unit, Callable[[Device], float | None]]] = {
        f"large products in {usual}": (
            Unit.FLOP_PER_S,
            lambda d: peak_flop_per_s(d, usual).value * matmul_fraction(d),
        ),
        "memory bandwidth": (
            Unit.BYTES_PER_S,
            lambda d: CALIBRATION.bandwidth_bytes_per_s(d),
        ),
        "launch": (Unit.SECONDS, lambda d: d.launch_s.value),
        "link to the host": (Unit.BYTES_PER_S, _host_rate),
    }
    for name, (unit, of) in quantities.items():
        measured = of(bench)
        if measured is not None:
            yield Row(term=name, unit=unit, measured=measured, from_sheet=of(sheet))


def _case(name: str, run: Callable[[Setting], Iterator[Row]], is_small: bool) -> Case:
    return Case(name, run, is_small=is_small)


def _products(dtype: str, setting: Setting) -> Iterator[Row]:
    for edge in SMALL_EDGES if setting.is_small else EDGES:
        yield _square(setting, dtype, edge)


def _curve(setting: Setting) -> Iterator[Row]:
    """Square products in the usual dtype, from which `tests.gpu.curve` writes the cluster file."""
    dtype = str(setting.dtype).removeprefix("torch.")
    for edge in SMALL_EDGES if setting.is_small else CURVE_EDGES:
        yield _square(setting, dtype, edge)


def _square(setting: Setting, dtype: str, edge: int) -> Row:
    flop = 2.0 * edge**3
    with _Tf32(dtype == "tfloat32"):
        seconds = setting.kernel_seconds(_product(setting, dtype, edge, edge, edge))

    def rate(device: Device) -> float:
        peak = peak_flop_per_s(device, dtype).value
        return peak * matmul_fraction(device) * product_efficiency(device, flop, peak)

    return _row(setting, str(edge), Unit.FLOP_PER_S, flop / seconds, rate)


def _layers(setting: Setting) -> Iterator[Row]:
    """Seconds of products as layers have them, beside the cost model's."""
    dtype = str(setting.dtype).removeprefix("torch.")
    for m, n, k in SMALL_LAYERS if setting.is_small else LAYERS:
        flop, moved = 2.0 * m * n * k, 2.0 * (m * n + n * k + m * k)
        load = ProductLoad(ProductKind.LINEAR, m, n, k, 1, flop, 2 * flop, moved, 2 * moved)

        def seconds(
            device: Device, load: ProductLoad = load, flop: float = flop, moved: float = moved
        ) -> float:
            rates = DeviceRates.of(device, dtype, TORCH, CALIBRATION)
            return rates.product_s(load, flop, moved)

        measured_s = setting.kernel_seconds(_product(setting, dtype, m, n, k))
        yield _row(setting, f"{m} x {n} x {k}", Unit.SECONDS, measured_s, seconds)


def _between(setting: Setting) -> Iterator[Row]:
    """Rates of products of a step, between others that leave power to them, over those in a row."""
    dtype = str(setting.dtype).removeprefix("torch.")
    x = torch.randn((64, 64) if setting.is_small else (16_384, 8192), device=setting.device)
    out = torch.empty_like(x)
    count = 1 if setting.is_small else IN_A_ROW

    def other() -> None:
        torch.add(x, 1.0, out=out)

    for m, n, k in SMALL_LAYERS if setting.is_small else LAYERS[:4]:
        product = _product(setting, dtype, m, n, k)

        def mixed(product: Callable[[], object] = product) -> None:
            product()
            other()
            other()

        row_s, other_s, mixed_s = (
            setting.seconds(functools.partial(_repeated, work, count)) / count
            for work in (product, other, mixed)
        )
        yield _row(
            setting,
            f"{m} x {n} x {k}",
            Unit.RATIO,
            row_s / (mixed_s - 2 * other_s),
            lambda device: CALIBRATION.between if is_power_bound(device) else 1.0,
        )


def _repeated(work: Callable[[], object], count: int) -> None:
    for _ in range(count):
        work()


def _product(setting: Setting, dtype: str, m: int, n: int, k: int) -> Callable[[], object]:
    """A product of random values, (m, k) by (k, n); the second lies as a layer's weight does."""
    if dtype == "float8_e4m3fn":
        return _narrow_product(setting, m, n, k)
    kind = torch.float32 if dtype == "tfloat32" else getattr(torch, dtype)
    left = torch.randn(m, k, device=setting.device, dtype=kind)
    right = torch.randn(n, k, device=setting.device, dtype=kind).t()
    result = torch.empty(m, n, device=setting.device, dtype=kind)
    return lambda: torch.mm(left, right, out=result)


def _narrow_product(setting: Setting, m: int, n: int, k: int) -> Callable[[], object]:
    """In 8 bits, from compute capability 8.9 on: the second factor lies by columns."""
    if not setting.is_cuda or torch.cuda.get_device_capability(setting.device) < (8, 9):
        raise LeftOutError("this device has no units for 8 bits")
    one = torch.ones((), device=setting.device)
    left = torch.randn(m, k, device=setting.device).to(torch.float8_e4m3fn)
    right = torch.randn(n, k, device=setting.device).to(torch.float8_e4m3fn).t()
    return lambda: torch._scaled_mm(
        left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _memory(setting: Setting) -> Iterator[Row]:
    size = (1 if setting.is_small else 1024) * MIB
    origin = torch.randint(256, (size,), device=setting.device, dtype=torch.uint8)
    target = torch.empty_like(origin)
    seconds = setting.seconds(lambda: target.copy_(origin))
    yield _row(
        setting,
        "copy on the device",
        Unit.BYTES_PER_S,
        2 * size / seconds,
        lambda device: device.memory_bandwidth_bytes_per_s.value,
        "bytes read and written",
    )
    yield _row(
        setting,
        "launch",
        Unit.SECONDS,
        launch_time(setting.device, seconds=0.01 if setting.is_small else 0.3),
        lambda device: device.launch_s.value,
        "a kernel of a small step, forward and backward",
    )
    yield _row(
        setting,
        "the same on a processor",
        Unit.SECONDS,
        launch_time(torch.device("cpu"), seconds=0.01 if setting.is_small else 0.3),
        lambda device: device.launch_s.value * (PYTHON_SHARE if device.kind != "cpu" else 1.0),
        "Python and torch without the driver",
    )


def _host_copies(setting: Setting) -> Iterator[Row]:
    """Both ways, pinned and not; the bench takes the slower way of the pinned ones."""
    if not setting.is_cuda:
        raise LeftOutError("there is no way to the host but on a GPU")
    there = torch.empty(256 * MIB, dtype=torch.uint8, device=setting.device)
    for is_pinned in (True, False):
        host = torch.empty(there.numel(), dtype=torch.uint8, pin_memory=is_pinned)
        host.random_(256)
        kind = "pinned" if is_pinned else "not pinned"
        for way, to, source in (("to the device", there, host), ("to the host", host, there)):
            copy = functools.partial(to.copy_, source, non_blocking=is_pinned)
            rate = there.numel() / setting.seconds(copy)
            yield _row(
                setting, f"{way}, {kind}", Unit.BYTES_PER_S, rate, _host_rate if is_pinned else None
            )


def _host_rate(device: Device) -> float | None:
    known = device.host_link_bytes_per_s
    return None if known is None else known.value


def _attention(name: str, setting: Setting) -> Iterator[Row]:
    """Forward and backward, causal: FLOP are those of the pairs that are seen."""
    backend = _NAMED[name]
    for shape, (batch, heads, tokens, width) in (
        SMALL_ATTENTION if setting.is_small else ATTENTION
    ).items():
        q, k, v = (
            torch.randn(
                batch, heads, tokens, width, device=setting.device, dtype=setting.dtype
            ).requires_grad_()
            for _ in range(3)
        )
        forward_flop = 2 * 2.0 * batch * heads * tokens**2 * width / 2
        chosen: AbstractContextManager[None] = (
            nullcontext() if backend is None else sdpa_kernel(backend)
        )
        with chosen:
            forward_s = setting.kernel_seconds(functools.partial(_attended, q, k, v))
            both = functools.partial(_attended_and_back, q, k, v, torch.randn_like(q))
            backward_s = setting.kernel_seconds(both) - forward_s
        of_shape = functools.partial(_attention_load, name, (batch, heads, tokens, width))
        for forward, seconds in ((True, forward_s), (False, backward_s)):
            flop = forward_flop if forward else 2.5 * forward_flop
            yield _row(
                setting,
                f"{shape}, {'forward' if forward else 'backward'}",
                Unit.FLOP_PER_S,
                flop / seconds,
                functools.partial(_attention_rate, of_shape, setting.dtype, forward),
            )


def _attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _attended_and_back(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> None:
    torch.autograd.grad(_attended(q, k, v), (q, k, v), gradient)


def _attention_load(name: str, shape: tuple[int, int, int, int], device: Device) -> AttentionLoad:
    batch, heads, tokens, width = shape
    kernel = _KERNELS.get(name, AttentionKernel.FLASH2)
    if name == "as torch chooses" and device.is_hopper_or_later:
        kernel = AttentionKernel.FLASH3
    flop = 2 * 2.0 * batch * heads * tokens**2 * width / 2
    return AttentionLoad(
        kernel, width, flop, 2.5 * flop, queries=tokens, keys=tokens, is_causal=True
    )


def _attention_rate(
    of_shape: Callable[[Device], AttentionLoad], dtype: torch.dtype, forward: bool, device: Device
) -> float:
    call = of_shape(device)
    rates = DeviceRates.of(device, str(dtype).removeprefix("torch."), TORCH, CALIBRATION)
    flop = call.forward_flop if forward else call.backward_flop
    return flop / rates.attention_s(call, forward=forward)


def _elementwise(setting: Setting) -> Iterator[Row]:
    """Bytes per second of operations that are bound by memory, or by what multiprocessors do."""
    shape = (64, 256) if setting.is_small else (16_384, 8192)
    x = torch.randn(shape, device=setting.device, dtype=setting.dtype)
    y, scale = torch.randn_like(x), torch.ones(shape[1], device=setting.device, dtype=x.dtype)
    wide, turned = x.float(), x.view(shape[0], -1, 64).transpose(0, 1)
    out = torch.empty_like(x)
    passes: dict[str, tuple[Callable[[], Tensor], str, list[Tensor]]] = {
        "add": (lambda: torch.add(x, y, out=out), POINTWISE, [x, y]),
        "add of two dtypes": (lambda: wide + x, POINTWISE, [wide, x]),
        "product with a row": (lambda: x * scale, POINTWISE, [x, scale]),
        "turned copy": (lambda: turned.contiguous(), COPY, [turned]),
        "gelu": (lambda: F.gelu(x), "gelu", [x]),
        "layer norm": (
            lambda: F.layer_norm(x, shape[1:], scale, scale), "native_layer_norm", [x]
        ),
        "softmax": (lambda: F.softmax(x, dim=-1), "_softmax", [x]),
        "cast to fp32": (lambda: x.float(), COPY, [x]),
        "cast from fp32": (lambda: wide.to(x.dtype), COPY, [wide]),
        "halves side by side": (lambda: torch.cat([x, y], dim=-1), "cat", [x, y]),
        "sum of rows": (lambda: x.sum(0), SUM, [x]),
    }  # fmt: skip
    for name, (work, kernel, inputs) in passes.items():
        if ("fp32" in name or "dtypes" in name) and x.dtype == torch.float32:
            continue
        result = work()
        moved = result.nbytes + sum(each.nbytes for each in inputs)
        cycles = charge(kernel, [*map(operand, inputs)], [operand(result)]).cycles
        of = functools.partial(_moving_rate, moved, cycles)
        yield _row(setting, name, Unit.BYTES_PER_S, moved / setting.seconds(work), of)


def _moving_rate(moved: int, cycles: int, device: Device) -> float:
    rates = DeviceRates.of(device, "bfloat16", TORCH, CALIBRATION, charges_kernels=True)
    return moved / rates.moving_s(moved, cycles)


def _row(
    setting: Setting,
    term: str,
    unit: Unit,
    measured: float,
    of: Callable[[Device], float | None] | None,
    note: str = "",
) -> Row:
    """A row with what `of` reads off the device by its data sheet, and as timed."""
    sheet, bench = setting.machines()
    return Row(
        term=term,
        unit=unit,
        measured=measured,
        from_sheet=of(sheet.device) if of is not None else None,
        from_bench=of(bench.device) if of is not None and bench is not None else None,
        note=note,
    )


class _Tf32:
    """Products of fp32 on the units of TF32, while it is entered."""

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on

    def __enter__(self) -> None:
        torch.backends.cuda.matmul.allow_tf32 = self._is_on

    def __exit__(self, *_: object) -> None:
        torch.backends.cuda.matmul.allow_tf32 = False
