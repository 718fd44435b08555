"""Dimensions of a batch by two sizes: the model runs on the sample and on twice its rows."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import nn

from profiles.capture.batch.call import Batch, LossFn, call_model, find_loss, loss_of
from profiles.capture.batch.dims import Dim, Dims, SaidDims, possible_dims, sizes_differ
from profiles.capture.batch.rows import batch_size, repeat_rows
from profiles.capture.batch.tree import batch_items, map_batch
from profiles.capture.fakes.mode import FakeRunMode
from profiles.capture.fakes.tensors import stand_ins
from profiles.capture.frames import summary
from profiles.errors import BatchError
from profiles.torch_compat import without_onednn


def sample_dims(
    model: nn.Module, sample: Batch, loss_fn: LossFn | None, said: SaidDims = None
) -> dict[str, Dim]:
    """The dimensions of the sample. Where its sizes alone leave it open, those with which the model
    runs on twice the rows; nothing is computed.

    Raises:
        BatchError: there are none; names and sizes are in the text.
    """
    choices = possible_dims(sample, said)
    items = dict(batch_items(sample))
    named = {name for name, dim in choices[0].items() if dim is None and _has_dims(items, name)}
    if len(choices) == 1 and (said is not None or not named):
        batch_size(sample, choices[0])
        return choices[0]
    dims = first_that_runs(model, sample, loss_fn, choices)
    if dims is None:
        raise sizes_differ(sample)
    return dims


def _has_dims(items: dict[str, object], name: str) -> bool:
    return getattr(items.get(name), "ndim", 0) > 0


def first_that_runs(
    model: nn.Module, sample: Batch, loss_fn: LossFn | None, choices: Iterable[dict[str, Dim]]
) -> dict[str, Dim] | None:
    """The first dimensions with which model and loss run on twice the rows; None without any."""
    return next((dims for dims in choices if not why_not_twice(model, sample, loss_fn, dims)), None)


def why_not_twice(model: nn.Module, sample: Batch, loss_fn: LossFn | None, dims: Dims) -> str:
    """The reason why the model does not run on the rows twice over, on fake tensors; else empty."""
    runs = [model] if loss_fn is None else [model, loss_fn]
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        stand_ins(runs) as fakes,
        without_onednn(),
        warnings.catch_warnings(action="ignore"),  # of sizes that are only tried
    ):
        try:
            batch = repeat_rows(map_batch(fakes.of, sample), 2, dims)
            with FakeRunMode().on(batch):
                output = call_model(model, batch, has_target=loss_fn is not None)
                if loss_fn is not None or find_loss(output) is not None:
                    loss_of(output, batch, loss_fn)
        except BatchError:
            raise
        except Exception as error:  # the user's own code
            return summary(error)
    return ""
