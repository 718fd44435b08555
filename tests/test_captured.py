"""Profiles that processes of a session share: equal ones, and only those of one subject."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from profiles.capture.capture import capture
from profiles.model.profile import ModelProfile
from tests import captured
from tests.workers import CAPTURED


def _taken(key: Hashable, width: int = 4) -> tuple[ModelProfile, bool]:
    """The profile as a process gets it that has taken none, and whether it captured."""
    captured._captured.cache_clear()
    model, sample = nn.Linear(4, width), (torch.ones(2, 4), torch.zeros(2, dtype=torch.long))
    with mock.patch.object(captured, "capture", wraps=capture) as capturing:
        profile = captured.captured(key, model, sample, loss_fn=F.cross_entropy)
    return profile, capturing.called


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CAPTURED, str(tmp_path))


def test_another_process_reads_an_equal_profile() -> None:
    first, is_first = _taken("linear")
    second, is_captured_again = _taken("linear")
    assert (is_first, is_captured_again) == (True, False)
    assert second == first
    assert second.to_json() == first.to_json()


@pytest.mark.parametrize(("key", "width"), [("other", 4), ("linear", 8)])
def test_another_key_or_another_shape_is_captured(key: str, width: int) -> None:
    _taken("linear")
    assert _taken(key, width)[1]


def test_a_key_that_other_processes_cannot_name_is_not_shared() -> None:
    key = (lambda: None,)
    assert _taken(key)[1]
    assert _taken(key)[1]


def test_without_a_folder_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CAPTURED)
    assert _taken("linear")[1]
    assert _taken("linear")[1]
