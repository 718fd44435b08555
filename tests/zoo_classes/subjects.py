"""A class as it can be trained on one process: the first size and batch that it takes."""

from __future__ import annotations

import functools
import itertools
import re
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from profiles.capture.batch.call import call_model, loss_of
from profiles.capture.batch.rows import split_rows
from tests.matrix.architectures import Architecture
from tests.zoo_classes.classes import class_of
from tests.zoo_classes.configs import SIZES, small_config
from tests.zoo_classes.inputs import LABELS, ROWS, Inputs, field, inputs_for, text

MOST_PARAMETERS = 60_000_000
LIMIT_S = 5.0
"""Of one step."""
TRIES_S = 40.0
"""Of all tries."""


@dataclass(frozen=True)
class Choice:
    """A size of `SIZES` and a batch by its number among those that are tried."""

    size: str
    inputs: int
    images: int = 0

    def __call__(self, name: str) -> Architecture:
        """A row for the matrix's comparison."""
        return subject(name, self)


class NotTrained(Exception):
    """One process does not train the class; the message says why."""


@functools.lru_cache(maxsize=2)
def subject(name: str, choice: Choice) -> Architecture:
    """A row for the matrix's comparison: the class with the config and batch of `choice`."""
    kind, config = class_of(name), _config(name, choice.size)
    inputs = next(itertools.islice(inputs_for(kind, config), choice.inputs, None))
    inputs = with_images(inputs, config, choice.images)
    return Architecture(lambda: _built(name, choice.size), inputs.batch, inputs.loss_fn)


@functools.lru_cache(maxsize=4)
def _config(name: str, size: str) -> Any:
    config = small_config(class_of(name).config_class, size)  # type: ignore[attr-defined]
    config.num_labels = 2 if "QuestionAnswering" in name else LABELS  # a start and an end
    return config


def _built(name: str, size: str) -> nn.Module:
    """In eval mode, in which nothing is dropped; gradients flow all the same."""
    import copy

    kind = class_of(name)
    return kind(copy.deepcopy(_config(name, size))).eval()


def with_images(inputs: Inputs, config: Any, count: int) -> Inputs:
    """So many places for parts of an image (or of sound) in front of each text."""
    if not count:
        return inputs
    names = ("image_token_id", "image_token_index", "media_token_id", "audio_token_id",
             "audio_token_index", "video_token_id", "image_pad_token_id")  # fmt: skip
    if "input_features" in inputs.batch or "input_values" in inputs.batch:
        names = (*names[3:5], *names)
    token = field(config, *names, default=None)
    if token is None or "input_ids" not in inputs.batch:
        return inputs
    places = torch.full((ROWS, count), int(token))
    batch = dict(inputs.batch)
    batch["input_ids"] = torch.cat([places, batch["input_ids"]], 1)
    if isinstance(batch.get("labels"), Tensor) and batch["labels"].ndim == 2:
        batch["labels"] = torch.cat([torch.full((ROWS, count), -100), text(config)], 1)
    return Inputs(batch, inputs.has_own_loss)


def first_that_trains(name: str) -> Choice:
    """The first choice by which one process trains the class, whole and by rows, twice alike.

    Raises:
        NotTrained: none does.
    """
    reasons: list[str] = []
    start = time.monotonic()
    for choice in _choices(name, reasons):
        if time.monotonic() - start > TRIES_S:
            reasons.append("too many tries")
            break
        try:
            _train(name, choice)
            return choice
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {str(error).strip()[:300]}")
            places = missing_places(str(error))
            if places:
                try:
                    again = Choice(choice.size, choice.inputs, places)
                    _train(name, again)
                    return again
                except Exception as further:
                    reasons.append(f"{type(further).__name__}: {str(further).strip()[:300]}")
    raise NotTrained(_likeliest(reasons))


def _choices(name: str, reasons: list[str]) -> Iterator[Choice]:
    for size in SIZES:
        try:
            kind, config = class_of(name), _config(name, size)
            with torch.device("meta"):
                count = sum(p.numel() for p in _built(name, size).parameters())
        except Exception as error:
            reasons.append(f"not built: {type(error).__name__}: {str(error).strip()[:300]}")
            continue
        if count > MOST_PARAMETERS:
            reasons.append(f"not small: {count:,} parameters")
            continue
        yield from (Choice(size, n) for n, _ in enumerate(inputs_for(kind, config)))


def missing_places(text: str) -> int:
    """Places for parts of images a row, from the error of a model that has too few."""
    numbers = re.search(r"do not match\W+tokens\D+(\d+)\D+(\d+)", text)
    return int(numbers[2]) // ROWS if numbers and int(numbers[2]) % ROWS == 0 else 0


def _likeliest(reasons: list[str]) -> str:
    """The first that is about a step, else the last."""
    return next((r for r in reasons if not r.startswith("not ")), reasons[-1] if reasons else "")


def _train(name: str, choice: Choice) -> None:
    architecture = subject(name, choice)
    torch.manual_seed(0)
    model = architecture.build()
    start = time.monotonic()
    first, _ = _step(model, architecture, architecture.batch)
    if time.monotonic() - start > LIMIT_S:
        raise NotTrained(f"a step takes more than {LIMIT_S:.0f} s")
    again, trained = _step(model, architecture, architecture.batch)
    if first != again:
        raise NotTrained(f"the forward is random: its loss is {first}, then {again}")
    if not trained:
        raise NotTrained("no parameter has a gradient that is not zero")
    for rows in split_rows(architecture.batch, [ROWS // 4] * 4):
        _step(model, architecture, rows)


def _step(model: nn.Module, architecture: Architecture, batch: Any) -> tuple[float, int]:
    """The loss, and how many parameters have a gradient."""
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = call_model(model, batch, has_target=architecture.loss_fn is not None)
        loss = loss_of(output, batch, architecture.loss_fn)
        loss.backward()
    value = loss.item()
    if value - value != 0:
        raise NotTrained(f"the loss is {value}")
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not all(bool(g.isfinite().all()) for g in gradients):
        raise NotTrained("a gradient is not finite")
    return value, sum(bool(g.any()) for g in gradients)
