"""Topics that ranks must agree on before they exchange a tensor: what each was given to train.

Values of parameters and buffers are none: rank 0's are sent to all.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import platform
import zlib
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from engines.apply.build import Build, Training
from engines.runtime.rank_agreement import Topic
from profiles.cache import our_version


def topics_of(build: Build) -> list[Topic]:
    """Software, settings, model and loss, as they were given."""
    loss_fn = build.training.loss_fn
    return [
        Topic("version", _versions(), "install the same versions on every node"),
        # Sums differ in their rounding alone, as between any two kinds of nodes.
        Topic(
            "threads",
            {"of torch": [str(torch.get_num_threads())]},
            "all ranks wait for the one that computes with the fewest: set OMP_NUM_THREADS alike",
            is_needed=False,
        ),
        Topic(
            "parameter",
            _parameters(build.model),
            "build the same model on every rank: the same arguments, modules in the same order,"
            " and the same parameters frozen",
        ),
        Topic(
            "buffer",
            _buffers(build.model),
            "build the same model on every rank, with the same buffers in the same order",
        ),
        Topic("loss function", _code_facts(loss_fn), "give every rank the same `loss_fn`"),
        Topic("setting", _settings(build.training), "give every rank the same settings"),
    ]


def _versions() -> dict[str, list[str]]:
    python = ".".join(platform.python_version_tuple()[:2])
    return {
        "of Python": [python],
        "of torch": [str(torch.__version__)],
        "of parallel-advisor": [our_version()],
    }


def _parameters(model: nn.Module) -> dict[str, list[str]]:
    """Under every name; a tied parameter is described under its first one."""
    facts: dict[str, list[str]] = {}
    first: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in first:
            facts[f"`{name}`"] = [f"the tied `{first[parameter]}`"]
            continue
        first[parameter] = name
        trained = "requires_grad" if parameter.requires_grad else "no requires_grad"
        facts[f"`{name}`"] = [*_layout(parameter), trained]
    return facts


def _buffers(model: nn.Module) -> dict[str, list[str]]:
    named = model.named_buffers(remove_duplicate=False)
    return {f"`{name}`": [*_layout(buffer), *_unsent_values(buffer)] for name, buffer in named}


def _unsent_values(buffer: Tensor) -> list[str]:
    """A checksum of the one value that elements of an expanded buffer share: no rank can write it,
    so rank 0's is not sent."""
    expanded = [
        stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True)
    ]
    if buffer.is_meta or not any(expanded):
        return []
    once = buffer.detach()[tuple(slice(1) if each else slice(None) for each in expanded)]
    values = once.cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    return [f"values of checksum {zlib.crc32(values.numpy().tobytes()):08x}"]


def _layout(tensor: Tensor) -> list[str]:
    return [str(tuple(tensor.shape)), str(tensor.dtype).removeprefix("torch.")]


def _settings(training: Training) -> dict[str, list[str]]:
    return {
        "`max_grad_norm`": [str(training.max_grad_norm)],
        "`seed`": [str(training.seed)],
        "`measure_noise`": [str(training.measure_noise)],
        "`on_nonfinite`": [training.on_nonfinite],
        "`scheduler`": ["none" if training.scheduler is None else "one"],
        "`check_replicas_every`": [str(training.check_replicas_every)],
        "`loss_weight`": [
            ", ".join(text for (text,) in _code_facts(training.loss_weight).values())
        ],
    }


def _code_facts(function: Callable[..., Any] | None) -> dict[str, list[str]]:
    """Name and code of a function, of what a `partial` calls, or of a module's forward."""
    if function is None:
        return {"name": ["none"]}
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, nn.Module):
        function = type(function).forward
    elif not hasattr(function, "__qualname__"):
        function = type(function).__call__
    facts = {"name": [f"{function.__module__}.{function.__qualname__}"]}
    code = getattr(inspect.unwrap(function), "__code__", None)
    if isinstance(code, CodeType):  # builtins have none
        facts["code"] = [_digest(code)]
    return facts


def _digest(code: CodeType) -> str:
    """A hash of what code does; where it was written does not count."""
    parts: list[object] = [code.co_code.hex(), code.co_names]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            parts.append(_digest(constant))
        elif isinstance(constant, frozenset):  # each process has its own order of strings
            parts.append(sorted(map(repr, constant)))
        else:
            parts.append(constant)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]
