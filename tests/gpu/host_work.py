"""Host time of operations over that of a kernel of a step, memory that libraries take, and torch's
own depthwise kernels: each beside the constant that the cost model or a capture has for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from advisor.cost.calibration import CALIBRATION, issue_per_s
from advisor.cost.compute.norms import LANES
from advisor.cost.compute.rates import LISTED_OPERATION
from profiles.capture.operators.cudnn_recurrent import BOTH_WAYS, CELLS
from profiles.machine.bench import launch_time
from profiles.model.kernel_cycles import convolution, depthwise
from profiles.trace import scopes
from profiles.workload.optimizers import OPTIMIZERS as PROFILES
from profiles.workload.optimizers import PASS_BYTES
from tests.gpu.case import Case
from tests.gpu.results import Row, Unit
from tests.gpu.setting import LeftOutError, Setting

LAYERS, WIDTH, ROUNDS, CALLS = 20, 16, 5, 20
TENSORS = 100
STEPS, ROWS, STATE = 64, 32, 512  # of recurrent layers: fixed workspaces of 12 to 20 MB are besides
MAPS = ((32, 64, 64), (32, 384, 64), (32, 256, 32))  # rows, channels, edge
DEPTHWISE = ((64, 96, 56, 5, 1), (64, 128, 112, 5, 2))  # rows, channels, edge, kernel, stride


def cases(*, is_small: bool) -> list[Case]:
    """Of part b."""
    every = [
        Case("host work", _host_work, is_small=True),
        Case("buffers of recurrent layers", _recurrent),
        Case("workspaces of convolutions", _workspaces),
        Case("depthwise kernels of torch", _depthwise),
    ]
    return [case for case in every if case.is_small or not is_small]


def _host_work(setting: Setting) -> Iterator[Row]:
    """Of a cast and of a convolution in chains of small layers, and of an optimizer's lists."""
    launch_s = launch_time(setting.device, seconds=0.05 if setting.is_small else 0.5)
    host_s = partial(_host_s, setting, 1 if setting.is_small else CALLS)
    chain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(setting.device)
    x = torch.zeros(4, WIDTH, device=setting.device)
    plain_s, lowered_s = (host_s(partial(_step, chain, x, lowers)) for lowers in (False, True))
    casts = 4 * LAYERS + 2  # weight and bias, and their gradients; what goes in and comes out
    yield _ratio("cast", (lowered_s - plain_s) / casts / launch_s, scopes.CAST)
    maps = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(LAYERS)))
    maps, images = maps.to(setting.device), torch.zeros(2, 8, 8, 8, device=setting.device)
    convolved_s = host_s(partial(_step, maps, images, False)) / (2 * LAYERS)
    charged = 1 + convolution(0, is_half=False).kernels
    yield _ratio("convolution", convolved_s / launch_s, charged)
    parameters = [nn.Parameter(torch.zeros(32, 32, device=setting.device)) for _ in range(TENSORS)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    for name, optimizer in (
        ("adamw", torch.optim.AdamW(parameters, lr=1e-6, foreach=True)),
        ("sgd-momentum", torch.optim.SGD(parameters, lr=1e-6, momentum=0.9, foreach=True)),
    ):
        operations = TENSORS * PROFILES[name].moved_bytes_per_element / PASS_BYTES
        listed = host_s(optimizer.step) / operations / launch_s
        yield _ratio(f"operation of {name} and tensor in a list", listed, LISTED_OPERATION)


def _ratio(term: str, measured: float, charged: float) -> Row:
    return Row(term=term, unit=Unit.RATIO, measured=measured, from_sheet=charged)


def _step(model: nn.Module, x: Tensor, lowers: bool) -> None:
    with torch.autocast(x.device.type, torch.bfloat16, enabled=lowers):
        out = model(x)
    out.float().sum().backward()
    model.zero_grad()


def _host_s(setting: Setting, calls: int, work: Callable[[], object]) -> float:
    """Seconds of the host a call, at the median of rounds that each wait for the device first."""
    samples = []
    for _ in range(ROUNDS):
        setting.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            work()
        samples.append((time.perf_counter() - began) / calls)
    return statistics.median(samples)


def _recurrent(setting: Setting) -> Iterator[Row]:
    """Widths of a step that a layer leaves beside its output, and has room for in a backward."""
    _require_cuda(setting)
    named = {torch.lstm: nn.LSTM, torch.gru: nn.GRU, torch.rnn_tanh: nn.RNN}
    unit = STEPS * ROWS * STATE * 4
    for function, kind in named.items():
        for both_ways in (False, True):
            ways = 1 + both_ways
            layer = kind(STATE, STATE, bidirectional=both_ways).to(setting.device)
            x = torch.randn(STEPS, ROWS, STATE, device=setting.device, requires_grad=True)
            layer(x)[0].sum().backward()
            before = torch.cuda.memory_allocated()
            out = layer(x)[0]
            saved = (torch.cuda.memory_allocated() - before - out.nbytes) / unit / ways
            name = f"{kind.__name__}{', both ways' if both_ways else ''}"
            yield _ratio(f"{name}: saved", saved, CELLS[function].saved)
            gradient = torch.ones_like(out)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            out.backward(gradient)
            room = (torch.cuda.max_memory_allocated() - before) / unit
            gates = ways * CELLS[function].gates + BOTH_WAYS[1] * both_ways
            yield _ratio(f"{name}: room in a backward", room, gates + 1)  # the input's gradient
            del out, gradient, layer, x


def _workspaces(setting: Setting) -> Iterator[Row]:
    """Bytes of a 3 x 3 convolution while it runs, over those of both its maps."""
    _require_cuda(setting)
    for rounds, dtype in (("TF32", torch.float32), ("bf16", torch.bfloat16)):
        torch.backends.cudnn.allow_tf32 = rounds == "TF32"
        for rows, channels, edge in MAPS:
            x = torch.randn(rows, channels, edge, edge, device=setting.device, dtype=dtype)
            weight = torch.randn(channels, channels, 3, 3, device=setting.device, dtype=dtype)
            F.conv2d(x, weight, padding=1)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            out = F.conv2d(x, weight, padding=1)
            extra = torch.cuda.max_memory_allocated() - before - out.nbytes
            maps_bytes = x.nbytes + out.nbytes
            charged = convolution(maps_bytes, is_half=dtype is torch.bfloat16).workspace_bytes
            name = f"{channels} channels, {rounds}"
            yield _ratio(name, extra / maps_bytes, charged / maps_bytes)
            del x, weight, out
    torch.backends.cudnn.allow_tf32 = False


def _depthwise(setting: Setting) -> Iterator[Row]:
    """Seconds of a forward and of a backward of maps that lie channel after channel."""
    _require_cuda(setting)
    device = setting.sheet.device
    for rows, channels, edge, kernel, stride in DEPTHWISE:
        x = torch.randn(rows, channels, edge, edge, device=setting.device)
        weight = torch.randn(channels, 1, kernel, kernel, device=setting.device)
        call = partial(F.conv2d, stride=stride, padding=kernel // 2, groups=channels)
        out = call(x, weight)
        products = out.numel() * kernel**2
        wanted = (
            [stride] * 2,
            [kernel // 2] * 2,
            [1, 1],
            False,
            [0, 0],
            channels,
            [True, True, False],
        )
        works = {
            "forward": partial(call, x, weight),
            "backward": partial(
                torch.ops.aten.convolution_backward, torch.ones_like(out), x, weight, None, *wanted
            ),
        }
        for term, work in works.items():
            is_backward = term == "backward"
            charged = depthwise(products, stride**2, is_backward=is_backward)
            flop = 2 * products * (1 + is_backward)
            rate = device.flop_per_s["float32"].value * CALIBRATION.depthwise
            yield Row(
                term=f"{channels} channels, {kernel} x {kernel}, stride {stride}: {term}",
                unit=Unit.SECONDS,
                measured=setting.seconds(work),
                from_sheet=flop / rate + charged.cycles * LANES / issue_per_s(device),
            )


def _require_cuda(setting: Setting) -> None:
    if not setting.is_cuda:
        raise LeftOutError("kernels and memory of CUDA's libraries")
