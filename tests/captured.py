"""Profiles that tests take again and again, captured once in a process: a rank is kept, too."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any

from torch import nn

from profiles.capture.batch.call import Batch
from profiles.capture.capture import capture
from profiles.model.profile import ModelProfile


def captured(key: Hashable, model: nn.Module, sample: Batch, **options: Any) -> ModelProfile:
    """The profile that `capture` takes of a model and a sample which `key` names.

    Models of one key may differ in the values of their parameters, and in what is trained.
    """
    trained = tuple((n, p.dtype, p.requires_grad) for n, p in model.named_parameters())
    return _captured(_Subject((key, trained, model.training), model, sample, options))


class _Subject:
    """A model with its sample and options; equal to others of its key."""

    def __init__(self, key: Hashable, *subject: Any) -> None:
        self.key, self.subject = key, subject

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Subject) and self.key == other.key


@lru_cache(maxsize=64)
def _captured(of: _Subject) -> ModelProfile:
    model, sample, options = of.subject
    of.subject = ()  # no cache keeps a model
    return capture(model, sample, **options)
