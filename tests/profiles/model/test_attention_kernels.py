"""The installed release of torch, by which kernels take grouped queries."""

from __future__ import annotations

from importlib import metadata

import pytest

from profiles.model import attention_kernels
from profiles.model.attention_kernels import is_torch_at_least


@pytest.mark.parametrize(
    ("version", "is_later"),
    [("2.9.1", False), ("2.13.0+cpu", False), ("2.14.0a0+git1", True), ("3.0", True), (None, True)],
)
def test_releases_compare_by_number_and_none_is_the_newest(
    version: str | None, is_later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(_: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(attention_kernels.metadata, "version", installed)
    assert is_torch_at_least.__wrapped__(2, 14) is is_later
