"""Gains of compile, graphs, fused optimizers, chunked loss and offload, beside their price.

A model is measured as it is, and again with one thing changed; ratios are over the first. What is
predicted are the same two estimates' ratio.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import nn

from advisor.cost import Estimate
from advisor.inputs.bundled.resnet import ResNet
from engines.plan import Plan
from profiles.torch_compat import map_tensors
from tests.gpu.case import Case
from tests.gpu.predict import EXACT, Predicted, allocated, predicted
from tests.gpu.results import Row, Unit
from tests.gpu.setting import WARM_UP, LeftOutError, Setting
from tests.gpu.subjects import SMALL, Subject, captured, fill, gpt_of, images
from tests.gpu.training import EVERY, Step, Variant, measured, predictions

BASE = Variant("precision=bf16")
SMALL_BASE = Variant()
SHARDED = "shards of one rank"
CHANGES: dict[str, Variant] = {
    "compile": Variant("precision=bf16 compile=true"),
    "fused optimizer": Variant("precision=bf16", "adamw fused"),
    "loss in 8 chunks": Variant("precision=bf16 loss_chunks=8"),
    "full recompute": Variant("precision=bf16 recompute=full"),
    "selective recompute": Variant("precision=bf16 recompute=selective"),
    "activations in main memory": Variant("precision=bf16 offload=activations"),
    "optimizer states in main memory": Variant("precision=bf16 offload=optimizer"),
    "states in main memory, prefetched": Variant("precision=bf16 zero=3 offload=states"),
    SHARDED: Variant("precision=bf16 zero=3"),
    "compile and full recompute": Variant("precision=bf16 compile=true recompute=full"),
    "products in 8 bits, compiled": Variant("precision=fp8 compile=true"),
    "products in 8 bits": Variant("precision=fp8"),
}
MODELS = ("gpt-350m", "gpt-1.3b")
# Of small models, where launches and hooks of Python are most of a step.
OF_PROGRAMS = ("letters, GPT of 11 M", "ViT, 3 M")
SMALL_CHANGES = {
    "loss in 2 chunks": Variant("loss_chunks=2"),
    "products in 8 bits": Variant("precision=fp8"),
}
# Launches take longer than kernels here: what graphs are for.
GRAPHED = gpt_of(layers=12, heads=8, width=512, length=256, vocabulary=8192)
GRAPHED_ROWS = 4


def cases(*, is_small: bool) -> list[Case]:
    changes, models = (SMALL_CHANGES, ("gpt, small",)) if is_small else (CHANGES, MODELS)
    pairs = [(name, change) for name in models for change in changes]
    if not is_small:
        pairs += [(name, SHARDED) for name in OF_PROGRAMS]
    every = [
        Case(
            f"{name}: {change}",
            functools.partial(_run, name, changes[change]),
            limit_s=120.0,
            is_small=is_small,
        )
        for name, change in pairs
    ]
    others = [
        Case("small gpt: CUDA graph", _graph, is_small=is_small),
        Case("ResNet-50: channels last", _channels_last, limit_s=120.0, is_small=is_small),
    ]
    return [*every[:3], *others, *every[3:]]


_BASES: dict[str, Step] = {}
STEP, ALLOCATED = "step, of the plain one", "allocated, of the plain one"
PASSES = "forward and backward, of the plain one"
TERMS: dict[str, Callable[[Estimate], float]] = {STEP: lambda e: e.step_s, ALLOCATED: allocated}


def _base(setting: Setting, name: str) -> Step:
    """Once in a process."""
    if name not in _BASES:
        _BASES[name] = measured(setting, _subject(setting, name), name, _plain(setting))
    return _BASES[name]


def _plain(setting: Setting) -> Variant:
    return SMALL_BASE if setting.is_small else BASE


def _subject(setting: Setting, name: str) -> Subject:
    return (SMALL if setting.is_small else EVERY)[name]


def _run(name: str, variant: Variant, setting: Setting) -> Iterator[Row]:
    if "fp8" in variant.settings and find_spec("torchao") is None:
        raise LeftOutError("torchao is not installed")
    plain = _base(setting, name)
    changed = measured(setting, _subject(setting, name), name, variant)
    both = _both(setting, name, variant)
    yield _ratio(STEP, plain.seconds, changed.seconds, *both, TERMS[STEP])
    yield _ratio(ALLOCATED, plain.allocated_bytes, changed.allocated_bytes, *both, TERMS[ALLOCATED])


def _both(setting: Setting, name: str, variant: Variant) -> tuple[Predicted, Predicted]:
    """Estimates of the plain model, and of the changed one."""
    subject = _subject(setting, name)
    return (
        predictions(setting, subject, name, _plain(setting)),
        predictions(setting, subject, name, variant),
    )


def predicted_again(setting: Setting) -> dict[str, Callable[[], tuple[Predicted, Predicted]]]:
    """Of every case with a change, by its name."""
    return {
        f"{name}: {change}": functools.partial(_both, setting, name, variant)
        for name in (*MODELS, *OF_PROGRAMS)
        for change, variant in CHANGES.items()
    }


def _channels_last(setting: Setting) -> Iterator[Row]:
    """Maps with the channels of a position side by side, over maps channel after channel."""
    plain = Subject(lambda: ResNet(18), images(32), 2, F.cross_entropy)
    plain = plain if setting.is_small else EVERY["ResNet-50"]
    laid_out = replace(
        plain,
        build=lambda: plain.build().to(memory_format=torch.channels_last),
        batch=lambda rows: map_tensors(_side_by_side, plain.batch(rows)),
    )
    for settings in ("", "precision=bf16"):
        variant = Variant(settings, tf32=True)
        steps, estimates = [], []
        for subject, name in ((plain, "ResNet"), (laid_out, "ResNet, channels last")):
            steps.append(measured(setting, subject, name, variant))
            estimates.append(predictions(setting, subject, name, variant))
        one, other = (step.seconds for step in steps)
        yield _ratio(f"{settings or 'TF32'}, {STEP}", one, other, *estimates, TERMS[STEP])


def _side_by_side(tensor: torch.Tensor) -> torch.Tensor:
    is_maps = tensor.dim() == 4
    return tensor.to(memory_format=torch.channels_last) if is_maps else tensor


def _ratio(
    term: str,
    plain: float,
    changed: float,
    before: Predicted,
    after: Predicted,
    of: Callable[[Estimate], float],
) -> Row:
    from_sheet, from_bench = ratios(before, after, of)
    return Row(
        term=term,
        unit=Unit.RATIO,
        measured=changed / plain,
        from_sheet=from_sheet,
        from_bench=from_bench,
        note=f"{changed:.4g} of {plain:.4g}",
    )


def ratios(
    before: Predicted, after: Predicted, of: Callable[[Estimate], float]
) -> tuple[float, float | None]:
    """Predicted gain of a change, from the data sheet and from the bench."""
    has_bench = before.bench is not None and after.bench is not None
    return (
        of(after.sheet) / of(before.sheet),
        of(after.bench) / of(before.bench) if has_bench else None,  # type: ignore[arg-type]
    )


def _graph(setting: Setting) -> Iterator[Row]:
    """Forward and backward of plain torch in bf16, as one graph over launched one by one.

    No engine of ours captures graphs: this is the price that the lever "CUDA graphs" names.
    """
    if not setting.is_cuda:
        raise LeftOutError("graphs are CUDA's")
    model = GRAPHED.module().to(torch.bfloat16).to_empty(device=setting.device)
    with torch.no_grad():
        for module in model.modules():
            fill(module)
    ids, targets = (t.to(setting.device) for t in GRAPHED.batch(GRAPHED_ROWS))  # type: ignore[union-attr]
    loss_fn = GRAPHED.loss_fn
    assert loss_fn is not None

    def step() -> None:
        loss_fn(model(ids), targets).backward()

    def eager() -> None:
        model.zero_grad(set_to_none=True)
        step()

    graph = _captured_graph(model, step)
    replayed_s = setting.seconds(graph.replay)
    eager_s = setting.seconds(eager)
    before, after = (_of_graph(setting, share) for share in (0.0, 1.0))
    yield _ratio(
        "forward and backward, of the plain one", eager_s, replayed_s, before, after, _passes_s
    )
    del graph
    setting.release()


def _captured_graph(model: nn.Module, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """As torch's notes on CUDA semantics say: warmed up on a side stream, gradients made inside."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            model.zero_grad(set_to_none=True)
            step()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step()
    return graph


def _of_graph(setting: Setting, share: float) -> Predicted:
    plan = Plan.parse(f"precision=bf16 microbatch_size={GRAPHED_ROWS}")
    profile = captured(GRAPHED, "small gpt", on_processor=not setting.is_cuda)
    stack = EXACT.model_copy(update={"name": f"graphs {share}", "cuda_graphs": share})
    return predicted(plan, profile, setting.machines(), stack=stack)


def _passes_s(estimate: Estimate) -> float:
    time = estimate.time
    return time.compute_s + time.recompute_s + time.launch_s
