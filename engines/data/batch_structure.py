"""Structure of a batch, which all ranks must have alike: names, dtypes and dimensions.

Rows may differ, and so may lengths: each rank may pad its own rows to the longest of them. A size
that the model cannot take raises there.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter

from torch import Tensor

from engines.runtime.rank_agreement import Topic
from profiles.capture.batch import Batch, batch_items


def batch_topic(batch: Batch) -> Topic:
    """The structure of this rank's batch, to be compared with the others'."""
    facts: dict[str, list[str]] = {}
    items = batch_items(batch)
    for name, value in sorted(items, key=itemgetter(0)) if isinstance(batch, Mapping) else items:
        aspects = [type(value).__name__]
        if isinstance(value, Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            aspects = [dtype, f"{value.ndim} dimensions" if value.ndim != 1 else "1 dimension"]
        facts[f"`{name}`"] = aspects
    return Topic(
        "element of the batch",
        facts,
        "let the loader of every rank yield the same tensors in order",
    )
