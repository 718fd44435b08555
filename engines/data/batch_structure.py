"""Structure of a batch, which all ranks must have alike: names, dtypes and dimensions.

Rows may differ, and so may lengths: each rank may pad its own rows to the longest of them. A size
that the model cannot take raises there.
"""

from __future__ import annotations

from torch import Tensor

from engines.runtime.rank_agreement import Topic
from profiles.capture.batch.call import Batch
from profiles.capture.batch.dims import ELEMENTS, Dims
from profiles.capture.batch.tree import INSIDE, is_leaf, map_nodes


def batch_topic(batch: Batch, dims: Dims) -> Topic:
    """The structure of this rank's batch, to be compared with the others'.

    Args:
        dims: of the sample; a list with an element a sample is one item, however long it is.
    """
    facts: dict[str, list[str]] = {}

    def visit(name: str, value: object) -> object:
        aspects = [type(value).__name__]
        if isinstance(value, Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            aspects = [dtype, f"{value.dim()} dimension{'s' if value.dim() != 1 else ''}"]
        is_by_sample = dims.get(name) == ELEMENTS and isinstance(value, tuple | list)
        if is_by_sample or is_leaf(value):
            facts[f"`{name}`"] = aspects
        return value if is_by_sample else INSIDE

    map_nodes(visit, batch)
    items = facts.items()
    return Topic(
        "element of the batch",
        dict(sorted(items) if hasattr(batch, "keys") else items),
        "let the loader of every rank yield the same tensors in order",
    )
