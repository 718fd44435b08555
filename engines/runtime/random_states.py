"""Random states of this process: Python's, numpy's, torch's and its device's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from profiles.errors import FileError


def random_states(device: torch.device | None = None) -> dict[str, Any]:
    """The states of all global generators; that of `device` too where it has its own."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if device is not None and device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def seed_all(seed: int) -> None:
    """Let all global generators begin at `seed`."""
    # `torch.manual_seed` formats the stack for a CUDA that is not there: 0.2 ms, before every step.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def require_random_states(states: dict[str, Any], device: torch.device | None = None) -> None:
    """Raise what `restore_random_states` would; generators are as they were afterwards."""
    before = random_states(device)
    try:
        restore_random_states(states, device)
    finally:
        restore_random_states(before, device)


def restore_random_states(states: dict[str, Any], device: torch.device | None = None) -> None:
    """The inverse of `random_states`; a device that had no state keeps its own.

    Raises:
        FileError: they are none, as in a file that was changed.
    """
    try:
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        torch.set_rng_state(states["torch"])
        if device is not None and device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], device)
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise FileError(f"the saved random states cannot be restored: {error}") from None
