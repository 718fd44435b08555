"""Profiles that tests take again and again, captured once: in a process, since a rank is kept, and
in all processes of a session that can name the same subject."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
from collections.abc import Hashable
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import nn

from profiles.capture.batch.call import Batch
from profiles.capture.batch.tree import batch_tensors
from profiles.capture.capture import capture
from profiles.model.profile import ModelProfile
from tests.workers import CAPTURED


def captured(key: Hashable, model: nn.Module, sample: Batch, **options: Any) -> ModelProfile:
    """The profile that `capture` takes of a model and a sample which `key` names.

    Models of one key may differ in the values of their parameters, and in what is trained.
    """
    trained = [(n, p.dtype, tuple(p.shape), p.requires_grad) for n, p in model.named_parameters()]
    shapes = [(tensor.dtype, tuple(tensor.shape)) for tensor in batch_tensors(sample)]
    named = (key, type(model).__qualname__, model.training, tuple(trained), tuple(shapes))
    return _captured(_Subject(named, model, sample, options))


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
    folder, name = os.environ.get(CAPTURED), _name(of.key, options)
    if folder is None or name is None:
        return capture(model, sample, **options)
    path = Path(folder) / name
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # all ranks of a test want the same one at once
        if path.exists():
            saved: ModelProfile = pickle.loads(path.read_bytes())
            return saved
        profile = capture(model, sample, **options)
        whole = path.with_suffix(".new")
        whole.write_bytes(pickle.dumps(profile))
        whole.replace(path)
    return profile


def _name(*content: object) -> str | None:
    """A name that every process gives to these values; None where it cannot: of a lambda."""
    try:
        return hashlib.sha256(pickle.dumps(content)).hexdigest()
    except (AttributeError, pickle.PicklingError, TypeError):
        return None
