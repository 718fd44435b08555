"""Bundled models, which commands name again and again, are captured once."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from profiles.capture.batch.call import Batch
from profiles.model.profile import ModelProfile
from tests.captured import captured


@pytest.fixture(autouse=True)
def _bundled_models_are_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import profiles.capture.capture as module

    own = module.capture

    def capture_once(model: nn.Module, sample: Batch, **options: Any) -> ModelProfile:
        if not type(model).__module__.startswith("advisor.inputs.bundled."):
            return own(model, sample, **options)
        key = tuple((n, getattr(v, "__qualname__", str(v))) for n, v in sorted(options.items()))
        return captured(key, model, sample, **options)

    monkeypatch.setattr(module, "capture", capture_once)
