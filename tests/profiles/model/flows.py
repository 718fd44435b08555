"""Helpers that read the flow of values between the units of a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from profiles.capture.capture import capture
from profiles.model.flow import Flow

F32 = 4
ROWS, WIDTH = 2, 8


def flow_of(model: nn.Module, *inputs: Tensor) -> Flow:
    return capture(model, inputs or torch.randn(ROWS, WIDTH)).flow


def names(flow: Flow) -> list[tuple[str, str]]:
    return [(flow.calls[e.source].unit, flow.calls[e.target].unit) for e in flow.edges]


def before(flow: Flow, unit: str) -> int:
    return next(number for number, call in enumerate(flow.calls) if call.unit == unit)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)
