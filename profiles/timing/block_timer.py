"""One unit on a device by itself: a copy of it, run forward and backward against the clock."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from profiles.capture.batch.call import Batch, LossFn
from profiles.capture.calls import CallSpec, inputs_of
from profiles.model.profile import Numerics
from profiles.provenance import Timing
from profiles.torch_compat import tensors_in
from profiles.torch_compat.module_copy import copy_module

# The first runs allocate, choose kernels and warm caches.
WARM_UP = 2
FEWEST, MOST = 5, 50
# Random weights: small, so that nothing overflows in a block's depth; GPT-2's own spread.
WEIGHT_STD = 0.02


def time_unit(
    subject: nn.Module | LossFn,
    calls: Sequence[CallSpec],
    sample: Batch,
    device: torch.device,
    numerics: Numerics,
    budget_s: float,
) -> tuple[Timing, Timing]:
    """All calls of one unit, forward and backward, within about `budget_s`; whatever the unit
    raises by itself comes through."""
    work = _on(subject, device, numerics) if isinstance(subject, nn.Module) else subject
    parameters = (
        [p for p in work.parameters() if p.requires_grad] if isinstance(work, nn.Module) else []
    )
    groups = Counter(call.key() for call in calls)
    by_key = {call.key(): call for call in calls}
    # A loss is computed in fp32 whatever the model ran in.
    inner = Numerics.AS_BUILT if not isinstance(work, nn.Module) else numerics
    timings = []
    with torch.inference_mode(False), torch.enable_grad():
        for key, count in groups.items():
            args, kwargs = inputs_of(by_key[key], sample, device, inner)
            wanted = [*(t for t in tensors_in((args, kwargs)) if t.requires_grad), *parameters]
            timing = _time_call(
                lambda args=args, kwargs=kwargs: work(*args, **kwargs),  # type: ignore[misc]
                wanted,
                device,
                inner,
                budget_s / len(groups),
            )
            timings.append((*timing, count))
    return (
        _sum([(forward, count) for forward, _, count in timings]),
        _sum([(backward, count) for _, backward, count in timings]),
    )


def _on(module: nn.Module, device: torch.device, numerics: Numerics) -> nn.Module:
    """A copy of its own on the device; parameters without values get small random ones."""
    is_meta = any(t.is_meta for t in (*module.parameters(), *module.buffers()))
    made = copy_module(module)
    made = made.to_empty(device=device) if is_meta else made.to(device)
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()) if is_meta else ():
            if tensor.is_floating_point():
                tensor.normal_(0, WEIGHT_STD)
            else:
                tensor.zero_()
        for parameter in made.parameters():
            if numerics is Numerics.BF16 and parameter.dtype == torch.float32:
                parameter.data = parameter.data.to(torch.bfloat16)
            parameter.grad = None
    for part in made.modules():
        _drop_hooks(part)
    return made


def _drop_hooks(module: nn.Module) -> None:
    """A user's hooks are not to see these runs; torch's own make weights (weight_norm)."""
    for name, hooks in vars(module).items():
        if name.endswith("_hooks") and isinstance(hooks, dict):
            for key, hook in list(hooks.items()):
                origin = getattr(hook, "__module__", None) or type(hook).__module__
                if callable(hook) and not str(origin).startswith("torch."):
                    del hooks[key]


def _time_call(
    run: Callable[[], object],
    wanted: list[Tensor],
    device: torch.device,
    numerics: Numerics,
    budget_s: float,
) -> tuple[Timing, Timing]:
    """Forward and backward, in turns, for about `budget_s`."""
    forward_s: list[float] = []
    backward_s: list[float] = []
    begin = time.perf_counter()
    while len(forward_s) < FEWEST + WARM_UP or (
        len(forward_s) < MOST and time.perf_counter() < begin + budget_s
    ):
        with _autocast(device, numerics), _clock(device, forward_s):
            output = run()
        roots = [t for t in tensors_in(output) if t.requires_grad]
        ones = [torch.ones_like(root) for root in roots]
        with _clock(device, backward_s):
            # Not `backward`: nothing is added to any gradient.
            if roots and wanted:
                torch.autograd.grad(roots, wanted, ones, allow_unused=True)
        del output, roots, ones
    return Timing.of(forward_s[WARM_UP:]), Timing.of(backward_s[WARM_UP:])


@contextmanager
def _autocast(device: torch.device, numerics: Numerics) -> Iterator[None]:
    is_on = numerics is Numerics.BF16_AUTOCAST
    with torch.autocast(device.type, torch.bfloat16) if is_on else nullcontext():
        yield


@contextmanager
def _clock(device: torch.device, seconds: list[float]) -> Iterator[None]:
    """Appends the seconds of what runs inside; by the device's own events on CUDA."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        yield
        end.record()
        torch.cuda.synchronize(device)
        seconds.append(start.elapsed_time(end) * 1e-3)  # milliseconds
        return
    begin = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - begin)


def _sum(timings: Sequence[tuple[Timing, int]]) -> Timing:
    return Timing(
        median_s=sum(count * timing.median_s for timing, count in timings),
        low_s=sum(count * timing.low_s for timing, count in timings),
        high_s=sum(count * timing.high_s for timing, count in timings),
        repeats=min(timing.repeats for timing, _ in timings),
    )
