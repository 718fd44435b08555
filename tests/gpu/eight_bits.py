"""`precision=fp8` beside torchao's own conversion of the same model, where units are of 8 bits.

Exactness of a small model: attention by products, whose sums have one order, so that gradients are
equal to the bit. Steps of large ones, eager and compiled, over those that torchao's users write.
"""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Iterator
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from advisor.auto.parallelize import auto_parallelize
from engines.parallel.parity import largest_difference
from tests.engines.cases import Case as ExactCase
from tests.gpu.case import Case
from tests.gpu.exactness import MODELS, ROWS
from tests.gpu.gains import MODELS as MODELS_OF_GAINS
from tests.gpu.gains import OF_PROGRAMS
from tests.gpu.predict import OPTIMIZERS
from tests.gpu.results import Row, Unit
from tests.gpu.setting import LeftOutError, Setting
from tests.gpu.subjects import Subject, fill
from tests.gpu.training import EVERY, Variant, built, plan_of, there

TURNS = 5
OF_16_BITS = ("precision=bf16", "precision=bf16 compile=true")
OF_8_BITS = ("precision=fp8", "precision=fp8 compile=true")
EXACT = 1e-6
ROUNDED = 0.01  # gradients beside bf16's differ by more, or nothing was rounded to 8 bits


def exactness_cases(*, is_small: bool) -> list[Case]:
    """Of part a; a CPU's are in `tests/engines/blocks/test_eight_bits.py`."""
    if is_small:
        return []
    return [
        Case(f"fp8 beside torchao: gpt, {plan or 'eager'}", functools.partial(_exact, plan), 60.0)
        for plan in ("", "recompute=full")
    ]


def gain_cases(*, is_small: bool) -> list[Case]:
    """Of part e: our step over the one by hand."""
    if is_small:
        return []
    pairs = [(name, text) for name in MODELS_OF_GAINS for text in (*OF_16_BITS, *OF_8_BITS)]
    pairs += [(name, OF_16_BITS[0]) for name in OF_PROGRAMS]
    return [
        Case(f"over one by hand: {name}, {text}", functools.partial(_over, name, text), 120.0)
        for name, text in pairs
    ]


def _require() -> None:
    if find_spec("torchao") is None:
        raise LeftOutError("torchao is not installed")


def by_torchao(model: nn.Module) -> nn.Module:
    """All linear layers of blocks, as torchao's README converts them."""
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(model, module_filter_fn=lambda _, name: "blocks" in name)
    return model


def _exact(plan: str, setting: Setting) -> Iterator[Row]:
    _require()
    subject, device = MODELS["gpt"], setting.device
    torch.manual_seed(1)
    plain = subject.build()
    batch = subject.batch(ROWS)
    parallel = auto_parallelize(
        copy.deepcopy(plain),
        sample=subject.batch(2),
        loss_fn=subject.loss_fn,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        plan=plan or None,
        precision="fp8",
        cluster=setting.sheet,
        global_batch_size=ROWS,
        learns=False,
    )
    ids, targets = (tensor.to(device) for tensor in batch)
    with sdpa_kernel(SDPBackend.MATH):
        ours = parallel.forward_backward(batch).item(), parallel.full_gradients()
        torchaos, bf16 = (
            _backward(model, ids, targets)
            for model in (
                by_torchao(copy.deepcopy(plain).to(device)),
                copy.deepcopy(plain).to(device),
            )
        )
    error = abs(ours[0] / torchaos[0] - 1)
    yield Row(term="loss", unit=Unit.ERROR, measured=error, limit=EXACT)
    worst = largest_difference(ours[1], torchaos[1])
    note = worst.name or ""
    yield Row(term="gradients", unit=Unit.ERROR, measured=worst.value, limit=EXACT, note=note)
    rounded = largest_difference(ours[1], bf16[1]).value
    is_bf16 = float(not rounded > ROUNDED)
    yield Row(term="is bf16", unit=Unit.ERROR, measured=is_bf16, limit=0.0, note=f"{rounded:.3f}")


def _backward(model: nn.Module, ids: Tensor, targets: Tensor) -> tuple[float, dict[str, Tensor]]:
    loss = _loss(model, MODELS["gpt"], ids, targets)
    loss.backward()
    named = model.named_parameters()
    return loss.item(), {name: p.grad for name, p in named if p.grad is not None}


def _loss(model: nn.Module, subject: Subject | ExactCase, ids: Tensor, targets: Tensor) -> Tensor:
    """Of fp32 logits, as our engine and torchtitan take it."""
    assert subject.loss_fn is not None
    with torch.autocast(ids.device.type, torch.bfloat16):
        output = model(ids)
    return subject.loss_fn(output.float(), targets)


def _over(name: str, text: str, setting: Setting) -> Iterator[Row]:
    turns = _turns(name, text, setting)
    setting.release()
    ours, theirs = (statistics.median(each) for each in zip(*turns, strict=True))
    ratio = statistics.median(a / b for a, b in turns)
    note = f"{ours:.4g} s of {theirs:.4g}"
    yield Row(term="step, of the one by hand", unit=Unit.RATIO, measured=ratio, note=note)


def _turns(name: str, text: str, setting: Setting) -> list[list[float]]:
    """Seconds of our step and of one by hand, in turns: clocks and heat are the same for both."""
    subject, variant = EVERY[name], Variant(text)
    plan = plan_of(setting, subject, variant)
    in_eight_bits = plan.precision.product_dtype != plan.precision.dtype
    if in_eight_bits:
        _require()
    batch = there(subject.batch(plan.microbatch_size or 1), setting)
    ids, targets = batch
    parallel = built(setting, subject, name, variant, plan)
    model = subject.module().to_empty(device=setting.device)
    with torch.no_grad():
        for module in model.modules():
            fill(module)
    if in_eight_bits:
        model = by_torchao(model)
    if plan.compile:
        for block in model.blocks:
            block.compile()
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))

    def by_hand() -> None:
        _loss(model, subject, ids, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    works = (lambda: parallel.train_step(batch), by_hand)
    for work in works:
        work()
    return [[setting.seconds(work, at_most_s=0.3) for work in works] for _ in range(TURNS)]
